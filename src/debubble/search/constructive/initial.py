"""Initial schedules of a search: list schedules with several depths of warm-up, made to fit by offload or R.

Offload extends a device's memory: while a micro-batch passes to the last stage and back, its activation is on the host,
except during the two transfers.  List schedules built with this additional memory, offloading whatever the link has
time for, come within a few messages of the lower bound.
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

W_FRACTIONS = (Fraction(0), Fraction(1, 4), Fraction(1, 2))
"""Expected numbers of W per micro-batch in the warm-up, in addition to an F and an I: few W are due there."""
MIN_GAPS = (Fraction(1), Fraction(1, 2))
"""Minimum gaps filled with a W, as fractions of its time."""


def initial_schedules(problem: OrderProblem) -> Iterator[Schedule]:
    """Construct initial schedules of a search, the one with the least memory last; some may exceed the limit."""
    if problem.placement.chunks > 1:
        yield from schedules_of_chunks(problem)
    if problem.offload:
        yield from offloading_schedules(problem)
        yield from offloading_schedules(problem, idle=idle_allowed(problem))
    for capacity in _planning_capacities(problem):
        timetable = list_schedule(problem, capacity)
        if timetable is None:
            continue
        yield problem.schedule(timetable.orders)
        if problem.offload:
            for eager in (frozenset[Pair](), movable_pairs(problem, timetable)):
                offloaded = offload_to_fit(problem, timetable.orders, eager=eager)
                if offloaded is not None:
                    yield offloaded
        if problem.recompute:
            recomputed = recompute_to_fit(problem, timetable.orders)
            if recomputed is not None:
                yield recomputed
    yield one_at_a_time(problem)


def schedules_of_chunks(problem: OrderProblem) -> Iterator[Schedule]:
    """Construct schedules of several chunks per device with little memory, by building blocks and greedy rules.

    If activations may be offloaded, both are also built with the additional memory of the host, and made to fit.
    """
    if not problem.split:
        return
    free = _free_bytes(problem)
    capacities = [free, *(list(capacity) for capacity in _host_capacities(problem))] if problem.offload else [free]
    for capacity in capacities:
        built = best_order(
            "searched", problem.placement, problem.micro_batches, problem.costs, capacity, objective=problem.objective
        )
        greedy = greedy_schedules(problem.placement, problem.micro_batches, problem.costs, capacity, RULES)
        ruled = min(greedy, default=None, key=lambda outcome: getattr(outcome, problem.objective))
        for schedule in (built, ruled):
            if schedule is None:
                continue
            orders = schedule.orders
            fitted = offload_to_fit(problem, orders) if problem.offload else problem.schedule(orders)
            if fitted is not None:
                yield fitted


def list_schedule(
    problem: OrderProblem, capacity: Sequence[Number | None], rule: GapFilling | None = None
) -> ListSchedule | None:
    """Construct a list schedule without offload and explicit recomputation; None if it gets stuck.

    `capacity` is bytes for activations per device, None if unlimited.  Workspaces of fused recomputations are not
    counted; the exact simulation of each start decides whether it fits.
    """
    zeros = (0,) * problem.stages
    costs = problem.costs.replace(recompute_workspace=zeros, recompute_workspace_input=zeros)
    scheduler = ListScheduler(
        problem.placement, problem.micro_batches, replace(problem.op_costs, costs=costs), capacity, split=problem.split
    )
    return scheduler.schedule(rule or GapFilling())


def offloading_schedules(problem: OrderProblem, *, idle: Sequence[Number] | None = None) -> Iterator[Schedule]:
    """Construct list schedules that use the memory of the host.

    `idle` is the time that each device may idle after its first backward before it fills every gap, by default
    unlimited.  With the idle time of the lower bound the bottleneck device stays busy, at the cost of others.
    """
    for capacity in _host_capacities(problem):
        for min_gap in MIN_GAPS:
            timetable = list_schedule(problem, capacity, GapFilling(min_gap, None if idle is None else tuple(idle)))
            if timetable is not None:
                offloaded = offload_to_fit(problem, timetable.orders, eager=movable_pairs(problem, timetable))
                if offloaded is not None:
                    yield offloaded


def _host_capacities(problem: OrderProblem) -> Iterable[tuple[Number | None, ...]]:
    """The distinct results of `_capacity_with_host` for W_FRACTIONS."""
    return dict.fromkeys(_capacity_with_host(problem, w_fraction) for w_fraction in W_FRACTIONS)


def _capacity_with_host(problem: OrderProblem, w_fraction: Fraction) -> tuple[Number | None, ...]:
    """Bytes for activations per device, including those that can be offloaded at a time."""
    costs, transfers = problem.costs, problem.costs.transfers
    assert transfers is not None
    interval = max(_interval(problem, device_stages, w_fraction) for device_stages in problem.placement.stages_of)
    result: list[Number | None] = []
    for device, device_stages in enumerate(problem.placement.stages_of):
        capacity = costs.capacity_of(device)
        away: Number = 0
        for s in device_stages:
            leads = problem.max_lead(Op(Kind.O, s, 0)) + problem.backward_lead(s)
            spare = round_trip(problem, s) + leads - transfers.offload[s] - transfers.reload[s]
            away += costs.activation[s] * max(0, int(spare // interval) if interval else problem.micro_batches)
        result.append(None if capacity is None else capacity + away)
    return tuple(result)


def _interval(problem: OrderProblem, device_stages: Sequence[int], w_fraction: Fraction) -> Number:
    """The time between consecutive micro-batches on a device."""
    costs = problem.costs
    if not problem.split:
        return sum(costs.forward[s] + costs.backward(s) for s in device_stages)
    f, i, w = costs.forward, costs.backward_input, costs.backward_weight
    return sum(f[s] + i[s] + w_fraction * w[s] for s in device_stages)


def one_at_a_time(problem: OrderProblem) -> Schedule:
    """Run the micro-batches one after the other: the schedule with the least memory without offload or R."""
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


def _free_bytes(problem: OrderProblem) -> list[Number | None]:
    """Bytes for activations per device under the memory limit; None if unlimited."""
    return [problem.costs.capacity_of(device) for device in range(problem.devices)]


def _planning_capacities(problem: OrderProblem) -> Iterator[list[Number | None]]:
    """Bytes for activations per device to plan with: the limit, 1F1B's, and with R up to that much in addition."""
    costs, p, free = problem.costs, problem.devices, _free_bytes(problem)
    sizes = [sum(costs.activation[s] for s in device_stages) for device_stages in problem.placement.stages_of]
    yield free
    one_f_one_b: list[Number | None] = [size * (p - d) for d, size in enumerate(sizes)]
    yield [_min_capacity(a, b) for a, b in zip(free, one_f_one_b, strict=True)]
    if not problem.recompute:
        return
    yield one_f_one_b
    for extra in sorted({1, 2, max(3, p // 2), p}):
        yield [None if r is None else r + extra * size for r, size in zip(free, sizes, strict=True)]


def _min_capacity(a: Number | None, b: Number | None) -> Number | None:
    return b if a is None else a if b is None else min(a, b)
