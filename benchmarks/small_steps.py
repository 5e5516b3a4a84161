"""Steps with small tensors: host time per operation, compared with torch.distributed.pipelining.

    python benchmarks/small_steps.py [CASE ...]
    python benchmarks/small_steps.py --docs         # the table of docs/runtime.md

Two ranks of one thread each over Gloo train the same modules by the same schedule, in turns within each round.  Small
tensors show the time of calls alone, which on a GPU is what the host must stay ahead of; at a hidden size of 512
products take most of it.  A ratio is debubble's over torch's: of the medians of both ranks' CPU time together, and of
the wall time.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark import Benchmark, Row, table
from pipelines import Block, Step, debubbles, torchs
from torch import nn

import debubble as db

RANKS, LAYERS, MICRO_BATCHES, VOCABULARY, ROUNDS = 2, 8, 8, 256, 40
SIZES = {"small": (32, 16, 4), "large": (512, 128, 1)}
"""Hidden size, tokens per micro-batch, and number of steps that are timed together."""
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble"}
"""debubble's name of a schedule -> torch's."""


def stages_of(hidden: int, count: int) -> list[nn.Sequential]:
    """A language model in this many stages."""
    torch.manual_seed(0)
    blocks = (Block(hidden, 4 * hidden, max(1, hidden // 64)) for _ in range(LAYERS))
    modules = [nn.Embedding(VOCABULARY, hidden), *blocks, nn.Linear(hidden, VOCABULARY)]
    bounds = [0, *(1 + round(LAYERS * s / count) for s in range(1, count)), LAYERS + 2]
    return [nn.Sequential(*modules[a:b]) for a, b in pairwise(bounds)]


def work(rank: int, folder: str, size: str, name: str) -> None:
    """One rank, which runs a case with both; rank 0 writes the ratios to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    hidden, length, steps = SIZES[size]
    schedule = db.schedules[name](devices=RANKS, micro_batches=MICRO_BATCHES)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (MICRO_BATCHES, length + 1), generator=generator)
    modules = stages_of(hidden, schedule.stages)
    local_modules = {stage: modules[stage] for stage in schedule.placement.stages_of[rank]}
    pair = (
        debubbles(schedule, stages_of(hidden, schedule.stages), tokens),
        torchs(SCHEDULES[name], local_modules, schedule.stages, MICRO_BATCHES, tokens),
    )
    row = ratios(pair, steps)
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def ratios(pair: Sequence[Step], steps: int) -> dict[str, float]:
    """Ratios of debubble's time to torch's, in CPU and wall time."""
    cpu: list[list[float]] = [[], []]
    wall: list[list[float]] = [[], []]
    for number in range(ROUNDS + 2):
        for which, step in enumerate(pair):
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            used = torch.tensor(time.process_time() - before, dtype=torch.float64)
            dist.barrier()
            seconds = time.perf_counter() - start
            dist.all_reduce(used)
            if number >= 2:
                cpu[which].append(float(used))
                wall[which].append(seconds)
    return {
        clock: round(statistics.median(ours) / statistics.median(theirs), 3)
        for clock, (ours, theirs) in {"cpu": cpu, "wall": wall}.items()
    }


def measure(case: tuple[str, str]) -> Row:
    """Ratios of a schedule with tensors of a size."""
    size, name = case
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, size, name), nprocs=RANKS)
        return {"size": size, "schedule": name, **json.loads(Path(folder, "row.json").read_text())}


def page(rows: list[Row]) -> str:
    """One line per schedule."""
    row_of = {(row["size"], row["schedule"]): row for row in rows}
    lines = [
        (name, *(f"{row_of[size, name][key]:.2f}" for size in SIZES for key in ("cpu", "wall"))) for name in SCHEDULES
    ]
    return table(("schedule", "hidden 32, CPU", "wall", "hidden 512, CPU", "wall"), lines)


BENCHMARK = Benchmark(
    name="small_steps", about=__doc__, measure=measure, pages={"runtime.md#small steps": page},
    cases={f"{size} {name}": (size, name) for size in SIZES for name in SCHEDULES},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
