"""Predicts published training runs, and plans the same jobs: one row per run of `cases/published.json`.

    python benchmarks/published.py [NUMBER ...]     # counted from 0
    python benchmarks/published.py --docs           # docs/notes/published.md

`predicted` is the step of the published configuration with what the run's framework fuses, hides and recomputes,
whether it fits or not.  `priced` is that configuration as `plan` prices it: Megatron-LM's defaults, and the least
recomputation that fits; None: it does not fit.  `planned` is the step of the fastest quick plan of all degrees for the
same model, devices and batch, from which `plan` searches on.

A run's `framework` has what differs from Megatron-LM's defaults.  Experts are in turn where Automodel's balanced gate
gives token t the experts after those of token t - 1.  torchtitan's H100s have 96 GB of HBM2e and 500 W; their peak, its
table says, is between 835 and 989 TFLOPS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmark import Benchmark, Row, table

from debubble.costs import Cluster, StepTail, model_units
from debubble.costs.frameworks import MEGATRON, Framework
from debubble.costs.partition import Partition
from debubble.ir import DebubbleError, Placement, RunOptions
from debubble.ir.degrees import Degrees
from debubble.models import Model, models
from debubble.models.architecture import Experts
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.search import quickest
from debubble.planners.degrees.space import Job
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.problem import ModelUnits, Problem
from debubble.schedules import schedules
from debubble.simulator import simulate

CASES = Path(__file__).parent / "cases"
EFFORT = 10.0
GOALS = {"dense": 0.10, "MoE": 0.15}
"""Target median errors."""


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A published run: model, devices, degrees and step time."""

    name: str
    model: Model
    cluster: Cluster
    degrees: Degrees
    seconds: float
    """Published seconds per step."""
    source: str
    sequence_length: int
    dtype: str = "bf16"
    recompute: str | None = None
    """Strategy of all units; None: the smallest recomputation that fits."""
    framework: Framework = MEGATRON
    """What the run's framework fuses and keeps, if it differs from a plan's assumptions."""
    passes: int = 1
    """Number of times that the pipeline is filled and drained per step, with `micro_batches` in total."""

    @staticmethod
    def read(entry: Mapping[str, Any]) -> PublishedRun:
        """Parse a run of the file."""
        fields = dict(entry)
        model = model_of(fields.pop("model"))
        if fields.pop("experts_in_turn", False):
            model = in_turn(model)
        cluster = fields.pop("cluster")
        return PublishedRun(
            model=model, cluster=Cluster.from_dict(cluster if isinstance(cluster, dict) else {"devices": cluster}),
            degrees=Degrees(**fields.pop("degrees")),
            framework=replace(MEGATRON, keeps_copies=False, **fields.pop("framework", {})), **fields,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """`dense`, or `MoE` for a mixture of experts."""
        return "dense" if self.model.experts is None else "MoE"

    @property
    def job(self) -> Job:
        """The same model, devices and batch with all choices free."""
        return Job(
            model=self.model, cluster=self.cluster, global_batch=self.degrees.global_batch,
            options=RunOptions(sequence_length=self.sequence_length, dtype=self.dtype),
        )  # fmt: skip


def model_of(entry: str | Mapping[str, Any]) -> Model:
    """A model by name, by changes of a named model's config (`of`), or by a full config."""
    if isinstance(entry, str):
        return models[entry]
    base = models[entry["of"]].config if "of" in entry else {}
    return Model.from_hf({**base, **{name: value for name, value in entry.items() if name != "of"}})


def in_turn(model: Model) -> Model:
    """The model with tokens routed to experts in turn."""
    layers = tuple(
        replace(layer, mlp=replace(layer.mlp, reach=layer.mlp.per_token / layer.mlp.count))
        if isinstance(layer.mlp, Experts) else layer
        for layer in model.per_layer
    )  # fmt: skip
    return replace(model, per_layer=layers)


RUNS = tuple(PublishedRun.read(entry) for entry in json.loads((CASES / "published.json").read_text()))


def problem_of(run: PublishedRun) -> Problem:
    """The published configuration's problem, with its framework's costs."""
    options, pipeline = run.job.run_options(run.degrees), run.degrees.pipeline
    units = model_units(run.model, run.cluster, options, pipeline=pipeline, framework=run.framework)
    tail = StepTail(
        model=run.model, cluster=run.cluster, options=options, pipeline=pipeline, framework=run.framework
    )  # fmt: skip
    problem = run.job.problem(replace(run.degrees, chunks=run.degrees.chunks or 1))
    return replace(problem, workload=ModelUnits(units), tail=tail)


def predicted(run: PublishedRun) -> float:
    """Seconds of the published configuration's step."""
    problem, chunks = problem_of(run), run.degrees.chunks or 1
    if run.recompute is None:
        return quick_step(problem)[0]
    assert isinstance(problem.workload, ModelUnits)
    assert problem.tail is not None
    units = problem.workload.units
    lengths = balanced_counts(units, problem.devices * chunks)
    partition = Partition.cut(units, lengths, strategy=run.recompute)
    costs = replace(units.stage_costs(partition, Placement.looped(problem.devices, chunks)), memory_limit=None)
    name = "1f1b" if chunks == 1 else "interleaved"
    micro_batches = problem.micro_batches // run.passes
    schedule = schedules[name](devices=problem.devices, micro_batches=micro_batches, chunks=chunks)
    timeline = simulate(replace(schedule, fused_recompute=partition.recomputing), costs)
    return run.passes * float(timeline.makespan) + problem.tail.of_schedule(schedule, costs)


def priced(run: PublishedRun) -> float | None:
    """Seconds of the published configuration's step as `plan` prices it; None if nothing of it fits."""
    try:
        return quick_step(run.job.problem(replace(run.degrees, chunks=run.degrees.chunks or 1)))[0]
    except DebubbleError:
        return None


def row(run: PublishedRun) -> Row:
    """One run's figures."""
    best = quickest(replace(run.job, effort=EFFORT)).search
    fastest = best.configurations[0]
    return {
        "name": run.name, "kind": run.kind, "cluster": run.cluster.to_dict()["devices"], "dtype": run.dtype,
        "batch": run.degrees.global_batch, "sequence_length": run.sequence_length, "degrees": str(run.degrees),
        "recompute": run.recompute, "source": run.source, "published": run.seconds, "predicted": predicted(run),
        "priced": priced(run), "planned": fastest.step_time, "plan": f"{fastest.degrees}; {fastest.schedule}",
        "left": best.unplanned,
    }  # fmt: skip


def page(rows: list[Row]) -> str:
    """The documentation page of the rows."""
    lines = [
        "# Published runs",
        "",
        "What experts chose and measured, what debubble predicts for it, and what it plans instead.",
        "",
        *_summary(rows),
        "",
        table(
            (
                "#",
                "run",
                "published configuration",
                "published",
                "predicted",
                "error",
                "priced",
                "planned",
                "ratio",
                "plan",
            ),
            (_cells(number, row) for number, row in enumerate(rows, 1)),
        ),
        "",
        (CASES / "published.md").read_text(),
        table(("#", "source"), ((str(number), row["source"]) for number, row in enumerate(rows, 1))),
        "",
        "Written by `python benchmarks/published.py --docs` from `benchmarks/results/published.json`; the runs are in"
        " `benchmarks/cases/published.json`.",
        "",
    ]
    return "\n".join(lines)


def _summary(rows: list[Row]) -> list[str]:
    lines = []
    for kind, goal in GOALS.items():
        errors = [abs(_error(row)) for row in rows if row["kind"] == kind]
        within = sum(error <= goal for error in errors)
        lines.append(
            f"* {len(errors)} {kind} runs: the median error is {100 * median(errors):.1f}%, the worst"
            f" {100 * max(errors):.1f}%; {within} are within {100 * goal:.0f}%."
        )
    compared = [row for row in rows if row["priced"] is not None and row["planned"] is not None]
    unpriced = sum(row["priced"] is None for row in rows)
    faster = sum(row["planned"] <= row["priced"] * (1 + 1e-9) for row in compared)
    lines.append(
        f"* The plan is at least as fast as the published configuration, by debubble's own prices, for {faster} of the"
        f" {len(compared)} that fit and were planned; {unpriced} do not fit by its memory rule."
    )
    return lines


def _error(row: Row) -> float:
    return float(row["predicted"]) / float(row["published"]) - 1


def _cells(number: int, row: Row) -> list[str]:
    both = row["priced"] is not None and row["planned"] is not None
    return [
        str(number),
        f"{row['name']}, {row['cluster']}, {row['dtype']}, {row['batch']} x {row['sequence_length']}",
        row["degrees"],
        *(f"{row[key]:.4g}" for key in ("published", "predicted")),
        f"{100 * _error(row):+.1f}%",
        *("-" if row[key] is None else f"{row[key]:.4g}" for key in ("priced", "planned")),
        f"{row['priced'] / row['planned']:.2f}" if both else "-",
        row["plan"],
    ]


BENCHMARK = Benchmark(
    name="published", about=__doc__, cases={str(number): run for number, run in enumerate(RUNS)}, measure=row,
    pages={"notes/published.md": page},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
