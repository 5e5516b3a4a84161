"""Predicts published training runs, and plans the same jobs: one row per run of `published_runs.py`.

    python benchmarks/published.py [--only NUMBER ...] [--effort 10]   # into benchmarks/results/published.json
    python benchmarks/published.py docs                                # docs/notes/published.md, from these results

`predicted` is the step of the published configuration with what the run's framework fuses, hides and recomputes,
whether it fits or not.  `priced` is that configuration as `plan` prices it: Megatron-LM's defaults, and the least
recomputation that fits; None: it does not fit.  `planned` is the step of the fastest quick plan of all degrees for the
same model, devices and batch, from which `plan` searches on.  Every row names its commit and effort.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from provenance import commit, provenance
from published_runs import RUNS, PublishedRun

from debubble.costs import StepTail, model_units
from debubble.costs.units import Partition
from debubble.ir import DebubbleError, Placement
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.search import quickest
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.problem import ModelUnits, Problem
from debubble.schedules import schedules
from debubble.simulator import simulate

RESULTS = Path(__file__).parent / "results" / "published.json"
PAGE = Path(__file__).parent.parent / "docs" / "notes" / "published.md"
GOALS = {"dense": 0.10, "MoE": 0.15}
"""Median errors that are aimed at."""


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
    return run.passes * float(timeline.makespan) + problem.tail.of(schedule, costs)


def priced(run: PublishedRun) -> float | None:
    """Seconds of the published configuration's step as `plan` prices it; None if nothing of it fits."""
    try:
        return quick_step(run.job.problem(replace(run.degrees, chunks=run.degrees.chunks or 1)))[0]
    except DebubbleError:
        return None


def row(run: PublishedRun, *, effort: float) -> dict[str, Any]:
    """One run's figures; without an effort nothing is planned."""
    planned: dict[str, Any] = {"planned": None, "plan": "", "left": None}
    if effort:
        best = quickest(replace(run.job, effort=effort)).search
        summary = best.configurations[0]
        plan = f"{summary.degrees}; {summary.schedule}"
        planned = {"planned": summary.step_time, "plan": plan, "left": best.unplanned}
    return {
        "name": run.name, "kind": run.kind, "cluster": run.cluster.to_dict()["devices"], "dtype": run.dtype,
        "batch": run.degrees.global_batch, "sequence_length": run.sequence_length, "degrees": str(run.degrees),
        "recompute": run.recompute, "source": run.source, "published": run.seconds, "predicted": predicted(run),
        "priced": priced(run), **planned, "commit": commit(), "effort": effort,
    }  # fmt: skip


def main() -> None:
    """Compute rows, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["rows", "docs"], default="rows")
    parser.add_argument("--only", type=int, nargs="*", default=range(len(RUNS)))
    parser.add_argument("--effort", type=float, default=10.0)
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
    if arguments.what == "docs":
        PAGE.write_text(page([rows[str(number)] for number in range(len(RUNS))]))
        return
    for number in arguments.only:
        rows[str(number)] = made = row(RUNS[number], effort=arguments.effort)
        print(number, made["name"], *(made[key] for key in ("published", "predicted", "priced", "planned")), flush=True)
        kept = {str(n): rows[str(n)] for n in range(len(RUNS)) if str(n) in rows}
        RESULTS.write_text(json.dumps({**provenance(), "rows": kept}, indent=1) + "\n")


def page(rows: list[dict[str, Any]]) -> str:
    """The page of documentation that the rows make."""
    lines = [
        "# Published runs",
        "",
        "What experts chose and measured, what debubble predicts for it, and what it plans instead.",
        "",
        *_summary(rows),
        "",
        "| # | run | published configuration | published | predicted | error | priced | planned | ratio | plan |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_line(number, each) for number, each in enumerate(rows, 1)),
        "",
        "Seconds per step.  *Predicted* is the published configuration with what its framework fuses, hides and"
        " recomputes, whether it fits or not (where a source does not say what is recomputed, the least that fits).",
        "*Priced* is the same configuration as `plan` prices it: Megatron-LM's defaults, and the least recomputation"
        " that fits in 90% of the memory (`-`: nothing fits).  *Planned* is what the search of degrees found for"
        " the model, the devices and the batch, by quick plans at least (`-`: not planned yet); the ratio is priced"
        " over planned.",
        "",
        "Not in the prediction: layers of DeepSeek-V3 recompute parts in these runs, and debubble prices them whole or"
        " not at all (none here); kernels that wait for the host, which weighs most where layers are small (gpt-oss)"
        " and where no graph is captured; the clocks of H100s with 500 W (torchtitan), and what its selective"
        " recomputation repeats; MegaScale's parallel blocks and windows of attention, and what Megatron-LM waits for"
        " on thousands of devices.",
        "",
        "| # | source |",
        "| --- | --- |",
        *(f"| {number} | {each['source']} |" for number, each in enumerate(rows, 1)),
        "",
        "Written by `python benchmarks/published.py docs` from `benchmarks/results/published.json`; the runs are in"
        " `benchmarks/published_runs.py`.",
        "",
    ]
    return "\n".join(lines)


def _summary(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for kind, goal in GOALS.items():
        errors = [abs(_error(each)) for each in rows if each["kind"] == kind]
        within = sum(error <= goal for error in errors)
        lines.append(
            f"* {len(errors)} {kind} runs: the median error is {100 * median(errors):.1f}%, the worst"
            f" {100 * max(errors):.1f}%; {within} are within {100 * goal:.0f}%."
        )
    compared = [each for each in rows if each["priced"] is not None and each["planned"] is not None]
    unpriced = sum(each["priced"] is None for each in rows)
    faster = sum(each["planned"] <= each["priced"] * (1 + 1e-9) for each in compared)
    lines.append(
        f"* The plan is at least as fast as the published configuration, by debubble's own prices, for {faster} of the"
        f" {len(compared)} that fit and were planned; {unpriced} do not fit by its memory rule."
    )
    return lines


def _error(each: dict[str, Any]) -> float:
    return float(each["predicted"]) / float(each["published"]) - 1


def _line(number: int, each: dict[str, Any]) -> str:
    both = each["priced"] is not None and each["planned"] is not None
    cells = [
        str(number),
        f"{each['name']}, {each['cluster']}, {each['dtype']}, {each['batch']} x {each['sequence_length']}",
        each["degrees"],
        *(f"{each[key]:.4g}" for key in ("published", "predicted")),
        f"{100 * _error(each):+.1f}%",
        *("-" if each[key] is None else f"{each[key]:.4g}" for key in ("priced", "planned")),
        f"{each['priced'] / each['planned']:.2f}" if both else "-",
        each["plan"],
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
