"""What compiled units bring and cost: a step of a small Llama on one device, beside the same step uncompiled.

    python benchmarks/compiled_units.py [--rounds 9] [--output benchmarks/results/compiled_units.json]

Rounds alternate between the two; times are CPU times of one thread, and the ratio is of their medians.  Bytes are what
the runtime counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from provenance import measured_by

import debubble as db
from debubble.ir import PlannedUnit, RunOptions
from debubble.models import ModelConfig
from debubble.plans import ModelOnCluster, Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads

MODEL: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8192, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
MICRO_BATCHES, LENGTH = 2, 256


@dataclass(frozen=True)
class Row:
    """A dtype and a strategy of recomputation, with and without compiled units."""

    dtype: str
    recompute: str
    plain_seconds: float
    compiled_seconds: float
    ratio: float
    plain_bytes: int
    compiled_bytes: int
    """Most bytes of saved activations."""
    first_step_seconds: float
    """On the clock, of the first compiled step: compilation is most of it."""


def plan_of(dtype: str, recompute: str) -> Plan:
    units = tuple(PlannedUnit(u.type, u.layer, recompute) for u in ModelConfig.from_hf(MODEL).units)
    schedule = db.schedules["1f1b"](devices=1, micro_batches=MICRO_BATCHES)
    if recompute != "none":
        schedule = db.Schedule(**{**vars(schedule), "fused_recompute": frozenset({0})})
    return Plan(
        planner="benchmark", schedule=schedule, costs=db.StageCosts.of(stages=1), lower_bound=0, partition=(units,),
        model_on_cluster=ModelOnCluster(ModelConfig.from_hf(MODEL), db.Cluster.parse("1xCPU")),
        options=RunOptions(dtype=dtype),
    )  # fmt: skip


def measured(dtype: str, recompute: str, rounds: int, transport: Threads) -> Row:
    plan = plan_of(dtype, recompute)
    pipelines = [Pipeline(None, plan, transport=transport, compile=compile) for compile in (False, True)]
    tokens = torch.randint(0, MODEL["vocab_size"], (MICRO_BATCHES, LENGTH + 1))
    begin = time.perf_counter()
    pipelines[1].step(tokens)
    first = time.perf_counter() - begin
    seconds: list[list[float]] = [[], []]
    for _ in range(rounds + 1):
        for pipeline, times in zip(pipelines, seconds, strict=True):
            begin = time.thread_time()
            pipeline.step(tokens)
            times.append(time.thread_time() - begin)
    plain, compiled = (statistics.median(times[1:]) for times in seconds)
    return Row(
        dtype, recompute, round(plain, 4), round(compiled, 4), round(compiled / plain, 3),
        pipelines[0].measured.peak_activation, pipelines[1].measured.peak_activation, round(first, 1),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "compiled_units.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for dtype in ("fp32", "bf16"):
        for recompute in ("none", "full"):
            (row,) = Threads.run(1, partial(measured, dtype, recompute, given.rounds))
            rows.append(asdict(row))
            print(rows[-1], flush=True)
    settings = {"model": MODEL, "micro_batches": MICRO_BATCHES, "length": LENGTH, "rounds": given.rounds}
    given.output.write_text(json.dumps({**measured_by(), **settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
