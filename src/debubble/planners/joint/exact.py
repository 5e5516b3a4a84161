"""Exact plans of small problems: CP-SAT orders every combination of placement, partition and recomputation.

A candidate is a placement, a partition and the strategy of every unit; devices may have different numbers of stages.
CP-SAT chooses the order, and per stage and micro-batch an explicit recomputation or an offload.  If there are too many
candidates, those of the best plans are solved.  Each has to beat the fastest plan so far, which lower bounds rule out
for most of them.
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
from debubble.search.effort import CORES, MODEL_PRICE, Effort, solver_of, status_of
from debubble.search.exact.cp_model import build, schedule_of
from debubble.search.problem import OrderProblem

MAX_PAIRS = 24
"""Limit on pairs of a stage and a micro-batch, up to which CP-SAT proves the optimum of most candidates."""
MAX_CANDIDATES = 4000
"""Candidates are enumerated exhaustively up to this number."""
FIRST_LIMIT, LIMIT_GROWTH = 0.1, 6.0
"""Initial time limit per candidate in seconds of the reference machine, and the factor by which it grows for those
still undecided."""
MIN_GAIN = 1e-3
"""Fraction of the fastest step by which a plan has to be faster."""
BOUND_PRICE = 1e-3
"""Seconds of the reference machine to bound a candidate."""
TIME_STEPS = 2**10
"""Integer steps of the longest time if times are not fractions: with finer ones CP-SAT takes ten times as long."""


def exact_plans(
    problem: Problem, units: Units, plans: Sequence[tuple[Number, Solution]], effort: Effort
) -> list[tuple[Number, Solution]]:
    """Search plans of a small problem that are faster than the known ones.

    Args:
        problem: The problem.
        units: The model's units.
        plans: The known step times and plans.
        effort: The effort available, in seconds of two cores.

    Returns:
        Plans simulated under the memory limit, with their step times; the last one is the fastest.
    """
    if not _is_supported(problem, units):
        return []
    best: Number = min((step for step, _ in plans), default=math.inf)
    candidates = sorted(_candidates(problem, units, plans, best, effort), key=lambda c: c.bound)
    results: list[tuple[Number, Solution]] = []
    limit = FIRST_LIMIT
    while candidates and not effort.over:
        undecided = []
        for begin in range(0, len(candidates), CORES):
            promising = [c for c in candidates[begin : begin + CORES] if c.bound < (1 - MIN_GAIN) * best]
            efforts = [Effort(min(limit, CORES * effort.remaining), deadline=effort.deadline) for _ in promising]
            with ThreadPoolExecutor(CORES) as pool:
                answers = [*pool.map(_Candidate.solve, promising, [best] * CORES, efforts)]
            effort.spend(sum(search.spent for search in efforts) / CORES)
            for candidate, (schedule, is_decided) in zip(promising, answers, strict=True):
                if not is_decided:
                    undecided.append(candidate)
                if schedule is not None:
                    with suppress(DebubbleError):
                        costs = candidate.order_problem.costs
                        solution = Solution(schedule=schedule, costs=costs, partition=candidate.partition)
                        step = problem.step_time(solution.simulate())
                        if step < best:
                            best = step
                            results.append((step, solution))
            if effort.over:
                break
        candidates, limit = undecided, LIMIT_GROWTH * limit
    return results


@dataclass(frozen=True)
class _Candidate:
    """A placement, a partition and the strategy of every unit.

    Attributes:
        order_problem: The order search problem of the candidate.
        partition: The units of each stage with their strategies.
        after: Time of the step after the pipeline.
        bound: Lower bound on the step time of every order.
    """

    order_problem: OrderProblem
    partition: Partition
    after: Number
    bound: Number

    def solve(self, best: Number, effort: Effort) -> tuple[Schedule | None, bool]:
        """Search an order with a step shorter than `best`; also tells whether the model was decided."""
        horizon = _sequential_time(self.order_problem) if best == math.inf else (1 - MIN_GAIN) * best - self.after
        model = build(self.order_problem, horizon=horizon, ordered=True, steps=TIME_STEPS)
        effort.spend(MODEL_PRICE * self.order_problem.stages * self.order_problem.micro_batches)
        solver = solver_of(effort)
        status = status_of(solver, model.cp, effort)
        schedule = schedule_of(model, solver.value) if status in ("OPTIMAL", "FEASIBLE") else None
        return schedule and replace(schedule, name="joint"), status in ("OPTIMAL", "INFEASIBLE")


def _sequential_time(order_problem: OrderProblem) -> Number:
    """The step time if nothing runs in parallel."""
    costs = order_problem.costs
    times = (costs.forward, costs.backward_input, costs.backward_weight, costs.recompute, costs.offload, costs.reload)
    return order_problem.micro_batches * (sum(map(sum, filter(None, times))) + 2 * sum(costs.communication))


def _is_supported(problem: Problem, units: Units) -> bool:
    """Tell whether the CP-SAT model covers the problem, apart from optimizer steps on hosts."""
    plain = problem.levers is None and not problem.peers and problem.slices == 1 and problem.equally_long
    messages = units.communication_model in ("latency", "exclusive")
    return plain and messages and not units.gathers and not units.reduces_inside


def _candidates(
    problem: Problem, units: Units, plans: Sequence[tuple[Number, Solution]], best: Number, effort: Effort
) -> Iterator[_Candidate]:
    """The candidates whose bounds are below the best step; only those of known plans if there are too many."""
    choices = _all_partitions(problem, units)
    if choices is None:
        choices = dict.fromkeys(
            (plan.schedule.placement, plan.partition)
            for _, plan in plans
            if plan.partition is not None and not plan.schedule.host_steps and _pairs(plan) <= MAX_PAIRS
        )
    for placement, partition in choices:
        effort.spend(BOUND_PRICE / CORES)
        candidate = _candidate(problem, units, placement, partition)
        if candidate is not None and candidate.bound < (1 - MIN_GAIN) * best:
            yield candidate
        if effort.over:
            return


def _pairs(plan: Solution) -> int:
    return plan.schedule.stages * plan.schedule.micro_batches


def _all_partitions(problem: Problem, units: Units) -> Iterable[tuple[Placement, Partition]] | None:
    """All pairs of a placement and a partition; None if there are too many."""
    count, strategies = len(units.units), [tuple(unit.strategies) for unit in units.units]
    remaining = MAX_CANDIDATES // math.prod(map(len, strategies))
    placements = []
    for placement in _placements(problem, units) if remaining else ():
        remaining -= math.comb(count - 1, placement.stages - 1)
        placements.append(placement)
        if remaining < 0:
            break
    if remaining < 0 or not placements:
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
        if all(_recomputes_if_possible(units, s) for s in partition)
    )


def _recomputes_if_possible(units: Units, stage: Sequence[tuple[int, str]]) -> bool:
    """Tell whether a stage recomputes something, if it can.

    Stages without recomputation are covered by the others, whose micro-batches need not recompute.
    """
    return any(name != "none" for _, name in stage) or all(len(units.units[u].strategies) == 1 for u, _ in stage)


def _placements(problem: Problem, units: Units) -> Iterator[Placement]:
    """The placements of up to MAX_PAIRS pairs; of equal devices only those that forwards reach in index order.

    Neighboring stages are on different devices, except where a V turns.
    """
    devices, chunks = problem.devices, problem.chunks
    max_stages = min(len(units.units), MAX_PAIRS // problem.micro_batches, devices * (chunks or MAX_PAIRS))
    is_uniform = not units.on_devices and len(set(problem.limits)) == 1 and not units.link_groups
    is_free = chunks is None and assigns_freely(problem)
    for stages in range(devices, max_stages + 1):
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


def _candidate(problem: Problem, units: Units, placement: Placement, partition: Partition) -> _Candidate | None:
    """The candidate with its bound; None if its states do not fit."""
    costs = units.stage_costs(partition, placement)
    if any((free := costs.capacity_of(device)) is not None and free < 0 for device in range(problem.devices)):
        return None
    order_problem = OrderProblem(
        placement=placement, micro_batches=problem.micro_batches, costs=costs, offload=costs.offload is not None,
        recompute=bool(partition.recomputing), objective=problem.objective,
    )  # fmt: skip
    after = 0 if problem.tail is None else problem.tail.of_schedule(one_at_a_time(order_problem), costs)
    return _Candidate(order_problem, partition, after, lower_bound(order_problem) + after)
