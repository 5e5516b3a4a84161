"""Two chunks per device under memory limits from half of 1F1B's up: value and bound of `optpipe` at p = 8, m = 32.

    python benchmarks/chunk_limits.py [--output benchmarks/results/chunk_limits.json]   # ten minutes
    python benchmarks/chunk_limits.py --docs                     # the table of docs/notes/optpipe.md from the file

Rows that the file has of the same commit are kept and not run again, so that a broken run goes on where it stopped.

A stage has half of what a device holds of a micro-batch, and 1F1B would hold eight of these; W frees all of an
activation, half of it, or none.  Nothing is moved or recomputed.  The plan is that of the default effort, in the better
one of both placements; `cpu` is the seconds of a core that it took.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from marks import write_between
from provenance import commit, measured_by
from zb_limits import LIMITS, PAGE, REMAINS

import debubble as db
from debubble.planners import FixedStages, Problem, planners
from debubble.schedules import schedules

DEVICES, CHUNKS, MICRO_BATCHES = 8, 2, 32
TIMES = ((10, 10, 10, 0), (10, 10, 10, 1), (10, 11, 9, 1))
SMALL = 0.03
"""Gaps that are said to be small."""
BEGIN, END = "<!-- chunks: written by benchmarks/chunk_limits.py --docs -->", "<!-- end of chunks -->"


def costs_of(times: tuple[int, int, int, int], frees: str, limit: int) -> db.StageCosts:
    forward, backward_input, backward_weight, communication = times
    return db.StageCosts.of(
        stages=DEVICES * CHUNKS, forward=forward, backward_input=backward_input, backward_weight=backward_weight,
        communication=communication, activation=2, activation_after_input=REMAINS[frees], activation_recomputed=2,
        memory_limit=2 * CHUNKS * limit,
    )  # fmt: skip


def published(times: tuple[int, int, int, int], frees: str, limit: int) -> tuple[float, str]:
    """Time and name of the fastest registered schedule of two chunks that fits; infinite and empty if none does."""
    costs, fastest = costs_of(times, frees, limit), (math.inf, "")
    for name in schedules:
        entry = schedules[name]
        chunks = {"chunks": CHUNKS} if "chunks" in entry.options else {}
        if not chunks and entry.default_chunks != CHUNKS:
            continue
        try:
            made = entry(devices=DEVICES, micro_batches=MICRO_BATCHES, costs=costs, **chunks)
            fastest = min(fastest, (float(db.simulate(made, costs).makespan), name))
        except db.DebubbleError:
            continue
    return fastest


def row(times: tuple[int, int, int, int], frees: str, limit: int) -> dict[str, Any]:
    workload, cpu = FixedStages(costs_of(times, frees, limit)), time.process_time()
    plan = planners["optpipe"](
        Problem(devices=DEVICES, micro_batches=MICRO_BATCHES, chunks=CHUNKS, workload=workload, effort=10)
    )
    cpu = time.process_time() - cpu
    library, name = published(times, frees, limit)
    in_v = plan.solution.schedule.placement == db.Placement.v_shape(DEVICES, CHUNKS)
    return {
        "times": times, "W frees": frees, "limit": limit, "value": float(plan.makespan),
        "bound": float(plan.lower_bound), "gap": round(float(plan.gap), 4), "placement": "V" if in_v else "loop",
        "cpu": round(cpu, 2), "published": library, "schedule": name,
    }  # fmt: skip


def known(output: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run of this commit."""
    found = json.loads(output.read_text()) if output.exists() else {}
    return found["rows"] if found.get("commit") == commit() else []


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table, value / bound, and what it says."""
    named = {"all": "W frees all", "half": "W frees half", "none": "I frees all"}
    lines = [f"| F, I, W, C | limit | {' | '.join(map(str, LIMITS))} |", "|" + " --- |" * (2 + len(LIMITS))]
    for times, frees in product(TIMES, REMAINS):
        some = [r for r in rows if tuple(r["times"]) == times and r["W frees"] == frees]
        cells = " | ".join(f"{r['value']:g} / {r['bound']:g}" for r in some)
        lines.append(f"| {', '.join(map(str, times))} | {named[frees]} | {cells} |")
    proven = sum(r["value"] <= r["bound"] for r in rows)
    small = sum(r["gap"] < SMALL for r in rows)
    most = max(rows, key=lambda r: float(r["gap"]))
    where = f"limit {most['limit']}, {', '.join(map(str, most['times']))}, {named[most['W frees']]}"
    in_v = sum(r["placement"] == "V" for r in rows)
    said = (
        f"{proven} of the {len(rows)} are proven, and {small} have a gap below {SMALL:.0%}; at most {most['gap']:.1%}"
    )
    missed = sum(r["published"] < r["value"] for r in rows)
    faster = f"A registered schedule with two chunks per device is faster in {missed} of them."
    return "\n".join([*lines, "", f"{said} are left ({where}).  {in_v} of the plans are in a V.  {faster}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "chunk_limits.json")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/notes/optpipe.md from the file")
    given = parser.parse_args()
    if given.docs:
        write_between(PAGE, BEGIN, END, page(json.loads(given.output.read_text())["rows"]))
        return
    measured = known(given.output)
    for cell in list(product(TIMES, REMAINS, LIMITS))[len(measured) :]:
        measured.append(row(*cell))
        print(*measured[-1].values(), flush=True)
        setting = {"devices": DEVICES, "chunks": CHUNKS, "micro_batches": MICRO_BATCHES}
        given.output.write_text(json.dumps({**measured_by(), **setting, "rows": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
