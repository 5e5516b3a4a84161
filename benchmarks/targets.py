"""Plans for every target compared with debubble's own: ten models on five clusters.

    python benchmarks/targets.py ["MODEL on CLUSTER" ...]
    python benchmarks/targets.py --docs         # the tables of docs/exports.md and docs/notes/targets.md

A pipeline of eight devices (of all, where there are fewer), replicas with ZeRO-1 on the others, 64 sequences of 2048
tokens; each plan is the faster of AdaPipe's and the portfolio's.  A row plans without a target and for every target.
Every plan of the row that a target runs as it is competes for the fastest one with that target's levers, with the
target's memory; a target's own plan is exported, and what the export says of it is kept.
"""

from __future__ import annotations

import sys
from statistics import geometric_mean
from textwrap import fill
from typing import Any

from benchmark import ROOT, Benchmark, Row, table

import debubble as db
from debubble.costs.frameworks import TARGET
from debubble.exports import exports
from debubble.ir import DebubbleError, ExportError, InputError
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.targets import targets

sys.path.append(str(ROOT))
from tests.support.target_steps import step_in

MODELS = (
    "llama3-8b", "llama2-13b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "qwen2.5-32b", "mistral-7b", "mixtral-8x7b",
    "gpt3-13b", "glm-4.5-air",
)  # fmt: skip
CLUSTERS = ("4xL40S", "8xA100-40GB", "8xH100-80GB", "16xA100-80GB", "64xH100-80GB")
PLANNERS = ("adapipe", "portfolio")
SEQUENCES, LENGTH, PIPELINE, EFFORT = 64, 2048, 8, 1.0


def planned(model: str, name: str, target: str | None) -> Plan:
    """The faster plan of the planners; raises the first one's error if none has any."""
    cluster = db.Cluster.parse(name)
    pipeline = min(PIPELINE, cluster.count)
    data = cluster.count // pipeline
    plans, reasons = [], []
    for planner in PLANNERS:
        try:
            plan = db.plan(
                db.models[model], cluster, pipeline=pipeline, data=data, zero=int(data > 1),
                micro_batches=SEQUENCES // data, sequence_length=LENGTH, effort=EFFORT, planner=planner, target=target,
                framework=TARGET,
            )  # fmt: skip
        except DebubbleError as reason:
            reasons.append(reason)
        else:
            plans.append(plan)
    if not plans:
        raise reasons[0]
    return min(plans, key=seconds_per_step)


def export_of(plan: Plan, target: str) -> str:
    """What the target's export does with its plan: `taken`, or the sentence that says what is lost."""
    if target not in exports:
        return "taken"
    try:
        losses = exports[target](plan).losses
    except ExportError as refused:
        return str(refused)
    return next((loss for loss in losses if "times as long" in loss or "do not say" in loss), "taken")


def row(case: tuple[str, str]) -> Row:
    """Results of a model on a cluster: the unrestricted step, and those of every target."""
    model, cluster = case
    plans: dict[str | None, Plan] = {}
    cells: dict[str, dict[str, Any]] = {}
    for target in (None, *targets):
        try:
            plans[target] = planned(model, cluster, target)
        except DebubbleError as reason:
            if target is not None:
                refused = isinstance(reason, InputError)
                cells[target] = {"step": None, "why": "refused" if refused else "does not fit", "reason": str(reason)}
    runs = {made_for: plan_runs_in(plan) for made_for, plan in plans.items()}
    for target in (target for target in targets if target in plans):
        target_plan = plans[target]
        steps = {
            made_for: step
            for made_for, plan in plans.items()
            if made_for != target and target in runs[made_for] and (step := step_in(plan, target)) is not None
        }
        best = min(steps, key=lambda name: steps[name], default=None)
        cells[target] = {
            "step": seconds_per_step(target_plan), "planner": target_plan.planner,
            "schedule": target_plan.schedule.name, "export": export_of(target_plan, target),
            "others": None if best is None and None not in steps else {"step": steps[best], "of": best or "any"},
        }  # fmt: skip
    unrestricted = seconds_per_step(plans[None]) if None in plans else None
    return {"model": model, "cluster": cluster, "effort": EFFORT, "unrestricted": unrestricted, "targets": cells}


def cells(row: Row) -> list[str]:
    """A line of the table: the unrestricted step, and the ratios of the targets' steps to it."""
    free = row["unrestricted"]

    def cell(target: str) -> str:
        cell_of_target = row["targets"][target]
        if cell_of_target["step"] is None:
            return "refused" if cell_of_target["why"] == "refused" else "-"
        return f"{cell_of_target['step']:.2f} s" if free is None else f"{cell_of_target['step'] / free:.3f}"

    return [row["model"], row["cluster"], "-" if free is None else f"{free:.3f} s", *map(cell, targets)]


def slowdown(row: Row, target: str) -> float | None:
    """Ratio of a target's step to the fastest in the row with its levers; None if there is none."""
    cell = row["targets"][target]
    if cell["step"] is None:
        return None
    other = cell["others"]
    return float(cell["step"] / min(cell["step"], other["step"] if other else cell["step"]))


def levers(all_rows: list[Row]) -> str:
    """The note's tables and their introduction."""
    rows = [row for row in all_rows if any(cell["step"] is not None for cell in row["targets"].values())]
    commits = ", ".join(sorted({row["commit"] for row in all_rows}))
    min_effort, max_effort = (choose(row["effort"] for row in all_rows) for choose in (min, max))
    more = ", ".join(f"{row['case']}" for row in all_rows if row["effort"] > min_effort)
    plans = [cell for row in rows for cell in row["targets"].values() if cell["step"] is not None]
    taken = sum(cell["export"] == "taken" for cell in plans)
    summary = (
        f"At commit {commits}, {min_effort:g} s of effort for each planner"
        + (f" ({max_effort:g} s for {more})" if more else "")
        + f": {len(all_rows)} rows, {len(rows)} of them with a plan that fits.  Of {len(plans)} plans for targets,"
        f" {taken} are taken by the target's export with nothing refused and nothing slower."
    )
    definition = (
        "*Behind* is how much longer the step of a target's plan takes than that of the fastest plan with the target's"
        " levers in the row, whatever it was planned for:"
    )
    lines = []
    for target in targets:
        ratios = [ratio for row in rows if (ratio := slowdown(row, target)) is not None]
        slow = sum(ratio > 1.05 for ratio in ratios)
        lines.append((target, str(len(ratios)), str(slow), f"{max(ratios, default=1) - 1:.1%}"))
    return "\n\n".join(
        (
            fill(summary, 118, break_on_hyphens=False), fill(definition, 118, break_on_hyphens=False),
            table(("target", "plans", "more than 5% behind", "most behind"), lines),
            "Steps of the unrestricted plans, and the targets' steps over them:",
            table(("model", "cluster", "unrestricted", *targets), map(cells, rows)),
        )
    )  # fmt: skip


def ranges(rows: list[Row]) -> str:
    """One line per target: minimum, mean and maximum of the ratios to the unrestricted step."""
    lines = []
    for target in targets:
        steps = [(row["targets"][target]["step"], row["unrestricted"]) for row in rows]
        ratios = [step / free for step, free in steps if step is not None and free is not None]
        figures = (min(ratios), geometric_mean(ratios), max(ratios))
        lines.append((f"`{target}`", str(len(ratios)), *(f"{figure:.3f}" for figure in figures)))
    return table(("target", "cases", "least", "geometric mean", "greatest"), lines)


BENCHMARK = Benchmark(
    name="targets", about=__doc__, measure=row,
    cases={f"{model} on {cluster}": (model, cluster) for model in MODELS for cluster in CLUSTERS},
    pages={"exports.md#ranges": ranges, "notes/targets.md#levers": levers},
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
