"""`zb` under memory limits from p / 2 up: value, bound and gap at p = 8, m = 32.

    python benchmarks/zb_limits.py [--seconds 30] [--output benchmarks/results/zb_limits.json]   # six minutes
    python benchmarks/zb_limits.py --docs                             # the table of docs/notes/optpipe.md from the file

Rows that the file has of the same commit and `--seconds` are kept and not run again, so that a broken run goes on where
it stopped.

Limits are 4 to 8 activations; W frees all of one, half of it, or none; F, I, W, C = 10, 10, 10, 0 or 10, 11, 9, 1.  The
schedule is that of default options; `cpu` and `wall` are the seconds that it took, and the wall depends on the
neighbours.  The bound is the best of the analytic ones, exact search with the same limits of work, and `--seconds` on
the skeleton; the gap is (value - bound) / value.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from marks import write_between
from provenance import commit, measured_by

import debubble as db
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort
from debubble.search.exact.cp_sat import ROOMY, solve
from debubble.search.exact.tight_memory import WHOLE, has_coarse_times, skeleton_bound
from debubble.search.problem import Incumbent, OrderProblem

DEVICES, MICRO_BATCHES = 8, 32
LIMITS = (4, 5, 6, 7, 8)
REMAINS = {"all": 2, "half": 1, "none": 0}
"""What of an activation of size 2 is left for W to free."""
TIMES = ((10, 10, 10, 0), (10, 11, 9, 1))
PAGE = Path(__file__).parents[1] / "docs" / "notes" / "optpipe.md"
BEGIN, END = "<!-- limits: written by benchmarks/zb_limits.py --docs -->", "<!-- end of limits -->"


def costs_of(times: tuple[int, int, int, int], frees: str, limit: int) -> db.StageCosts:
    forward, backward_input, backward_weight, communication = times
    return db.StageCosts.of(
        stages=DEVICES, forward=forward, backward_input=backward_input, backward_weight=backward_weight,
        communication=communication, activation=2, activation_after_input=REMAINS[frees], memory_limit=2 * limit,
    )  # fmt: skip


def bound_of(problem: OrderProblem, schedule: db.Schedule, *, seconds: float) -> float:
    best = Incumbent(schedule=schedule, value=problem.value(schedule), bound=lower_bound(problem), source="start")
    if has_coarse_times(problem):
        for better in solve(problem, best, effort=Effort(min(seconds, WHOLE))):
            best = better
    if best.optimal:
        return float(best.bound)
    return float(skeleton_bound(problem, horizon=ROOMY * best.value, effort=Effort(seconds), bound=best.bound))


def row(times: tuple[int, int, int, int], frees: str, limit: int, seconds: float) -> dict[str, Any]:
    costs = costs_of(times, frees, limit)
    cpu, wall = time.process_time(), time.perf_counter()
    schedule = db.schedules["zb"](devices=DEVICES, micro_batches=MICRO_BATCHES, costs=costs)
    spent = {"cpu": round(time.process_time() - cpu, 2), "wall": round(time.perf_counter() - wall, 2)}
    problem = OrderProblem(placement=schedule.placement, micro_batches=MICRO_BATCHES, costs=costs)
    value = float(problem.value(schedule))
    bound = bound_of(problem, schedule, seconds=seconds)
    gap = round((value - bound) / value, 4)
    return {"times": times, "W frees": frees, "limit": limit, "value": value, "bound": bound, "gap": gap, **spent}


def known(output: Path, seconds: float) -> list[dict[str, Any]]:
    """The rows of an earlier run of this commit."""
    found = json.loads(output.read_text()) if output.exists() else {}
    same = found.get("commit") == commit() and found["seconds"] == seconds
    return found["rows"] if same else []


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table of the finer times, value / bound, and what it says."""
    finer = [row for row in rows if tuple(row["times"]) == TIMES[1]]
    named = {"all": "W frees all", "half": "W frees half", "none": "I frees all"}
    lines = [f"| limit | {' | '.join(map(str, LIMITS))} |", "|" + " --- |" * (1 + len(LIMITS))]
    for frees, name in named.items():
        some = [f"{row['value']:g} / {row['bound']:g}" for row in finer if row["W frees"] == frees]
        lines.append(f"| {name} | {' | '.join(some)} |")
    proven = sum(row["value"] <= row["bound"] for row in finer)
    most = max(finer, key=lambda row: float(row["gap"]))
    where = f"limit {most['limit']}, {named[most['W frees']]}"
    middle = median(row["cpu"] for row in finer)
    summary = f"{proven} of the {len(finer)} are proven; at most {most['gap']:.1%} are left ({where})."
    return "\n".join([*lines, "", f"{summary}  A schedule takes {middle:.0f} seconds of a core in the median."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "zb_limits.json")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/notes/optpipe.md from the file")
    given = parser.parse_args()
    if given.docs:
        write_between(PAGE, BEGIN, END, page(json.loads(given.output.read_text())["rows"]))
        return
    measured = known(given.output, given.seconds)
    for cell in list(product(TIMES, REMAINS, LIMITS))[len(measured) :]:
        measured.append(row(*cell, given.seconds))
        print(*measured[-1].values(), flush=True)
        setting = {"devices": DEVICES, "micro_batches": MICRO_BATCHES, "seconds": given.seconds}
        given.output.write_text(json.dumps({**measured_by(), **setting, "rows": measured}, indent=1) + "\n")


if __name__ == "__main__":
    main()
