"""The plan of every target beside debubble's own: ten models on five clusters.

    python benchmarks/targets.py [--model NAME ...] [--cluster NAME ...] [--effort SECONDS] [--minutes N] [--again]
    python benchmarks/targets.py docs

A pipeline of eight devices (of all, where there are fewer), replicas with ZeRO-1 on the others, 64 sequences of 2048
tokens; each plan is the faster of AdaPipe's and the portfolio's.  A row plans without a target and for every target.
Every plan of the row that a target runs as it is competes for the fastest one with that target's levers, with the
target's memory; a target's own plan is exported, and what the export says of it is kept.

Rows go to benchmarks/results/targets.json as they are done, each with its commit, and those that are there with as much
effort are not run again without `--again`; `docs` writes the tables of docs/exports.md and docs/notes/targets.md from
that file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import geometric_mean
from textwrap import fill
from typing import Any

from marks import write_between
from provenance import commit, provenance

import debubble as db
from debubble.exports import exports
from debubble.ir import DebubbleError, ExportError, InputError
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.targets import targets

sys.path.append(str(Path(__file__).parents[1]))
from tests.support.target_steps import step_in

MODELS = (
    "llama3-8b", "llama2-13b", "llama3-70b", "llama3.2-1b", "qwen3-8b", "qwen2.5-32b", "mistral-7b", "mixtral-8x7b",
    "gpt3-13b", "glm-4.5-air",
)  # fmt: skip
CLUSTERS = ("4xL40S", "8xA100-40GB", "8xH100-80GB", "16xA100-80GB", "64xH100-80GB")
PLANNERS = ("adapipe", "portfolio")
SEQUENCES, LENGTH, PIPELINE = 64, 2048, 8

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "targets.json"
PAGE = ROOT / "docs" / "exports.md"
RANGES, END_RANGES = "<!-- ranges: written by benchmarks/targets.py docs -->", "<!-- end of ranges -->"
NOTE = ROOT / "docs" / "notes" / "targets.md"
BEGIN, END = "<!-- levers: written by benchmarks/targets.py docs -->", "<!-- end of levers -->"


def seconds(plan: Plan) -> float:
    """Time of a whole step; raises OutOfMemoryError if the plan does not fit."""
    return seconds_per_step(plan)


def planned(model: str, name: str, target: str | None, effort: float) -> Plan:
    """The faster plan of the planners; raises the first one's reason if none has any."""
    cluster = db.Cluster.parse(name)
    pipeline = min(PIPELINE, cluster.count)
    data = cluster.count // pipeline
    plans, reasons = [], []
    for planner in PLANNERS:
        try:
            plan = db.plan(
                db.models[model], cluster, pipeline=pipeline, data=data, zero=int(data > 1),
                micro_batches=SEQUENCES // data, sequence_length=LENGTH, effort=effort, planner=planner, target=target,
            )  # fmt: skip
        except DebubbleError as reason:
            reasons.append(reason)
        else:
            plans.append(plan)
    if not plans:
        raise reasons[0]
    return min(plans, key=seconds)


def export_of(plan: Plan, target: str) -> str:
    """What the target's export does with the plan made for it: `taken`, or the sentence that says what is lost."""
    if target not in exports:
        return "taken"
    try:
        losses = exports[target](plan).losses
    except ExportError as refused:
        return str(refused)
    return next((loss for loss in losses if "times as long" in loss or "do not say" in loss), "taken")


def row(model: str, cluster: str, effort: float) -> dict[str, Any]:
    """All that a model on a cluster has: the unrestricted step, and what every target does."""
    plans: dict[str | None, Plan] = {}
    cells: dict[str, dict[str, Any]] = {}
    for target in (None, *targets):
        try:
            plans[target] = planned(model, cluster, target, effort)
        except DebubbleError as reason:
            if target is not None:
                refused = isinstance(reason, InputError)
                cells[target] = {"step": None, "why": "refused" if refused else "does not fit", "reason": str(reason)}
    runs = {made_for: plan_runs_in(plan) for made_for, plan in plans.items()}
    for target in targets:
        if target not in plans:
            continue
        own = plans[target]
        others = {
            made_for: step
            for made_for, plan in plans.items()
            if made_for != target and target in runs[made_for] and (step := step_in(plan, target)) is not None
        }
        best = min(others, key=lambda name: others[name], default=None)
        cells[target] = {
            "step": seconds(own),
            "planner": own.planner,
            "schedule": own.schedule.name,
            "export": export_of(own, target),
            "others": None if best is None and None not in others else {"step": others[best], "of": best or "any"},
        }
    return {
        "commit": commit(),
        "model": model,
        "cluster": cluster,
        "effort": effort,
        "unrestricted": seconds(plans[None]) if None in plans else None,
        "targets": cells,
    }


def measure(arguments: argparse.Namespace) -> None:
    """Run the rows that are missing, as many as there is time for."""
    started = time.monotonic()
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    rows = {(each["model"], each["cluster"]): each for each in found["rows"]}
    for model in arguments.model:
        for cluster in arguments.cluster:
            known = rows.get((model, cluster))
            if known is not None and known["effort"] >= arguments.effort and not arguments.again:
                continue
            if time.monotonic() - started > 60 * arguments.minutes:
                return
            rows[model, cluster] = row(model, cluster, arguments.effort)
            order = [rows[m, c] for m in MODELS for c in CLUSTERS if (m, c) in rows]
            RESULTS.write_text(json.dumps({**provenance(), "rows": order}, indent=1) + "\n")
            print(f"| {cells(rows[model, cluster])} |", flush=True)


def cells(each: Mapping[str, Any]) -> str:
    """A row of the table: the unrestricted step, and the targets' over it."""
    free = each["unrestricted"]

    def cell(target: str) -> str:
        found = each["targets"][target]
        if found["step"] is None:
            return "refused" if found["why"] == "refused" else "-"
        return f"{found['step']:.2f} s" if free is None else f"{found['step'] / free:.3f}"

    first = "-" if free is None else f"{free:.3f} s"
    return " | ".join([each["model"], each["cluster"], first, *map(cell, targets)])


def behind(each: Mapping[str, Any], target: str) -> float | None:
    """A target's own plan over the fastest with its levers that the row has; None if there is none."""
    cell = each["targets"][target]
    if cell["step"] is None:
        return None
    other = cell["others"]
    return float(cell["step"] / min(cell["step"], other["step"] if other else cell["step"]))


def tables(found: Mapping[str, Any]) -> Iterator[str]:
    """The tables of the page, and the sentences before them."""
    rows = [each for each in found["rows"] if any(cell["step"] is not None for cell in each["targets"].values())]
    commits = sorted({each["commit"] for each in found["rows"]})
    least = min(each["effort"] for each in found["rows"])
    more = [f"{each['model']} on {each['cluster']}" for each in found["rows"] if each["effort"] > least]
    most = max(each["effort"] for each in found["rows"])
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    plans = [cell for each in rows for cell in each["targets"].values() if cell["step"] is not None]
    taken = sum(cell["export"] == "taken" for cell in plans)
    yield (
        f"`{found['command']}` at commit {', '.join(commits)} ({versions}), {least:g} s of effort for each planner"
        + (f" ({most:g} s for {', '.join(more)})" if more else "")
        + f": {len(found['rows'])} rows, {len(rows)} of them with a plan that fits.  Of {len(plans)} plans for targets,"
        f" {taken} are taken by the target's export with nothing refused and nothing slower."
    )
    yield ""
    yield (
        "*Behind* is how much longer the step of a target's plan takes than that of the fastest plan with the target's"
        " levers in the row, whatever it was planned for:"
    )
    yield ""
    yield "| target | plans | more than 5% behind | most behind |"
    yield "| --- | --- | --- | --- |"
    for target in targets:
        ratios = [ratio for each in rows if (ratio := behind(each, target)) is not None]
        slow = sum(ratio > 1.05 for ratio in ratios)
        yield f"| {target} | {len(ratios)} | {slow} | {max(ratios, default=1) - 1:.1%} |"
    yield ""
    yield "Steps of the unrestricted plans, and the targets' steps over them:"
    yield ""
    names = ["model", "cluster", "unrestricted", *targets]
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * len(names)}"
    yield from (f"| {cells(each)} |" for each in rows)


def ranges(found: Mapping[str, Any]) -> str:
    """A row per target: the least, the mean and the greatest step over the unrestricted plan's."""
    lines = ["| target | cases | least | geometric mean | greatest |", "| --- | --- | --- | --- | --- |"]
    for target in targets:
        steps = [(each["targets"][target]["step"], each["unrestricted"]) for each in found["rows"]]
        ratios = [step / free for step, free in steps if step is not None and free is not None]
        figures = (min(ratios), geometric_mean(ratios), max(ratios))
        lines.append(f"| `{target}` | {len(ratios)} | {' | '.join(f'{figure:.3f}' for figure in figures)} |")
    return "\n".join(lines)


def note(found: Mapping[str, Any]) -> str:
    """The tables of the results."""
    lines = [line if line.startswith("|") else fill(line, 118, break_on_hyphens=False) for line in tables(found)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "docs"), default="measure")
    parser.add_argument("--model", nargs="+", default=MODELS)
    parser.add_argument("--cluster", nargs="+", default=CLUSTERS)
    parser.add_argument("--effort", type=float, default=0.5)
    parser.add_argument("--again", action="store_true", help="run rows again that the file has with this effort")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after so many")
    arguments = parser.parse_args()
    if arguments.what == "docs":
        found = json.loads(RESULTS.read_text())
        write_between(PAGE, RANGES, END_RANGES, ranges(found))
        write_between(NOTE, BEGIN, END, note(found))
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
