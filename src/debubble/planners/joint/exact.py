"""Exact plans of small problems: CP-SAT orders every way to place, cut and recompute the units.

The stages of a device need not be as many as another's.  A way is a placement, a cut and the strategy of every unit;
CP-SAT chooses the order, and of every micro-batch whether a stage recomputes it by an R or moves it to the host.  Of a
model with too many ways, those of the best plans are solved.  Each has to take less time than the fastest plan so far,
which most lower bounds rule out at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import DebubbleError, Number, Placement, Schedule
from debubble.planners.bounds.proven import assigns_freely
from debubble.planners.problem import Problem, Solution
from debubble.search.bounds import lower_bound
from debubble.search.constructive.initial import one_at_a_time
from debubble.search.effort import CORES, MODEL, Effort, solver_of, status_of
from debubble.search.exact.cp_model import build, schedule_of
from debubble.search.problem import OrderProblem

MAX_PAIRS = 24
"""Pairs of a stage and a micro-batch up to which CP-SAT finds the optimum of most ways."""
MAX_WAYS = 4000
"""Ways up to which all are tried."""
FIRST_LIMIT, LONGER = 0.1, 6.0
"""Seconds of the reference machine in which each way is solved at first, and how many times longer the others have."""
GAIN = 1e-3
"""Share of the fastest step by which a plan has to be faster."""
BOUNDED = 1e-3
"""Seconds of the reference machine to bound a way."""
STEPS = 2**10
"""Steps of the longest time where times are no fractions: finer ones take CP-SAT ten times as long."""


def exact_plans(
    problem: Problem, units: Units, plans: Sequence[tuple[Number, Solution]], effort: Effort
) -> list[tuple[Number, Solution]]:
    """Plans of a small problem that are faster than those known; the last one is the fastest.

    Args:
        problem: The problem.
        units: The model's units.
        plans: The steps and plans that are known.
        effort: What it may spend, in seconds of two cores.

    Returns:
        Plans that were simulated under the limit, with their steps.
    """
    if not _is_modelled(problem, units):
        return []
    best: Number = min((step for step, _ in plans), default=math.inf)
    ways = sorted(_ways(problem, units, plans, best, effort), key=lambda way: way.bound)
    found: list[tuple[Number, Solution]] = []
    limit = FIRST_LIMIT
    while ways and not effort.over:
        undecided = []
        for begin in range(0, len(ways), CORES):
            promising = [way for way in ways[begin : begin + CORES] if way.bound < (1 - GAIN) * best]
            efforts = [Effort(min(limit, CORES * effort.left), deadline=effort.deadline) for _ in promising]
            with ThreadPoolExecutor(CORES) as pool:
                answers = [*pool.map(_Way.solve, promising, [best] * CORES, efforts)]
            effort.spend(sum(each.spent for each in efforts) / CORES)
            for way, (schedule, is_decided) in zip(promising, answers, strict=True):
                if not is_decided:
                    undecided.append(way)
                if schedule is not None:
                    with suppress(DebubbleError):
                        solution = Solution(schedule=schedule, costs=way.orders.costs, partition=way.partition)
                        step = problem.step_time(solution.simulate())
                        if step < best:
                            best = step
                            found.append((step, solution))
            if effort.over:
                break
        ways, limit = undecided, LONGER * limit
    return found


@dataclass(frozen=True)
class _Way:
    """A placement, a cut and the strategy of every unit.

    Attributes:
        orders: The problem of their order.
        partition: The units of each stage with their strategies.
        after: Time of the step after the pipeline.
        bound: A time that no order's step is below.
    """

    orders: OrderProblem
    partition: Partition
    after: Number
    bound: Number

    def solve(self, best: Number, effort: Effort) -> tuple[Schedule | None, bool]:
        """An order whose step is shorter than `best`, and whether the model was solved to the end."""
        horizon = _longest(self.orders) if best == math.inf else (1 - GAIN) * best - self.after
        model = build(self.orders, horizon=horizon, ordered=True, steps=STEPS)
        effort.spend(MODEL * self.orders.stages * self.orders.micro_batches)
        solver = solver_of(effort)
        status = status_of(solver, model.cp, effort)
        schedule = schedule_of(model, solver.value) if status in ("OPTIMAL", "FEASIBLE") else None
        return schedule and replace(schedule, name="joint"), status in ("OPTIMAL", "INFEASIBLE")


def _longest(orders: OrderProblem) -> Number:
    """The time of a step in which nothing runs in parallel."""
    costs = orders.costs
    times = (costs.forward, costs.backward_input, costs.backward_weight, costs.recompute, costs.offload, costs.reload)
    return orders.micro_batches * (sum(map(sum, filter(None, times))) + 2 * sum(costs.communication))


def _is_modelled(problem: Problem, units: Units) -> bool:
    """Tell whether CP-SAT's model has all that the plans of a problem may do, but for optimizer steps of hosts."""
    plain = problem.levers is None and not problem.peers and problem.slices == 1 and problem.equally_long
    messages = units.communication_model in ("latency", "exclusive")
    return plain and messages and not units.gathers and not units.reduces_inside


def _ways(
    problem: Problem, units: Units, plans: Sequence[tuple[Number, Solution]], best: Number, effort: Effort
) -> Iterator[_Way]:
    """The ways whose bounds are below the best step; of a model with too many, those of the plans."""
    partitions = _every_partition(problem, units)
    if partitions is None:
        partitions = dict.fromkeys(
            (plan.schedule.placement, plan.partition)
            for _, plan in plans
            if plan.partition is not None and not plan.schedule.host_steps and _pairs(plan) <= MAX_PAIRS
        )
    for placement, partition in partitions:
        effort.spend(BOUNDED / CORES)
        way = _way(problem, units, placement, partition)
        if way is not None and way.bound < (1 - GAIN) * best:
            yield way
        if effort.over:
            return


def _pairs(plan: Solution) -> int:
    return plan.schedule.stages * plan.schedule.micro_batches


def _every_partition(problem: Problem, units: Units) -> Iterable[tuple[Placement, Partition]] | None:
    """Every placement with every partition; None if there are too many."""
    count, strategies = len(units.units), [tuple(unit.strategies) for unit in units.units]
    left = MAX_WAYS // math.prod(map(len, strategies))
    placements = []
    for placement in _placements(problem, units) if left else ():
        left -= math.comb(count - 1, placement.stages - 1)
        placements.append(placement)
        if left < 0:
            break
    if left < 0 or not placements:
        return None
    partitions = (
        (placement, Partition([(u, names[u]) for u in range(*ends)] for ends in pairwise((0, *cuts, count))))
        for placement in placements
        for cuts in combinations(range(1, count), placement.stages - 1)
        for names in product(*strategies)
    )
    return (
        (placement, partition)
        for placement, partition in partitions
        if all(_may_recompute(units, s) for s in partition)
    )


def _may_recompute(units: Units, stage: Sequence[tuple[int, str]]) -> bool:
    """Tell whether a stage recomputes something, if it can.

    Another strategy gives it all orders that it has without, because no micro-batch needs an R.
    """
    return any(name != "none" for _, name in stage) or all(len(units.units[u].strategies) == 1 for u, _ in stage)


def _placements(problem: Problem, units: Units) -> Iterator[Placement]:
    """The placements of up to MAX_PAIRS pairs; of equal devices those that forwards reach in their order.

    Neighbouring stages are on different devices, except where a V turns.
    """
    devices, chunks = problem.devices, problem.chunks
    most = min(len(units.units), MAX_PAIRS // problem.micro_batches, devices * (chunks or MAX_PAIRS))
    is_uniform = not units.on_devices and len(set(problem.limits)) == 1 and not units.link_groups
    is_free = chunks is None and assigns_freely(problem)
    for stages in range(devices, most + 1):
        v_shape = Placement.v_shape(devices, -(-stages // devices)).device_of
        for device_of in product(range(devices), repeat=stages):
            reached = [*dict.fromkeys(device_of)]
            counts = {device_of.count(device) for device in reached}
            if len(reached) < devices or (is_uniform and reached != sorted(reached)):
                continue
            if device_of != v_shape and any(a == b for a, b in pairwise(device_of)):
                continue
            if is_free or (len(counts) == 1 and chunks in (None, *counts)):
                yield Placement.of(device_of)


def _way(problem: Problem, units: Units, placement: Placement, partition: Partition) -> _Way | None:
    """The way with its bound; None if its states do not fit."""
    costs = units.stage_costs(partition, placement)
    if any((free := costs.capacity_of(device)) is not None and free < 0 for device in range(problem.devices)):
        return None
    orders = OrderProblem(
        placement=placement, micro_batches=problem.micro_batches, costs=costs, offload=costs.offload is not None,
        recompute=bool(partition.recomputing), objective=problem.objective,
    )  # fmt: skip
    after = 0 if problem.tail is None else problem.tail.of_schedule(one_at_a_time(orders), costs)
    return _Way(orders, partition, after, lower_bound(orders) + after)
