"""Schedules to start a search from: list schedules under several depths of warm-up, made to fit by offload or R."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.ir import Kind, Number, Op, Schedule
from debubble.solver.eviction import offload_to_fit, recompute_to_fit
from debubble.solver.list_scheduling import list_schedule
from debubble.solver.problem import OrderProblem


def constructed(problem: OrderProblem) -> Iterator[Schedule]:
    """List schedules of a problem, the least memory first; some may not fit the limit."""
    for room in _rooms(problem):
        orders = list_schedule(problem, room=room)
        if orders is None:
            continue
        yield problem.schedule("searched", tuple(map(tuple, orders)))
        if problem.offload:
            for everything in (False, True):
                moved = offload_to_fit(problem, orders, everything=everything)
                if moved is not None:
                    yield moved
        if problem.recompute:
            dropped = recompute_to_fit(problem, orders)
            if dropped is not None:
                yield dropped
    yield one_at_a_time(problem)


def one_at_a_time(problem: OrderProblem) -> Schedule:
    """Every micro-batch forwards and backwards before the next: the least memory without offload or recomputation."""
    backward = (Kind.I, Kind.W) if problem.split else (Kind.B,)
    return problem.schedule(
        "searched",
        tuple(
            tuple(
                op
                for j in range(problem.micro_batches)
                for op in (
                    *(Op(Kind.F, s, j) for s in held),
                    *(Op(kind, s, j) for s in reversed(held) for kind in backward),
                )
            )
            for held in problem.placement.stages_of
        ),
    )


def _rooms(problem: OrderProblem) -> Iterator[list[Number | None]]:
    """Bytes of activations per device to plan with: the limit, 1F1B's, and, if memory can be freed, up to twice it."""
    costs, p = problem.costs, problem.devices
    limits = [costs.limit_of(d) for d in range(p)]
    free: list[Number | None] = [
        None if limit is None else limit - costs.static_of(d) for d, limit in enumerate(limits)
    ]
    whole = [sum(costs.activation[s] for s in held) for held in problem.placement.stages_of]
    yield free
    one_f_one_b: list[Number | None] = [size * (p - d) for d, size in enumerate(whole)]
    yield [_least(a, b) for a, b in zip(free, one_f_one_b, strict=True)]
    if not problem.offload and not problem.recompute:
        return
    yield one_f_one_b
    for extra in sorted({1, 2, max(3, p // 2), p}):
        yield [None if r is None else r + extra * size for r, size in zip(free, whole, strict=True)]


def _least(a: Number | None, b: Number | None) -> Number | None:
    return b if a is None else a if b is None else min(a, b)
