"""What `debubble plan` finds by effort, and how long it takes on the clock: the settings of `joint.py` and a large job.

    python benchmarks/auto_by_effort.py [--seeds 0] [--efforts 10] [--only A,D] --json FILE
    python benchmarks/auto_by_effort.py --json FILE --docs

Runs the command as its users do, one process after the other, and keeps its step, its bound, seconds on the clock and
processor seconds.  Steps depend on effort and seed alone; times on the machine, so that nothing else should run.  Runs
that the file has already are made again and replaced.  --docs writes the tables and the picture of docs/joint.md from
the file, and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from joint import PAGE, SETTINGS
from marks import write_between
from provenance import commit, provenance

from debubble.papers.drawings import Lines, svg

PICTURE = PAGE.parent / "pictures" / "auto-by-effort.svg"
DEFAULT, END_DEFAULT = "<!-- auto: written by benchmarks/auto_by_effort.py --docs -->", "<!-- end of auto -->"
EFFORTS, END_EFFORTS = "<!-- efforts: written by benchmarks/auto_by_effort.py --docs -->", "<!-- end of efforts -->"
EFFORT = 10.0
"""The default."""

LARGE = "GPT-3"
JOBS = {
    **{
        name: [setting.model, "--cluster", setting.cluster, "--micro-batches", str(setting.micro_batches)]
        + ([] if setting.tensor == 1 else ["--pipeline", str(setting.pipeline), "--tensor", str(setting.tensor)])
        for name, setting in SETTINGS.items()
    },
    LARGE: [
        "gpt3-175b", "--cluster", "512xH100-80GB", "--tensor", "8", "--pipeline", "64", "--micro-batches", "256",
        "--sequence-length", "2048",
    ],
}  # fmt: skip
"""The arguments of each job, but for effort and seed."""

Row = dict[str, Any]


def planned(job: str, *, effort: float, seed: int) -> Row:
    """A row: the answer of one process, and what it took."""
    command = [sys.executable, "-m", "debubble", "plan", *JOBS[job], "--effort", str(effort), "--seed", str(seed)]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = json.loads(subprocess.run([*command, "--json"], capture_output=True, check=True).stdout)
    clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "job": job, "effort": effort, "seed": seed, "step": answer["step_time"], "bound": answer["lower_bound"],
        "gap": answer["gap"], "clock": round(clock, 1), "cpu": round(after.ru_utime - before.ru_utime, 1),
        "commit": commit(),
    }  # fmt: skip


def by_default(rows: Sequence[Row]) -> str:
    """The table of what the default effort finds."""
    lines = ["| setting | step by seed (s) | gap | on the clock (s) | processor seconds |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for job in JOBS:
        own = [row for row in rows if row["job"] == job and row["effort"] == EFFORT]
        if own:
            steps = ", ".join(f"{row['step']:.3f}" for row in own)
            gaps = _span([100 * row["gap"] for row in own], "{:.1f}", "%")
            columns = [_span([row[name] for row in own], "{:.0f}") for name in ("clock", "cpu")]
            lines.append(f"| {job} | {steps} | {gaps} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _span(values: Sequence[float], form: str, unit: str = "") -> str:
    ends = [form.format(value) for value in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends)) + unit


def by_effort(rows: Sequence[Row]) -> str:
    """The table of what seed 0 finds by effort."""
    efforts = sorted({row["effort"] for row in rows if row["seed"] == 0})
    lines = [f"| setting | {' | '.join(f'effort {effort:g}' for effort in efforts)} |"]
    lines.append("| --- " * (1 + len(efforts)) + "|")
    for job in _drawn(rows):
        own = {row["effort"]: row for row in rows if row["job"] == job and row["seed"] == 0}
        cells = [f"{own[e]['step']:.3f} in {own[e]['clock']:.0f} s" if e in own else "" for e in efforts]
        lines.append(f"| {job} | {' | '.join(cells)} |")
    return "\n".join(lines)


def curves(rows: Sequence[Row]) -> Lines:
    """How far the steps of seed 0 are above their bounds, by effort."""
    efforts = sorted({row["effort"] for row in rows if row["seed"] == 0})
    gaps = {(row["job"], row["effort"]): 100 * (row["step"] / row["bound"] - 1) for row in rows if row["seed"] == 0}
    return Lines(
        title="Steps that auto finds, by effort",
        across="effort (seconds of two reference cores, for each planner)",
        x=efforts,
        series={job: [gaps.get((job, effort)) for effort in efforts] for job in _drawn(rows)},
        unit="% above the bound",
    )


def _drawn(rows: Sequence[Row]) -> list[str]:
    """The jobs that were planned with several efforts."""
    return [job for job in JOBS if len({row["effort"] for row in rows if row["job"] == job and row["seed"] == 0}) > 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--efforts", default=str(EFFORT))
    parser.add_argument("--only", help="names of jobs; all by default")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--docs", action="store_true")
    chosen = parser.parse_args()
    content: dict[str, Any] = {"runs": {}, "rows": []}
    if chosen.json.exists():
        content = json.loads(chosen.json.read_text())
    if chosen.docs:
        write_between(PAGE, DEFAULT, END_DEFAULT, by_default(content["rows"]))
        write_between(PAGE, EFFORTS, END_EFFORTS, by_effort(content["rows"]))
        PICTURE.write_bytes(svg(curves(content["rows"])))
        return
    # The kernels' compilation is kept on disk; it is no part of a search.
    planned("E", effort=0.5, seed=0)
    for job in JOBS if chosen.only is None else chosen.only.split(","):
        for effort in map(float, chosen.efforts.split(",")):
            for seed in map(int, chosen.seeds.split(",")):
                row = planned(job, effort=effort, seed=seed)
                print(row, flush=True)
                same = [(r["job"], r["effort"], r["seed"]) == (job, effort, seed) for r in content["rows"]]
                kept = [r for r, replaced in zip(content["rows"], same, strict=True) if not replaced]
                content["rows"] = sorted([*kept, row], key=lambda r: (r["job"], r["effort"], r["seed"]))
                content["runs"][row["commit"]] = provenance()
                chosen.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
