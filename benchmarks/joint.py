"""What `debubble plan` finds, by planner, effort and seed, and how long it takes: the settings of docs/joint.md.

    python benchmarks/joint.py [CASE ...]       # `A, auto, effort 10, seed 0`, `A, joint`, `A, others`, ...
    python benchmarks/joint.py --docs           # the tables and the picture of docs/joint.md

Every case is a call of the command as its users make it, in a process of its own.  Steps depend on effort and seed
alone; times on the machine, so that nothing else should run.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmark import Benchmark, Row, table
from golden.cases import CALLS

from debubble.ir import DEFAULT_EFFORT
from debubble.papers.drawings import Lines, svg

JOBS: dict[str, str] = CALLS["settings"]
"""Sequences have 4096 tokens, except for the large job."""
LARGE = "GPT-3"
SETTINGS = {job: words for job, words in JOBS.items() if job != LARGE}
NEVER = "--deadline 3600"
"""A deadline that no search reaches on any machine, so that steps depend only on the effort."""
EFFORT, SEEDS, EFFORTS = DEFAULT_EFFORT, (0, 1, 2), (0.5, 1.0, DEFAULT_EFFORT, 10.0)

CASES = {
    **{
        f"{job}, auto, effort {effort:g}, seed {seed}": f"{words} --effort {effort:g} --seed {seed}"
        for job, words in JOBS.items()
        for effort in EFFORTS
        for seed in SEEDS
        if effort == EFFORT or (seed == 0 and job != LARGE)
    },
    **{
        f"{job}, joint, effort {EFFORT:g}, seed {seed}": f"{words} --planner joint --seed {seed} {NEVER}"
        for job, words in SETTINGS.items()
        for seed in SEEDS
    },
    **{f"{job}, others": f"{words} --compare {NEVER}" for job, words in SETTINGS.items()},
}
"""Words after `debubble plan`."""


def measure(words: str) -> Row:
    """Answer of one process, and its time."""
    command = [sys.executable, "-m", "debubble", "plan", *words.split(), "--json"]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    candidates = {c["planner"]: c["step_time"] for c in answer["candidates"] if c["step_time"]}
    return {
        "step": answer["step_time"], "bound": answer["lower_bound"], "planners": candidates,
        "clock": round(clock, 1), "cpu": round(after.ru_utime - before.ru_utime, 1),
    }  # fmt: skip


def rows_of(rows: Sequence[Row], job: str, asked: str) -> list[Row]:
    """Rows of a job and a kind of call."""
    return [row for row in rows if row["case"].startswith(f"{job}, {asked}")]


def gap(row: Row) -> float:
    """Gap between step and bound in percent of the step."""
    return 100 * float(1 - row["bound"] / row["step"])


def settings(rows: list[Row]) -> str:
    """`joint` and the best other planner."""
    lines, slower = [], []
    for job, words in SETTINGS.items():
        joint, (other,) = rows_of(rows, job, "joint"), rows_of(rows, job, "others")
        best, name = min((step, name) for name, step in other["planners"].items() if name not in ("auto", "joint"))
        worst = max(joint, key=lambda row: float(row["step"]))
        if worst["step"] > best:
            slower.append(job)
        model, _, cluster, *degrees, _, micro_batches = words.split()
        shown = f"{job}: {', '.join(filter(None, (model, cluster, ' '.join(degrees))))}, {micro_batches} micro-batches"
        steps, cpu = ", ".join(f"{row['step']:.3f}" for row in joint), max(row["cpu"] for row in joint)
        saved = 100 * (1 - worst["step"] / best)
        lines.append(
            (shown, f"{best:.3f} (`{name}`)", steps, f"{saved:.1f}%", f"{worst['bound']:.3f}", f"{gap(worst):.1f}%",
             f"{cpu:.0f}")
        )  # fmt: skip
    head = ("setting", "best other planner", "`joint`, by seed", "saved", "bound", "gap", "CPU s")
    verdict = f"slower than another planner with some seed in {', '.join(slower)}" if slower else (
        "slower than none of the others with any seed"
    )  # fmt: skip
    commits, peer_commits = ({row["commit"] for row in rows_of(rows, "A", kind)} for kind in ("joint", "others"))
    remark = "  The other planners' steps are an earlier version's." if commits != peer_commits else ""
    return f"{table(head, lines)}\n\nSaved and gap are of the slowest seed.  `joint` is {verdict}.{remark}"


def by_default(rows: list[Row]) -> str:
    """Results of the default effort."""
    lines = []
    for job in JOBS:
        chosen = rows_of(rows, job, f"auto, effort {EFFORT:g}")
        steps = ", ".join(f"{row['step']:.3f}" for row in chosen)
        spans = (_span([gap(row) for row in chosen], "{:.1f}", "%"), *(
            _span([row[name] for row in chosen], "{:.0f}") for name in ("clock", "cpu")
        ))  # fmt: skip
        lines.append((job, steps, *spans))
    return table(("setting", "step by seed (s)", "gap", "on the clock (s)", "processor seconds"), lines)


def _span(values: Sequence[float], form: str, unit: str = "") -> str:
    ends = [form.format(value) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends)) + unit


def _of_seed_0(rows: Sequence[Row], job: str) -> list[Row]:
    return [row for row in rows_of(rows, job, "auto") if row["case"].endswith("seed 0")]


def by_effort(rows: list[Row]) -> str:
    """Results of seed 0 by effort."""
    lines = [
        (job, *(f"{row['step']:.3f} in {row['clock']:.0f} s" for row in _of_seed_0(rows, job))) for job in SETTINGS
    ]
    return table(("setting", *(f"effort {effort:g}" for effort in EFFORTS)), lines)


def curves(rows: list[Row]) -> bytes:
    """Gaps of seed 0 by effort, as curves."""
    return svg(
        Lines(
            title="Steps that auto finds, by effort",
            across="effort (seconds of two reference cores, for each planner)",
            x=[*EFFORTS],
            series={job: [100 * (row["step"] / row["bound"] - 1) for row in _of_seed_0(rows, job)] for job in SETTINGS},
            unit="% above the bound",
        )
    )


BENCHMARK = Benchmark(
    name="joint", about=__doc__, cases=CASES, measure=measure,
    prepare=lambda: measure(f"{SETTINGS['E']} --effort 0.5"),  # compiles the kernels, which are cached on disk
    pages={
        "joint.md#settings": settings, "joint.md#auto": by_default, "joint.md#efforts": by_effort,
        "pictures/auto-by-effort.svg": curves,
    },
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
