"""Steps of small tensors: what the host needs per operation, beside torch.distributed.pipelining.

    python benchmarks/small_steps.py [--rounds 12]      # into benchmarks/results/small_steps.json
    python benchmarks/small_steps.py docs               # docs/runtime.md, from these results

Two ranks of one thread each over Gloo train the same modules by the same schedule, in turns within each round.  Small
tensors show the time of calls alone, which on a GPU is what the host must stay ahead of; at a hidden size of 512
products take most of it.  A ratio is debubble's over torch's: of the medians of both ranks' CPU time together, and of
the wall time.
"""

from __future__ import annotations

import argparse
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
from marks import write_between
from provenance import measured_by
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import debubble as db
from debubble.ir import PlannedUnit, RunOptions, StageCosts
from debubble.plans import Plan

RESULTS = Path(__file__).parent / "results" / "small_steps.json"
PAGE = Path(__file__).parents[1] / "docs" / "runtime.md"
BEGIN, END = "<!-- small steps: written by benchmarks/small_steps.py docs -->", "<!-- end of small steps -->"
RANKS, LAYERS, MICRO_BATCHES, VOCABULARY = 2, 8, 8, 256
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


def work(rank: int, store: str, rounds: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    rows = []
    for size, (hidden, length, steps) in SIZES.items():
        for name in SCHEDULES:
            stages = db.schedules[name](devices=RANKS, micro_batches=MICRO_BATCHES).stages
            bounds = [0, *(1 + round(LAYERS * s / stages) for s in range(1, stages)), LAYERS + 2]
            pair = Ours(name, hidden, bounds), Torchs(name, hidden, bounds, rank)
            rows.append({"size": size, "schedule": name, **ratios(pair, length, steps, rounds)})
    if rank == 0:
        Path(out).write_text(json.dumps(rows))
    dist.destroy_process_group()


def ratios(pair: Sequence[Ours | Torchs], length: int, steps: int, rounds: int) -> dict[str, float]:
    """Debubble's time over torch's, by CPU and by wall."""
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, VOCABULARY, (2, MICRO_BATCHES, length), generator=generator)
    cpu: list[list[float]] = [[], []]
    wall: list[list[float]] = [[], []]
    for number in range(rounds + 2):
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


def page(rows: list[dict[str, Any]]) -> str:
    lines = ["| schedule | hidden 32, CPU | wall | hidden 512, CPU | wall |", "| --- | --- | --- | --- | --- |"]
    for name in SCHEDULES:
        found = {row["size"]: row for row in rows if row["schedule"] == name}
        cells = [f"{found[size][what]:.2f}" for size in SIZES for what in ("cpu", "wall")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["docs"])
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    if given.what == "docs":
        write_between(PAGE, BEGIN, END, page(json.loads(RESULTS.read_text())["rows"]))
        return
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "rows.json")
        mp.spawn(work, args=(str(Path(folder) / "store"), given.rounds, out), nprocs=RANKS)
        rows = json.loads(Path(out).read_text())
    RESULTS.write_text(json.dumps({**measured_by(), "rows": rows}, indent=1) + "\n")
    print(page(rows))


if __name__ == "__main__":
    main()
