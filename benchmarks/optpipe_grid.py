"""OptPipe's grid: what each method reaches, how far from the bound, and how long it took.

    python benchmarks/optpipe_grid.py [--quick] [--milp SECONDS] [--only 'P,M;P,M,TO,LIMIT'] [--wall 1] [--workers 2]
        [--json FILE]

F = I = W = 10, C = 1, an activation of 2 of which W keeps 1, full duplex; offload and reload take To; the limit is in
activations.  `cpu` is the processor time that this process used until the last improvement and until it stopped: on a
shared machine the clock on the wall says more about the neighbours.  Every value is simulated under the limit.

`milp` is the paper's programme, plain, by SCIP: its best schedule after `--milp` seconds, "none in N s" where it found
no schedule, and "not built" above 256 stages x micro-batches, where its rows alone take minutes.  `zb` moves nothing.
With --json, cells that the file already has are kept and not run again, so that a broken run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from debubble.ir import DebubbleError, Placement, StageCosts
from debubble.planners.optpipe import initial
from debubble.schedules import schedules
from debubble.simulator import simulate
from debubble.solver.adaoffload import ada_offload, pipe_offload
from debubble.solver.milp import solve_milp
from debubble.solver.optimize import optimize
from debubble.solver.problem import OrderProblem

COLUMNS = (
    "p", "m", "To", "limit", "bound", "optpipe", "gap", "steps", "cpu best", "cpu end", "adaoffload", "pipeoffload",
    "zb", "milp",
)  # fmt: skip
LARGEST_MILP = 256
"""Stages x micro-batches."""


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


def row(
    p: int, m: int, to: int, limit: int, seconds: float, *, milp: float, wall: float, workers: int
) -> dict[str, Any]:
    problem = problem_of(p, m, to, limit)
    begin = time.process_time()
    best_at, end = 0.0, 0.0
    value = bound = float("inf")
    steps = 0
    # The wall gets more than the processor may have: a neighbour may be using it.
    starts = initial(problem.costs, m)
    for found in optimize(problem, starts=starts, effort=seconds, workers=workers):
        end = time.process_time() - begin
        if end > workers * seconds and value < float("inf"):
            break
        if float(found.value) < value:
            best_at = end
        value, bound, steps = float(found.value), float(found.bound), found.steps
    result: dict[str, Any] = {
        "p": p, "m": m, "To": to, "limit": limit, "bound": bound, "optpipe": value,
        "gap": round((value - bound) / value, 5), "steps": steps, "cpu best": round(best_at, 2),
        "cpu end": round(end, 2),
    }  # fmt: skip
    costs = problem.costs
    for name, rule in (("adaoffload", ada_offload), ("pipeoffload", pipe_offload)):
        result[name] = _value(lambda rule=rule: rule(costs, m), problem)
    result["zb"] = _value(
        lambda: schedules["zb"](devices=p, micro_batches=m, costs=costs, memory_limit=2 * limit), problem
    )
    return result | _milp(problem, milp)


def _milp(problem: OrderProblem, seconds: float) -> dict[str, Any]:
    if not seconds:
        return {"milp": None}
    if problem.stages * problem.micro_batches > LARGEST_MILP:
        return {"milp": "not built"}
    answer = solve_milp(problem, seconds=seconds)
    value = f"none in {seconds:g} s" if answer.incumbent is None else float(answer.incumbent.value)
    return {"milp": value, "milp bound": round(answer.bound, 1), "milp binaries": answer.binaries}


def _value(build: Any, problem: OrderProblem) -> float | None:
    try:
        return float(simulate(build(), problem.costs).makespan)
    except DebubbleError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--milp", type=float, default=60.0, help="seconds for the plain MILP per cell; 0: leave it out")
    parser.add_argument("--only", default="", help="cells whose P,M,TO,LIMIT begins so, separated by ;")
    parser.add_argument("--wall", type=float, default=4.0, help="seconds on the wall per second of processor")
    parser.add_argument("--workers", type=int, default=2, help="threads of the search, which each have those seconds")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    # The kernel's compilation is kept on disk; it is no part of a search.
    list(optimize(problem_of(2, 3, 20, 2), effort=2.0))
    place = Path(arguments.json) if arguments.json else None
    rows = json.loads(place.read_text()) if place and place.exists() else []
    done = {tuple(each[name] for name in COLUMNS[:4]) for each in rows}
    for cell in cells(quick=arguments.quick):
        name = ",".join(map(str, cell[:4]))
        if cell[:4] in done or not any(name.startswith(only) for only in arguments.only.split(";")):
            continue
        rows.append(row(*cell, milp=arguments.milp, wall=arguments.wall, workers=arguments.workers))
        print(rows[-1], flush=True)
        if place:
            place.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(*COLUMNS)
    for each in rows:
        table.add_row(*(str(each.get(name)) for name in COLUMNS))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
