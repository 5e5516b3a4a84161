"""Predicts measured runs that no cost was fitted to, and writes how far off the predictions are.

    python -m measured [ID ...]        (in benchmarks/)

`published.json` has a record a run, from frameworks' performance pages, papers and reports: degrees, options, seconds
per step and memory of the fullest GPU where they are given.  A run is predicted as `debubble import` predicts the job
of a configuration file.  The summary is what `debubble plan` says of its own accuracy (`costs/accuracy.py`); a test
holds the two together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark import Benchmark, Row

from debubble.costs import Cluster
from debubble.errors import DebubbleError
from debubble.imports.job import ImportedJob, even_layers
from debubble.ir import RunOptions
from debubble.models import Model, named_model
from debubble.planners.plan_step import seconds_per_step
from debubble.simulator import simulate

RUNS = Path(__file__).with_name("published.json")
GIB = 2**30
OPTIONS = ("micro_batch_size", "tensor", "context", "expert", "expert_tensor", "dtype", "lora", "quantize")


def predicted(run: Mapping[str, Any]) -> tuple[float, float]:
    """Seconds per step, and GiB of the fullest GPU."""
    model = named_model(run["model"]) if isinstance(run["model"], str) else Model.from_hf(run["model"])
    cluster = Cluster.from_dict(run["cluster"]) if isinstance(run["cluster"], dict) else Cluster.parse(run["cluster"])
    pipeline, chunks, recompute = run.get("pipeline", 1), run.get("chunks", 1), run.get("recompute")
    data = run.get("data") or cluster.count // (pipeline * run.get("tensor", 1) * run.get("context", 1))
    divided = data * run.get("context", 1) > 1
    options = RunOptions(
        sequence_length=run["sequence_length"], data=data, zero=run.get("zero", 1) if divided else 0,
        **{name: run[name] for name in OPTIONS if run.get(name) is not None},
    )  # fmt: skip
    job = ImportedJob(
        target=run.get("target", "megatron"), model=model, options=options, pipeline=pipeline,
        micro_batches=run["micro_batches"],
        layers=tuple(run.get("layers") or even_layers(model.layers, pipeline * chunks)),
        order="interleaved" if chunks > 1 else "1f1b",
        strategies=dict.fromkeys(range(model.layers), (recompute, recompute)) if recompute else {},
    )  # fmt: skip
    plan = job.plan(cluster)
    timeline = simulate(plan.schedule, plan.costs.with_limit(None))
    return seconds_per_step(plan, timeline), max(map(float, timeline.peak_memory)) / GIB


def row_of(run: Mapping[str, Any]) -> Row:
    """A run's prediction beside what was measured."""
    row: Row = {"run": run["name"]}
    try:
        step, memory = predicted(run)
    except DebubbleError as error:
        return row | {"refused": str(error)}
    row |= {"step": step, "memory": memory}
    if "step_seconds" in run:
        row |= {"measured_step": run["step_seconds"], "step_error": step / run["step_seconds"] - 1}
    if "memory_gib" in run:
        row |= {"measured_memory": run["memory_gib"], "memory_error": memory / run["memory_gib"] - 1}
    return row


def summary(errors: Sequence[float]) -> dict[str, float]:
    """The number of runs, and the errors that half of them and nine in ten do not exceed."""
    sizes = sorted(map(abs, errors))
    return {"runs": len(sizes), "half": sizes[len(sizes) // 2], "most": sizes[int(0.9 * len(sizes))]}


BENCHMARK = Benchmark(
    name="measured", about=__doc__, measure=row_of, cases={run["id"]: run for run in json.loads(RUNS.read_text())}
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
    for what in ("step", "memory"):
        errors = summary([row[f"{what}_error"] for row in BENCHMARK.rows() if f"{what}_error" in row])
        print(f"{what}: half of {errors['runs']} within {errors['half']:.1%}, nine in ten within {errors['most']:.1%}")
