"""OptPipe's grid: result, gap to the bound and time of each method.

    python benchmarks/optpipe_grid.py [P,M[,TO[,LIMIT]] ...]
    python benchmarks/optpipe_grid.py --docs                    # the table of docs/notes/optpipe.md

F = I = W = 10, C = 1, an activation of 2 of which W keeps 1, full duplex; offload and reload take To; the limit is in
activations.  `cpu best` is the processor time that this process used until the last improvement.  Every value is
simulated under the limit.

The baselines know the limit: `adaoffload` and `pipeoffload` are the library's schedules of that name (the variant
`tuned`, not the rule as printed), with one chunk per device; `zb` at default options moves nothing.  All three are
starts of OptPipe's search.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmark import Benchmark, Row, table

from debubble.ir import InfeasibleError, Placement, Schedule, StageCosts
from debubble.schedules import schedules
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem

BASELINES: dict[str, dict[str, Any]] = {"adaoffload": {}, "pipeoffload": {"chunks": 1}, "zb": {}}
"""Schedules of the library, with their options."""
WORKERS = 2

Cell = tuple[int, int, int, int, float]
"""p, m, To, limit, and the effort."""


def cells() -> Iterator[Cell]:
    for p, m in ((4, 8), (4, 16), (4, 32), (8, 16), (8, 32), (16, 32)):
        for to in (5, 10):
            for limit in range(3, p + 1):
                yield p, m, to, limit, 60.0 if p == 16 else 10.0
    yield from ((4, 8, 20, 3, 60.0), (8, 32, 20, 4, 60.0), (8, 32, 20, 8, 60.0), (8, 32, 40, 4, 300.0))
    for m in (64, 256):
        yield from ((8, m, 10, 4, 60.0), (8, m, 20, 8, 60.0))


def problem_of(p: int, m: int, to: int, limit: int) -> OrderProblem:
    costs = StageCosts.of(
        stages=p, forward=10, backward_input=10, backward_weight=10, activation=2, activation_after_input=1,
        communication=1, offload=to, memory_limit=2 * limit,
    )  # fmt: skip
    return OrderProblem(placement=Placement.linear(p), micro_batches=m, costs=costs, offload=True)


def measure(cell: Cell) -> Row:
    p, m, to, limit, effort = cell
    problem, begin = problem_of(p, m, to, limit), time.process_time()
    starts = {name: baseline(name, problem) for name in BASELINES}
    value, bound, best_at = float("inf"), 0.0, 0.0
    schedules = [schedule for schedule in starts.values() if schedule is not None]
    for solution in optimize(problem, starts=schedules, effort=effort, workers=WORKERS):
        if float(solution.value) < value:
            best_at = time.process_time() - begin
        value, bound = float(solution.value), float(solution.bound)
    return {
        "p": p, "m": m, "To": to, "limit": limit, "bound": bound, "optpipe": value,
        "gap": round((value - bound) / value, 5), "cpu best": round(best_at, 2),
        **{name: None if schedule is None else float(problem.value(schedule)) for name, schedule in starts.items()},
    }  # fmt: skip


def baseline(name: str, problem: OrderProblem) -> Schedule | None:
    """Schedule of a baseline under the limit; None if it does not fit."""
    try:
        return schedules[name](
            devices=problem.stages, micro_batches=problem.micro_batches, costs=problem.costs, **BASELINES[name]
        )
    except InfeasibleError:
        return None


def page(rows: list[Row]) -> str:
    """The grid, and its averages."""
    columns = {"adaoffload": "AdaOffload", "pipeoffload": "PipeOffload", "zb": "zb"}
    lines = [
        (
            f"{r['p']}, {r['m']}", str(r["To"]), str(r["limit"]), f"{r['bound']:g}", f"{r['optpipe']:g}",
            f"{100 * r['gap']:.2f}%", f"{r['cpu best']:.1f}",
            *("-" if r[column] is None else f"{r[column]:g}" for column in columns),
        )
        for r in rows
    ]  # fmt: skip
    saved = {name: [1 - r["optpipe"] / r[name] for r in rows if r[name] is not None] for name in BASELINES}
    slower = sum(any(r[name] is not None and r[name] < r["optpipe"] for name in BASELINES) for r in rows)
    averages = ", ".join(
        f"{100 * mean(savings):.1f}% against `{name}` ({100 * min(savings):.1f} to {100 * max(savings):.1f}%)"
        for name, savings in saved.items()
    )
    proven = sum(r["optpipe"] <= r["bound"] for r in rows)
    commits = ", ".join(f"{many} of {name[:7]}" for name, many in Counter(r["commit"] for r in rows).most_common())
    return "\n".join(
        (
            table(("p, m", "offload", "limit", "bound", "OptPipe", "gap", "cpu s", *columns.values()), lines), "",
            f"OptPipe saves on average {averages}.",
            f"It is slower than one of them in {slower} of {len(rows)} cells, and proven optimal in {proven}.",
            f"Cells by the commit that searched them: {commits}.",
        )
    )  # fmt: skip


BENCHMARK = Benchmark(
    name="optpipe_grid", about=__doc__, cases={",".join(map(str, cell[:4])): cell for cell in cells()},
    measure=measure, pages={"notes/optpipe.md#grid": page},
    prepare=lambda: list(optimize(problem_of(2, 3, 20, 2), effort=2.0)),  # compiles the kernel, which is cached on disk
)  # fmt: skip

if __name__ == "__main__":
    BENCHMARK.main()
