"""Steps of one long sequence over CPU ranks, sliced and unsliced, compared with the simulator.

    python benchmarks/sliced_steps.py [CASE ...]
    python benchmarks/sliced_steps.py --docs         # the table of docs/runtime.md

Ranks of one thread each over Gloo train the same small Llama on one sequence by Seq1F1B, in turns within each round.
`measured` is the median step with slices over that without; `predicted` is the same of simulated steps whose
operations take what they took, by kind and stage, in the step with slices and in that without.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from benchmark import Benchmark, Row, table
from even_plan import even_plan

import debubble as db
from debubble.ir import Kind, RunOptions, StageCosts, Trace
from debubble.ir.ops import Op
from debubble.models import ModelConfig
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import DistributedTransport
from debubble.simulator import simulate

LENGTH, SLICES, ROUNDS = 2048, 8, 8
MODEL: dict[str, Any] = {
    **db.models["llama-tiny"].config, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": LENGTH,
}  # fmt: skip


def pipeline_of(ranks: int, slices: int) -> Pipeline:
    """One sequence in this many slices, over all ranks."""
    schedule = db.schedules["seq1f1b"](devices=ranks, micro_batches=1, slices=slices)
    options = RunOptions(dtype="fp32", sequence_length=LENGTH, slices=slices)
    plan = even_plan(schedule, ModelConfig.from_hf(MODEL).units, options, model=MODEL)
    return Pipeline(None, plan, transport=DistributedTransport())


def work(rank: int, ranks: int, folder: str) -> None:
    """One rank; rank 0 writes the medians and the simulated steps to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    tokens = torch.randint(0, 512, (1, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    pipelines = {slices: pipeline_of(ranks, slices) for slices in (1, SLICES)}
    seconds: dict[int, list[float]] = {slices: [] for slices in pipelines}
    traces: dict[int, Trace] = {}
    for number in range(ROUNDS + 2):
        for slices, pipeline in pipelines.items():
            dist.barrier()
            start = time.perf_counter()
            pipeline.step(tokens)
            dist.barrier()
            if number >= 2:
                seconds[slices].append(time.perf_counter() - start)
            traces[slices] = pipeline.measured.gather_trace()
    if rank == 0:
        measured = {slices: statistics.median(times) for slices, times in seconds.items()}
        predicted = {slices: simulated(ranks, slices, trace) for slices, trace in traces.items()}
        row = {
            "ranks": ranks,
            "measured": round(measured[SLICES] / measured[1], 3),
            "predicted": round(predicted[SLICES] / predicted[1], 3),
        }
        Path(folder, "row.json").write_text(json.dumps(row))
    dist.destroy_process_group()


def simulated(ranks: int, slices: int, trace: Trace) -> float:
    """Simulated step of this order with the mean times of its operations."""
    times: defaultdict[tuple[Kind, int], list[float]] = defaultdict(list)
    for event in trace.steps[0].events:
        op = Op.parse(event.name) if event.name[1:2] in ("F", "B") else None
        if op is not None:
            times[op.kind, op.stage].append(event.end - event.start)
    forward, backward = ([statistics.mean(times[kind, s]) for s in range(ranks)] for kind in (Kind.F, Kind.B))
    costs = StageCosts.of(stages=ranks, forward=forward, backward_input=backward, backward_weight=0)
    schedule = db.schedules["seq1f1b"](devices=ranks, micro_batches=1, slices=slices)
    return float(simulate(schedule, costs).makespan)


def measure(ranks: int) -> Row:
    """Ratios for this many ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(ranks, folder), nprocs=ranks)
        row: Row = json.loads(Path(folder, "row.json").read_text())
        return row


def page(rows: list[Row]) -> str:
    """One line per number of ranks."""
    lines = [(str(row["ranks"]), f"{row['measured']:.2f}", f"{row['predicted']:.2f}") for row in rows]
    return table(("ranks", f"step with {SLICES} slices over one without, measured", "predicted"), lines)


BENCHMARK = Benchmark(
    name="sliced_steps", about=__doc__, measure=measure, cases={"2 ranks": 2, "4 ranks": 4},
    pages={"runtime.md#sliced steps": page},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
