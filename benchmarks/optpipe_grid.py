"""OptPipe's grid: what each method reaches, how far from the bound, and how long it took.

    python benchmarks/optpipe_grid.py [--quick] [--milp SECONDS] [--only 'P,M;P,M,TO,LIMIT'] [--workers 2]
        [--again] [--json FILE]
    python benchmarks/optpipe_grid.py --baselines-only --json FILE    # the baselines of the file's cells anew
    python benchmarks/optpipe_grid.py --docs --json FILE              # the table of docs/notes/optpipe.md from the file

F = I = W = 10, C = 1, an activation of 2 of which W keeps 1, full duplex; offload and reload take To; the limit is in
activations.  `cpu` is the processor time that this process used until the last improvement and until it stopped: on a
shared machine the clock on the wall says more about the neighbours.  Every value is simulated under the limit.

The baselines know the limit: `adaoffload` and `pipeoffload` are the library's schedules of that name (the variant
`tuned`, not the rule as printed), with one chunk per device; `zb` at default options moves nothing.  All three are
starts of OptPipe's search.

`milp` is the paper's program, plain, by SCIP: its best schedule after `--milp` seconds, "none in N s" where it found
no schedule, and "not built" above 256 stages x micro-batches, where its rows alone take minutes.

With --json, cells that the file already has are kept and not run again, so that a broken run goes on where it stopped.
With --again, those of other commits are; `--milp 0` leaves the program's answer as it was.
Each row names the commit that searched it and the one that built its baselines, and `runs` says on which machine, with
which versions and by which command each commit did.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

from marks import write_between
from provenance import commit, provenance
from rich.console import Console
from rich.table import Table

from debubble.ir import InfeasibleError, Placement, Schedule, StageCosts
from debubble.papers.optpipe.program.milp import solve_milp
from debubble.papers.optpipe.program.milp_model import MilpModel
from debubble.schedules import schedules
from debubble.search.effort import Deadline, Effort
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem

BASELINES = {"adaoffload": {}, "pipeoffload": {"chunks": 1}, "zb": {}}
"""Schedules of the library, with their options."""
COLUMNS = (
    "p", "m", "To", "limit", "bound", "optpipe", "gap", "steps", "cpu best", "cpu end", *BASELINES, "milp", "commit",
    "baselines commit",
)  # fmt: skip
LARGEST_MILP = 256
"""Stages x micro-batches."""
PAGE = Path(__file__).parents[1] / "docs" / "notes" / "optpipe.md"
BEGIN, END = "<!-- grid: written by benchmarks/optpipe_grid.py --docs -->", "<!-- end of grid -->"


def problem_of(p: int, m: int, to: int, limit: int) -> OrderProblem:
    costs = StageCosts.of(
        stages=p, forward=10, backward_input=10, backward_weight=10, activation=2, activation_after_input=1,
        communication=1, offload=to, memory_limit=2 * limit,
    )  # fmt: skip
    return OrderProblem(placement=Placement.linear(p), micro_batches=m, costs=costs, offload=True)


def cells(*, quick: bool) -> Iterator[tuple[int, int, int, int, float]]:
    """(p, m, To, limit, seconds)."""
    sizes = [(4, 8), (4, 16), (4, 32), (8, 16), (8, 32)]
    for p, m in sizes[:1] if quick else sizes:
        for to in (5, 10):
            for limit in range(3, p + 1):
                yield p, m, to, limit, 10.0
    if quick:
        return
    for to in (5, 10):
        for limit in range(3, 17):
            yield 16, 32, to, limit, 60.0
    yield from ((4, 8, 20, 3, 60.0), (8, 32, 20, 4, 60.0), (8, 32, 20, 8, 60.0), (8, 32, 40, 4, 300.0))
    for m in (64, 256):
        yield from ((8, m, 10, 4, 60.0), (8, m, 20, 8, 60.0))


def row(p: int, m: int, to: int, limit: int, seconds: float, *, milp: float, workers: int) -> dict[str, Any]:
    problem = problem_of(p, m, to, limit)
    begin = time.process_time()
    best_at, end = 0.0, 0.0
    value = bound = float("inf")
    steps = 0
    built = {name: baseline(name, p, m, to, limit) for name in BASELINES}
    starts = [schedule for schedule in built.values() if schedule is not None]
    for found in optimize(problem, starts=starts, effort=seconds, workers=workers):
        end = time.process_time() - begin
        if float(found.value) < value:
            best_at = end
        value, bound, steps = float(found.value), float(found.bound), found.steps
    result: dict[str, Any] = {
        "p": p, "m": m, "To": to, "limit": limit, "bound": bound, "optpipe": value,
        "gap": round((value - bound) / value, 5), "steps": steps, "cpu best": round(best_at, 2),
        "cpu end": round(end, 2),
    }  # fmt: skip
    program = _milp(problem, milp) if milp else {}
    return result | {"commit": commit()} | baselines(p, m, to, limit) | program


def baselines(p: int, m: int, to: int, limit: int) -> dict[str, Any]:
    """The baselines' makespans; None where one does not fit."""
    problem = problem_of(p, m, to, limit)
    built = {name: baseline(name, p, m, to, limit) for name in BASELINES}
    values = {name: None if schedule is None else float(problem.value(schedule)) for name, schedule in built.items()}
    return values | {"baselines commit": commit()}


def baseline(name: str, p: int, m: int, to: int, limit: int) -> Schedule | None:
    """A baseline under the limit; None if it does not fit."""
    return _built(name, p, m, 0 if name == "zb" else to, limit)


@cache
def _built(name: str, p: int, m: int, to: int, limit: int) -> Schedule | None:
    try:
        return schedules[name](devices=p, micro_batches=m, costs=problem_of(p, m, to, limit).costs, **BASELINES[name])
    except InfeasibleError:
        return None


def _milp(problem: OrderProblem, seconds: float) -> dict[str, Any]:
    if problem.stages * problem.micro_batches > LARGEST_MILP:
        return {"milp": "not built", "milp commit": commit()}
    program = MilpModel(problem)
    answer = solve_milp(program, effort=Effort(seconds, deadline=Deadline(seconds)))
    value = f"none in {seconds:g} s" if answer.incumbent is None else float(answer.incumbent.value)
    found = {"milp": value, "milp bound": round(answer.bound, 1), "milp binaries": program.binaries}
    return found | {"milp commit": commit()}


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The table of docs/notes/optpipe.md, and what it says on average."""
    head = "| p, m | offload | limit | bound | OptPipe | gap | cpu s | AdaOffload | PipeOffload | zb | MILP, 5 s |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    lines += [
        f"| {r['p']}, {r['m']} | {r['To']} | {r['limit']} | {r['bound']:g} | {r['optpipe']:g} | {100 * r['gap']:.2f}% |"
        f" {r['cpu best']:.1f} | {_cell(r['adaoffload'])} | {_cell(r['pipeoffload'])} | {_cell(r['zb'])} |"
        f" {_cell(r.get('milp'))} |"
        for r in rows
    ]
    saved = {name: [1 - r["optpipe"] / r[name] for r in rows if r[name] is not None] for name in BASELINES}
    slower = sum(any(r[name] is not None and r[name] < r["optpipe"] for name in BASELINES) for r in rows)
    averages = ", ".join(
        f"{100 * mean(each):.1f}% against `{name}` ({100 * min(each):.1f} to {100 * max(each):.1f}%)"
        for name, each in saved.items()
    )
    proven = sum(r["optpipe"] <= r["bound"] for r in rows)
    summary = f"OptPipe saves on average {averages}."
    counts = f"It is slower than one of them in {slower} of {len(rows)} cells, and proven optimal in {proven}."
    commits = ", ".join(f"{many} of {name[:7]}" for name, many in Counter(r["commit"] for r in rows).most_common())
    return "\n".join([*lines, "", summary, counts, f"Cells by the commit that searched them: {commits}."])


def _cell(value: float | str | None) -> str:
    if isinstance(value, str):
        return value.partition(" in ")[0]
    return "-" if value is None else f"{value:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--milp", type=float, default=60.0, help="seconds for the plain MILP per cell; 0: leave it out")
    parser.add_argument("--only", default="", help="cells whose P,M,TO,LIMIT begins so, separated by ;")
    parser.add_argument("--workers", type=int, default=2, help="threads of the search, which each have those seconds")
    parser.add_argument("--again", action="store_true", help="search the file's cells of other commits anew")
    parser.add_argument("--baselines-only", action="store_true", help="build the baselines of the file's cells anew")
    parser.add_argument("--docs", action="store_true", help="write the table of docs/notes/optpipe.md from the file")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    place = Path(arguments.json) if arguments.json else None
    if place is None and (arguments.baselines_only or arguments.docs):
        parser.error("--baselines-only and --docs need --json FILE.")
    kept = json.loads(place.read_text()) if place and place.exists() else {"runs": {}, "rows": []}
    runs, rows = kept["runs"], kept["rows"]
    if arguments.docs:
        write_between(PAGE, BEGIN, END, page(rows))
        return

    def wanted(cell: Sequence[float]) -> bool:
        name = ",".join(map(str, cell[:4]))
        return any(name.startswith(only) for only in arguments.only.split(";"))

    def keep() -> None:
        if place:
            runs[commit()] = provenance()
            named = {each[column] for each in rows for column in ("commit", "baselines commit")}
            content = {"runs": {name: runs[name] for name in runs if name in named}, "rows": rows}
            place.write_text(json.dumps(content, indent=1) + "\n")

    if arguments.baselines_only:
        for each in rows:
            cell = tuple(each[name] for name in COLUMNS[:4])
            if wanted(cell):
                each.update(baselines(*cell))
                print({name: each[name] for name in (*COLUMNS[:4], "optpipe", *BASELINES)}, flush=True)
                keep()
    else:
        # The kernel's compilation is kept on disk; it is no part of a search.
        list(optimize(problem_of(2, 3, 20, 2), effort=2.0))
        found = {tuple(each[name] for name in COLUMNS[:4]): each for each in rows}
        for cell in cells(quick=arguments.quick):
            before = found.get(cell[:4])
            stale = before is not None and arguments.again and before["commit"] != commit()
            if not wanted(cell) or (before is not None and not stale):
                continue
            searched = row(*cell, milp=arguments.milp, workers=arguments.workers)
            print(searched, flush=True)
            if before is None:
                rows.append(searched)
            else:
                before.update(searched)
            keep()
    table = Table(*COLUMNS)
    for each in rows:
        table.add_row(*(str(each.get(name)) for name in COLUMNS))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
