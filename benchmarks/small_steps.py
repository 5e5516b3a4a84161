"""Steps of small tensors: what the host needs per operation, beside torch.distributed.pipelining.

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
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as functional
from benchmark import Benchmark, Row, table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import debubble as db
from debubble.ir import Plan, PlannedUnit, RunOptions, StageCosts

RANKS, LAYERS, MICRO_BATCHES, VOCABULARY, ROUNDS = 2, 8, 8, 256, 12
SIZES = {"small": (32, 16, 4), "large": (512, 128, 1)}
"""Hidden size, tokens per micro-batch, and steps that are timed together."""
SCHEDULES: dict[str, tuple[str, Callable[[int], list[int]]]] = {
    "gpipe": ("GPipe", lambda rank: [rank]),
    "1f1b": ("1F1B", lambda rank: [rank]),
    "interleaved": ("Interleaved1F1B", lambda rank: [rank, rank + RANKS]),
    "zb-v": ("ZBVZeroBubble", lambda rank: [rank, 2 * RANKS - 1 - rank]),
}
"""By debubble's name, torch's, and the stages of a rank."""


class Block(nn.Module):
    """A transformer's layer: attention and an MLP, each behind a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [rows, length, hidden] to as many."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, min(64, x.shape[-1]))).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(functional.gelu(self.up(self.norms[1](x))))
        return y


def modules(hidden: int) -> list[nn.Module]:
    """A language model as a list of modules."""
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY))
    return [nn.Embedding(VOCABULARY, hidden), *(Block(hidden) for _ in range(LAYERS)), head]


class Ours:
    """A step by debubble."""

    def __init__(self, name: str, hidden: int, bounds: list[int]) -> None:
        schedule = db.schedules[name](devices=RANKS, micro_batches=MICRO_BATCHES)
        units = [PlannedUnit("unit", index) for index in range(bounds[-1])]
        plan = Plan(
            planner="benchmark", schedule=schedule, costs=StageCosts.of(stages=schedule.stages), lower_bound=0,
            partition=tuple(tuple(units[a:b]) for a, b in pairwise(bounds)), options=RunOptions(dtype="fp32"),
        )  # fmt: skip
        self.pipeline = db.Pipeline(nn.Sequential(*modules(hidden)), plan)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run forward and backward."""
        for parameter in self.pipeline.parameters():
            parameter.grad = None
        float(self.pipeline.step({"input_ids": tokens, "targets": targets}))


class Torchs:
    """A step by torch.distributed.pipelining."""

    def __init__(self, name: str, hidden: int, bounds: list[int], rank: int) -> None:
        torchs_name, stages_of = SCHEDULES[name]
        units, own, count = modules(hidden), stages_of(rank), len(bounds) - 1
        self.parts = [nn.Sequential(*units[bounds[s] : bounds[s + 1]]) for s in own]
        stages = [PipelineStage(m, s, count, torch.device("cpu")) for m, s in zip(self.parts, own, strict=True)]
        self.schedule = get_schedule_class(torchs_name)(
            stages[0] if len(stages) == 1 else stages,
            MICRO_BATCHES,
            loss_fn=lambda output, targets: functional.cross_entropy(output.flatten(0, 1), targets.flatten()),
        )
        self.first, self.last = 0 in own, count - 1 in own

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run forward and backward."""
        for part in self.parts:
            part.zero_grad()
        losses: list[Tensor] = []
        more: dict[str, Any] = {"target": targets, "losses": losses} if self.last else {}
        self.schedule.step(*([tokens] if self.first else []), **more)
        sum(float(loss.detach()) for loss in losses)


def work(rank: int, folder: str, size: str, name: str) -> None:
    """One rank, which takes a case's steps by both; rank 0 writes the ratios into the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    hidden, length, steps = SIZES[size]
    stages = db.schedules[name](devices=RANKS, micro_batches=MICRO_BATCHES).stages
    bounds = [0, *(1 + round(LAYERS * s / stages) for s in range(1, stages)), LAYERS + 2]
    found = ratios((Ours(name, hidden, bounds), Torchs(name, hidden, bounds, rank)), length, steps)
    if rank == 0:
        Path(folder, "row.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def ratios(pair: Sequence[Ours | Torchs], length: int, steps: int) -> dict[str, float]:
    """Debubble's time over torch's, by CPU and by wall."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCABULARY, (2, MICRO_BATCHES, length), generator=generator)
    cpu: list[list[float]] = [[], []]
    wall: list[list[float]] = [[], []]
    for number in range(ROUNDS + 2):
        for which, way in enumerate(pair):
            dist.barrier()
            start, before = time.perf_counter(), time.process_time()
            for _ in range(steps):
                way.step(tokens, targets)
            used = torch.tensor(time.process_time() - before, dtype=torch.float64)
            dist.barrier()
            seconds = time.perf_counter() - start
            dist.all_reduce(used)
            if number >= 2:
                cpu[which].append(float(used))
                wall[which].append(seconds)
    return {
        what: round(statistics.median(ours) / statistics.median(theirs), 3)
        for what, (ours, theirs) in {"cpu": cpu, "wall": wall}.items()
    }


def measure(case: tuple[str, str]) -> Row:
    """The ratios of a schedule with tensors of a size."""
    size, name = case
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(folder, size, name), nprocs=RANKS)
        return {"size": size, "schedule": name, **json.loads(Path(folder, "row.json").read_text())}


def page(rows: list[Row]) -> str:
    """A line per schedule."""
    found = {(row["size"], row["schedule"]): row for row in rows}
    lines = [
        (name, *(f"{found[size, name][what]:.2f}" for size in SIZES for what in ("cpu", "wall"))) for name in SCHEDULES
    ]
    return table(("schedule", "hidden 32, CPU", "wall", "hidden 512, CPU", "wall"), lines)


BENCHMARK = Benchmark(
    name="small_steps", about=__doc__, measure=measure, pages={"runtime.md#small steps": page},
    cases={f"{size} {name}": (size, name) for size in SIZES for name in SCHEDULES},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
