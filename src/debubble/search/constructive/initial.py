"""Schedules to start a search from: list schedules under several depths of warm-up, made to fit by offload or R.

Offload lends a device memory: while a micro-batch is on its way to the last stage and back, its activation is away,
but for the time of the two transfers.  Planned with as much memory as that, and offloading whatever the link has time
for, list schedules come within a few messages of the lower bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from debubble.ir import Kind, Number, Op, Schedule
from debubble.search.bounds import idle_allowed, round_trip
from debubble.search.constructive.list_scheduling import GapFilling, ListSchedule, ListScheduler
from debubble.search.constructive.offload import Pair, movable_pairs, offload_to_fit, recompute_to_fit
from debubble.search.constructive.zero_bubble import RULES, best_order, greedy_schedules
from debubble.search.problem import OrderProblem

PACES = (Fraction(0), Fraction(1, 4), Fraction(1, 2))
"""Parts of a W that lie between two micro-batches, as is foreseen, next to an F and an I: at first no W is due."""
LEAST_GAPS = (Fraction(1), Fraction(1, 2))
"""Parts of a W that a gap must have to be filled by it."""


def initial_schedules(problem: OrderProblem) -> Iterator[Schedule]:
    """Construct schedules to start a search from, what needs the least memory last; some may not fit the limit."""
    if problem.placement.chunks > 1:
        yield from schedules_of_chunks(problem)
    if problem.offload:
        yield from offloading_schedules(problem)
        yield from offloading_schedules(problem, idle=idle_allowed(problem))
    for capacity in _rooms(problem):
        timetable = list_schedule(problem, capacity)
        if timetable is None:
            continue
        yield problem.schedule(timetable.orders)
        if problem.offload:
            for eager in (frozenset[Pair](), movable_pairs(problem, timetable)):
                moved = offload_to_fit(problem, timetable.orders, eager=eager)
                if moved is not None:
                    yield moved
        if problem.recompute:
            dropped = recompute_to_fit(problem, timetable.orders)
            if dropped is not None:
                yield dropped
    yield one_at_a_time(problem)


def schedules_of_chunks(problem: OrderProblem) -> Iterator[Schedule]:
    """Construct schedules of several chunks per device: building blocks and greedy rules, which count on little memory.

    Where activations may leave memory, both are also planned with what the host lends, and made to fit.
    """
    if not problem.split:
        return
    free = _rooms_left(problem)
    rooms = [free, *(list(capacity) for capacity in _with_host_rooms(problem))] if problem.offload else [free]
    for capacity in rooms:
        built = best_order(
            "searched", problem.placement, problem.micro_batches, problem.costs, capacity, objective=problem.objective
        )
        greedy = greedy_schedules(problem.placement, problem.micro_batches, problem.costs, capacity, RULES)
        ruled = min(greedy, default=None, key=lambda outcome: getattr(outcome, problem.objective))
        for found in (built, ruled):
            if found is None:
                continue
            orders = found.orders
            fitted = offload_to_fit(problem, orders) if problem.offload else problem.schedule(orders)
            if fitted is not None:
                yield fitted


def list_schedule(
    problem: OrderProblem, capacity: Sequence[Number | None], rule: GapFilling | None = None
) -> ListSchedule | None:
    """Construct a list schedule that offloads nothing and recomputes nothing explicitly; None if it gets stuck.

    `capacity` is bytes for activations per device, None for any number.  Workspaces of fused recomputations are not
    counted: the exact simulation of each start decides.
    """
    nothing = (0,) * problem.stages
    costs = problem.costs.replace(recompute_workspace=nothing, recompute_workspace_input=nothing)
    scheduler = ListScheduler(
        problem.placement, problem.micro_batches, replace(problem.op_costs, costs=costs), capacity, split=problem.split
    )
    return scheduler.schedule(rule or GapFilling())


def offloading_schedules(problem: OrderProblem, *, idle: Sequence[Number] | None = None) -> Iterator[Schedule]:
    """Construct list schedules that use the memory of the host.

    `idle` is the time that each device may lose after its first backward before it fills every gap; any by default.
    With what the bound allows, the device that is the bottleneck stays busy, at the cost of others.
    """
    for capacity in _with_host_rooms(problem):
        for least_gap in LEAST_GAPS:
            timetable = list_schedule(problem, capacity, GapFilling(least_gap, None if idle is None else tuple(idle)))
            if timetable is not None:
                moved = offload_to_fit(problem, timetable.orders, eager=movable_pairs(problem, timetable))
                if moved is not None:
                    yield moved


def _with_host_rooms(problem: OrderProblem) -> Iterable[tuple[Number | None, ...]]:
    """Bytes of activations per device with those that may be away at a time, at each pace."""
    return dict.fromkeys(_with_host(problem, pace) for pace in PACES)


def _with_host(problem: OrderProblem, pace: Fraction) -> tuple[Number | None, ...]:
    """Bytes of activations per device, with those that may be away at a time."""
    costs, transfers = problem.costs, problem.costs.transfers
    assert transfers is not None
    apart = max(_apart(problem, device_stages, pace) for device_stages in problem.placement.stages_of)
    result: list[Number | None] = []
    for device, device_stages in enumerate(problem.placement.stages_of):
        capacity = costs.capacity_of(device)
        away: Number = 0
        for s in device_stages:
            leads = problem.longest_lead(Op(Kind.O, s, 0)) + problem.backward_lead(s)
            spare = round_trip(problem, s) + leads - transfers.offload[s] - transfers.reload[s]
            away += costs.activation[s] * max(0, int(spare // apart) if apart else problem.micro_batches)
        result.append(None if capacity is None else capacity + away)
    return tuple(result)


def _apart(problem: OrderProblem, device_stages: Sequence[int], pace: Fraction) -> Number:
    """Time from one micro-batch to the next on a device."""
    costs = problem.costs
    if not problem.split:
        return sum(costs.forward[s] + costs.backward(s) for s in device_stages)
    return sum(costs.forward[s] + costs.backward_input[s] + pace * costs.backward_weight[s] for s in device_stages)


def one_at_a_time(problem: OrderProblem) -> Schedule:
    """Let every micro-batch go forwards and backwards before the next: the least memory without offload or R."""
    backward = (Kind.I, Kind.W) if problem.split else (Kind.B,)
    return problem.schedule(
        [
            op
            for j in range(problem.micro_batches)
            for op in (
                *(Op(Kind.F, s, j) for s in device_stages),
                *(Op(kind, s, j) for s in reversed(device_stages) for kind in backward),
            )
        ]
        for device_stages in problem.placement.stages_of
    )


def _rooms_left(problem: OrderProblem) -> list[Number | None]:
    """Bytes that the limit leaves for activations, per device; None for any number."""
    return [problem.costs.capacity_of(device) for device in range(problem.devices)]


def _rooms(problem: OrderProblem) -> Iterator[list[Number | None]]:
    """Bytes of activations per device to plan with: the limit, 1F1B's, and, if R can free memory, up to twice it."""
    costs, p, free = problem.costs, problem.devices, _rooms_left(problem)
    whole = [sum(costs.activation[s] for s in device_stages) for device_stages in problem.placement.stages_of]
    yield free
    one_f_one_b: list[Number | None] = [size * (p - d) for d, size in enumerate(whole)]
    yield [_least(a, b) for a, b in zip(free, one_f_one_b, strict=True)]
    if not problem.recompute:
        return
    yield one_f_one_b
    for extra in sorted({1, 2, max(3, p // 2), p}):
        yield [None if r is None else r + extra * size for r, size in zip(free, whole, strict=True)]


def _least(a: Number | None, b: Number | None) -> Number | None:
    return b if a is None else a if b is None else min(a, b)
