"""Where a step's CPU time goes: the compute lane of one device of two, the other's messages supplied at once.

Python's profiler counts the CPU time inside each function alone, so what torch's operators take is apart from what the
runtime takes around them; arithmetic that is written with `+` and `*` counts for the function that it stands in.  It
makes Python look slower than it is, so the shares of the runtime are upper bounds.
Writes `benchmarks/results/step_profile.json`.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import time
from pathlib import Path
from typing import Any

import torch
from provenance import measured_by

import debubble as db
from debubble.ir import Op, lower
from debubble.runtime import Pipeline
from debubble.runtime.distributed.single_rank import SingleRankTransport

MODEL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
LENGTH, MICRO_BATCHES, STEPS = 256, 8, 3

PARTS = {
    "saved tensors: ledger and tape": ("memory/",),
    "stages": ("models/stage",),
    "units and their operators, in Python": (
        "runtime/models/",
        "runtime/operators",
        "matrix_products",
        "tensor_parallel",
        "context_parallel",
    ),
    "lanes, events, trace": ("execution/", "transport", "single_rank", "threading"),
    "parameters, batch, loss": ("parameters/", "batch", "topology", "pipeline", "data_parallel"),
}
"""Files by the part that they are of; the first that fits counts."""


def part_of(file: str, function: str) -> str:
    """The part of the runtime that a function belongs to; torch's own operators are one."""
    if "debubble" not in file:
        return "torch" if file == "~" or "torch" in file else "Python's library"
    return next((part for part, names in PARTS.items() if any(name in file for name in names)), "others")


def small(op: Op, buffer: torch.Tensor) -> None:
    """Fill a message with small numbers."""
    buffer.fill_(1e-3)


def pipeline_of(schedule: str) -> Pipeline:
    """Device 0 of two."""
    cluster = db.Cluster.parse("2xCPU")
    options: dict[str, Any] = {"sequence_length": LENGTH, "dtype": "fp32", "micro_batches": MICRO_BATCHES}
    plan = db.plan(db.Model.from_hf(MODEL), cluster, planner="dapple", **options)
    made = db.schedules[schedule](devices=2, micro_batches=MICRO_BATCHES, costs=plan.costs)
    plan = type(plan)(**{**vars(plan), "schedule": made})
    supplied = SingleRankTransport(lower(made, plan.costs), 0, small)
    return Pipeline(None, plan, transport=supplied)


def profile(schedule: str) -> dict[str, Any]:
    """Seconds of a step on the compute lane, and the share of each part."""
    pipeline = pipeline_of(schedule)
    batch = torch.randint(512, (MICRO_BATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        pipeline.step(batch)
    profiler = cProfile.Profile(time.thread_time)
    profiler.enable()
    for _ in range(STEPS):
        pipeline.step(batch)
    profiler.disable()
    seconds: dict[str, float] = {}
    for (file, _, function), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        part = part_of(file, function)
        seconds[part] = seconds.get(part, 0.0) + own
    total = sum(seconds.values())
    shares = {part: round(s / total, 4) for part, s in sorted(seconds.items(), key=lambda item: -item[1])}
    return {"seconds_per_step": total / STEPS, "shares": shares}


def main() -> None:
    """Profile 1F1B and ZB-H1, and print and save the shares."""
    torch.set_num_threads(1)
    result = {**measured_by(), "schedules": {name: profile(name) for name in ("1f1b", "zb-h1")}}
    path = Path(__file__).with_name("results") / "step_profile.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
