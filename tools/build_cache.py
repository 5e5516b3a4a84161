"""Builds the schedules that are shipped with the package: `python tools/build_cache.py [SECONDS]`.

Uniform costs with a little communication, offload as fast as a forward, limits of half and of all of 1F1B's memory.
"""

from __future__ import annotations

import sys

from debubble.ir import Placement, StageCosts
from debubble.search import cache
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem

SHAPES = ((4, 8), (4, 16), (8, 16), (8, 32))


def shipped_problems() -> list[OrderProblem]:
    """List the problems whose schedules are shipped."""
    return [
        OrderProblem(
            placement=Placement.linear(p),
            micro_batches=m,
            costs=StageCosts.of(
                stages=p, forward=10, backward_input=10, backward_weight=10, activation=2, activation_after_input=1,
                communication=1, offload=10, memory_limit=2 * limit,
            ),
            offload=True,
        )
        for p, m in SHAPES
        for limit in (max(3, p // 2), p)
    ]  # fmt: skip


def main(seconds: float = 30.0) -> None:
    """Search every problem and write its entry to the package."""
    for problem in shipped_problems():
        *_, best = optimize(problem, effort=seconds)
        place = cache.write(cache.SHIPPED / cache.name_of(problem), problem, best)
        sys.stderr.write(f"{place.relative_to(cache.SHIPPED)}: {float(best.value):g}, gap {best.gap:.2%}\n")


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
