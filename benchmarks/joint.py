"""What searching all levers at once brings: `joint` beside every other planner on five ordinary settings.

    python benchmarks/joint.py [--seeds 0,1,2] [--effort 10] [--only A,D] [--joint] [--study] [--papers] [--json FILE]
    python benchmarks/joint.py --json FILE --bounds
    python benchmarks/joint.py --json FILE --docs

Prints, per setting, the fastest other planner's step and that of `joint` for each seed, both simulated under the limit,
the bound on any plan's step, and processor seconds of `joint`. Efforts are work, so that steps do not depend on the
machine. With --json, settings that the file already has are run again and replaced; --docs writes the tables of
docs/joint.md and docs/notes/joint.md from the file and runs nothing. --study takes each lever away from `joint`, and
gives it less and more effort, with the first of the seeds. --joint runs `joint` alone, and keeps the others' steps that
the file has. --bounds renews the bounds of the file's rows, and searches nothing: it holds where costs are those that
the rows were run with. --papers asks what Obscura and ChronosPipe ask: how fast a step is where 1F1B does not fit,
beside 1F1B if it did.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from marks import write_between
from provenance import commit, provenance

import debubble as db
from debubble.costs.units import Partition
from debubble.ir import DebubbleError, RunOptions
from debubble.planners.bounds import proven_step_bound
from debubble.planners.model_problem import problem_of
from debubble.planners.partitioning.balance import even_counts
from debubble.planners.problem import ModelUnits, Problem
from debubble.schedules import schedules

PAGE = Path(__file__).parents[1] / "docs" / "joint.md"
NOTE = PAGE.parent / "notes" / "joint.md"
BEGIN, END = "<!-- settings: written by benchmarks/joint.py --docs -->", "<!-- end of settings -->"
STUDY, END_STUDY = "<!-- study: written by benchmarks/joint.py --docs -->", "<!-- end of study -->"
PAPERS, END_PAPERS = "<!-- papers: written by benchmarks/joint.py --docs -->", "<!-- end of papers -->"

NEVER = 3600.0
"""A deadline in seconds that no search meets, however busy the machine is: steps depend on the effort alone."""


@dataclass(frozen=True)
class Setting:
    """A model on a cluster, with sequences of 4096 tokens."""

    model: str
    cluster: str
    micro_batches: int
    pipeline: int | None = None
    tensor: int = 1
    micro_batch_size: int = 1
    layers: int | None = None
    """As many as the model has, if none are given."""
    limit: float | None = None
    """Bytes of a device; the cluster's, if none are given."""

    @property
    def words(self) -> str:
        model = self.model if self.layers is None else f"{self.model} with {self.layers} layers"
        degrees = "" if self.tensor == 1 else f", --pipeline {self.pipeline} --tensor {self.tensor}"
        size = "" if self.micro_batch_size == 1 else f" of {self.micro_batch_size}"
        return f"{model}, {self.cluster}{degrees}, {self.micro_batches} micro-batches{size}"

    def problem(self, *, effort: float, seed: int) -> Problem:
        options = RunOptions(
            sequence_length=4096, tensor=self.tensor, micro_batch_size=self.micro_batch_size
        )  # fmt: skip
        model, cluster = db.models[self.model], db.Cluster.parse(self.cluster)
        if self.layers is not None:
            model = db.Model.from_hf({**model.config, "num_hidden_layers": self.layers})
        if self.limit is not None:
            cluster = cluster.with_limit(self.limit)
        return problem_of(
            model, cluster, options, micro_batches=self.micro_batches, pipeline=self.pipeline, effort=effort,
            deadline=NEVER, seed=seed,
        )  # fmt: skip


SETTINGS = {
    "A": Setting("llama2-13b", "8xA100-40GB", 16),
    "B": Setting("llama2-13b", "8xA100-80GB", 32),
    "C": Setting("llama2-28b", "8xA100-80GB", 32),
    "D": Setting("llama2-70b", "64xH100-80GB", 32, pipeline=8, tensor=8),
    "E": Setting("llama3-8b", "4xL40S-48GB", 16),
}


QUESTIONS = {
    **{
        f"{size}-{m}": (Setting(f"llama2-{size}", "8xA100-80GB", m), 0.0)
        for size in ("18b", "23b", "28b")
        for m in (16, 32, 64, 128)
    },
    **{
        f"70b-{layers}": (
            Setting("llama2-70b", "64xRTX5090-32GB", 64, 8, 8, micro_batch_size=2, layers=layers, limit=32e9), 0.5
        )
        for layers in (112, 128)
    },
}  # fmt: skip
"""What the papers ask, and the share of each stage that 1F1B recomputes beside it: Obscura's models, and deep ones of
ChronosPipe's."""


def one_f_one_b(problem: Problem, recomputed: float) -> float:
    """The step of 1F1B on the even partition if it fitted, with this share of each stage's units recomputed."""
    assert isinstance(problem.workload, ModelUnits)
    units = problem.workload.units
    lengths = even_counts(units, problem.devices)
    kept, again = (Partition.cut(units, lengths, strategy=name) for name in ("none", "full"))
    partition = Partition(
        (*b[: round(len(b) * recomputed)], *a[round(len(b) * recomputed) :]) for a, b in zip(kept, again, strict=True)
    )
    schedule = schedules["1f1b"](devices=problem.devices, micro_batches=problem.micro_batches)
    costs = units.stage_costs(partition, schedule.placement).with_limit(None)
    schedule = replace(schedule, fused_recompute=partition.recomputing)
    return float(problem.step_time(db.simulate(schedule, costs)))


def asked(name: str, *, seed: int, effort: float) -> dict[str, Any]:
    """A row: the step of `joint`, and that of 1F1B if it fitted."""
    setting, recomputed = QUESTIONS[name]
    problem = setting.problem(effort=effort, seed=seed)
    result = db.planners["joint"](problem)
    return {
        "setting": name, "effort": effort, "seed": seed, "joint": float(result.time),
        "bound": float(result.lower_bound), "1f1b": one_f_one_b(problem, recomputed), "commit": commit(),
    }  # fmt: skip


def papers_page(rows: list[dict[str, Any]]) -> str:
    """The table of the papers' questions."""
    lines = ["| job | 1F1B if it fitted | `joint` | 1F1B over `joint` | bound |", "| --- | --- | --- | --- | --- |"]
    for name, (setting, recomputed) in QUESTIONS.items():
        for row in (row for row in rows if row["setting"] == name):
            beside = f"{row['1f1b']:.2f}" + (f" (R = {100 * recomputed:.0f}%)" if recomputed else "")
            ratio = row["1f1b"] / row["joint"]
            effort = "" if row["effort"] == EFFORTS[-1] else f" (effort {row['effort']:g})"
            lines.append(
                f"| {setting.words} | {beside} | {row['joint']:.2f}{effort} | {ratio:.3f} | {row['bound']:.2f} |"
            )
    return "\n".join(lines)


def measured(name: str, *, seeds: list[int], effort: float, known: dict[str, Any] | None) -> dict[str, Any]:
    """A row: the best of the other planners, or what is known of them, and `joint` by seed."""
    setting = SETTINGS[name]
    others: dict[str, float] = {} if known is None else known["others"]
    for planner in db.planners if known is None else ():
        if planner not in ("auto", "joint"):
            try:
                others[planner] = float(db.planners[planner](setting.problem(effort=effort, seed=0)).time)
            except DebubbleError:
                continue
    steps, seconds, bound = [], [], 0.0
    for seed in seeds:
        begin = time.process_time()
        result = db.planners["joint"](setting.problem(effort=effort, seed=seed))
        seconds.append(round(time.process_time() - begin, 1))
        steps.append(float(result.time))
        bound = float(result.lower_bound)
    return {
        "setting": name, "effort": effort, "bound": bound, "others": others, "seeds": seeds, "joint": steps,
        "cpu": seconds, "commit": commit(), "others_commit": commit() if known is None else _commit_of_others(known),
    }  # fmt: skip


def renew_bounds(rows: list[dict[str, Any]], settings: dict[str, Setting]) -> None:
    """Replace the bounds of rows by what is proven today."""
    for row in rows:
        problem = settings[row["setting"]].problem(effort=0.0, seed=0)
        proven = proven_step_bound(problem)
        bound = float(proven.time)
        print(row["setting"], row["bound"], bound, proven.argument, flush=True)
        row["bound"], row["bound_commit"] = bound, commit()


def _commit_of_others(row: dict[str, Any]) -> str:
    """The version that a row's other planners were run with."""
    return str(row.get("others_commit", row["commit"]))


def without(problem: Problem, lever: str) -> Problem:
    """The problem without one of the levers."""
    assert isinstance(problem.workload, ModelUnits)
    if lever == "chunks":
        return replace(problem, chunks=1)
    units = problem.workload.units
    match lever:
        case "transfers to the host":
            units = replace(units, offload_bandwidth=None)
        case "optimizer steps on the host":
            units = replace(units, units=tuple(replace(unit, on_host=None) for unit in units.units))
        case "recomputation":
            kept = tuple(replace(unit, strategies={"none": unit.strategies["none"]}) for unit in units.units)
            units = replace(units, units=kept)
    return replace(problem, workload=ModelUnits(units))


LEVERS = ("chunks", "recomputation", "transfers to the host", "optimizer steps on the host")
EFFORTS = (1.0, 3.0, 10.0)


def step_of(problem: Problem) -> float | None:
    """The step that `joint` finds; None if nothing fits."""
    try:
        return float(db.planners["joint"](problem).time)
    except DebubbleError:
        return None


def studied(name: str, *, seed: int, effort: float) -> dict[str, Any]:
    """A row: the step without each lever, and by effort."""
    setting = SETTINGS[name]
    whole = setting.problem(effort=effort, seed=seed)
    by_effort = {str(each): step_of(setting.problem(effort=each, seed=seed)) for each in EFFORTS}
    steps = {lever: step_of(without(whole, lever)) for lever in LEVERS}
    return {
        "setting": name, "effort": effort, "seed": seed, "without": steps, "by_effort": by_effort, "commit": commit(),
    }  # fmt: skip


def study_page(rows: list[dict[str, Any]]) -> str:
    """The tables of levers and of efforts."""

    def without(row: dict[str, Any], lever: str) -> str:
        step, whole = row["without"][lever], row["by_effort"][str(row["effort"])]
        return "does not fit" if step is None else f"{step:.3f} ({100 * (step / whole - 1):+.1f}%)"

    levers, efforts = [], []
    for row in rows:
        found = [row["by_effort"][str(effort)] for effort in EFFORTS]
        steps = " | ".join("does not fit" if step is None else f"{step:.3f}" for step in found)
        efforts.append(f"| {row['setting']} | {steps} |")
        whole = f"{row['by_effort'][str(row['effort'])]:.3f}"
        levers.append(f"| {row['setting']} | {whole} | {' | '.join(without(row, lever) for lever in LEVERS)} |")
    return "\n".join(
        [
            f"| setting | all levers | without {' | without '.join(LEVERS)} |", "| --- " * (2 + len(LEVERS)) + "|",
            *levers, "",
            f"| setting | {' | '.join(f'effort {effort:g}' for effort in EFFORTS)} |",
            "| --- " * (1 + len(EFFORTS)) + "|", *efforts,
        ]
    )  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    """The table of docs/joint.md, and what it says on average."""
    lines = [
        "| setting | best other planner | `joint`, by seed | saved | bound | gap | CPU s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        best, name = min((step, planner) for planner, step in row["others"].items())
        steps = ", ".join(f"{step:.3f}" for step in row["joint"])
        worst = max(row["joint"])
        lines.append(
            f"| {row['setting']}: {SETTINGS[row['setting']].words} | {best:.3f} (`{name}`) | {steps} |"
            f" {100 * (1 - worst / best):.1f}% | {row['bound']:.3f} | {100 * (1 - row['bound'] / worst):.1f}% |"
            f" {max(row['cpu']):.0f} |"
        )
    slower = [row["setting"] for row in rows if max(row["joint"]) > min(row["others"].values())]
    verdict = (
        "slower than none of the others with any seed"
        if not slower
        else f"slower than another planner with some seed in {', '.join(slower)}"
    )
    older = [row["setting"] for row in rows if _commit_of_others(row) != row["commit"]]
    kept = f"  The other planners' steps in {', '.join(older)} are an earlier version's." if older else ""
    return "\n".join([*lines, "", f"Saved and gap are of the slowest seed.  `joint` is {verdict}.{kept}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--effort", type=float, default=10.0)
    parser.add_argument("--only", help="names of settings; all by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--joint", action="store_true")
    parser.add_argument("--study", action="store_true")
    parser.add_argument("--papers", action="store_true")
    parser.add_argument("--bounds", action="store_true")
    parser.add_argument("--docs", action="store_true")
    chosen = parser.parse_args()
    content: dict[str, Any] = {"runs": {}, "rows": []}
    if chosen.json is not None and chosen.json.exists():
        content = json.loads(chosen.json.read_text())
    if chosen.bounds:
        if not content["rows"]:
            parser.error("--bounds needs --json FILE, and rows in that file.")
        renew_bounds(content["rows"], SETTINGS)
        renew_bounds(content.get("papers", []), {name: setting for name, (setting, _) in QUESTIONS.items()})
        content["runs"][commit()] = provenance()
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")
        return
    if chosen.docs:
        if not content["rows"]:
            parser.error("--docs needs --json FILE, and rows in that file.")
        write_between(PAGE, BEGIN, END, page(content["rows"]))
        write_between(NOTE, STUDY, END_STUDY, study_page(content.get("study", [])))
        write_between(NOTE, PAPERS, END_PAPERS, papers_page(content.get("papers", [])))
        return
    # The kernels' compilation is kept on disk; it is no part of a search.
    db.planners["joint"](replace(SETTINGS["E"].problem(effort=0.5, seed=0)))
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    kind = "study" if chosen.study else "papers" if chosen.papers else "rows"
    names = list(QUESTIONS if chosen.papers else SETTINGS) if chosen.only is None else chosen.only.split(",")
    for name in names:
        if chosen.papers:
            row = asked(name, seed=seeds[0], effort=chosen.effort)
        elif chosen.study:
            row = studied(name, seed=seeds[0], effort=chosen.effort)
        else:
            known = next((r for r in content["rows"] if chosen.joint and r["setting"] == name), None)
            row = measured(name, seeds=seeds, effort=chosen.effort, known=known)
        print(row, flush=True)
        others = [r for r in content.get(kind, []) if r["setting"] != name]
        content[kind] = sorted([*others, row], key=lambda r: r["setting"])
        content["runs"][row["commit"]] = provenance()
        if chosen.json is not None:
            chosen.json.write_text(json.dumps(content, indent=1) + "\n")
    print({"study": study_page, "papers": papers_page, "rows": page}[kind](content[kind]))


if __name__ == "__main__":
    main()
