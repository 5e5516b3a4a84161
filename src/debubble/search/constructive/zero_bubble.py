"""The best order that dispatching finds for given costs and memory: building blocks of many shapes.

Deterministic, and no more work than the size of the step allows: the candidates are tried on the first micro-batches,
and only the best of them on all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import islice, product
from typing import Literal

from debubble.errors import readable
from debubble.ir import InfeasibleError, Kind, Number, Placement, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.search.constructive.building_blocks import (
    FIRST,
    OVERLAPS,
    BlockCandidate,
    BlockShape,
    Genes,
    Neighbours,
    Pattern,
    pattern_of,
    repeated,
)
from debubble.search.constructive.list_scheduling import (
    PATIENT,
    STRICT,
    Greedy,
    ListSchedule,
    ListScheduler,
    OrderFollowing,
)

Objective = Literal["makespan", "span"]
Value = tuple[Number, Number]

WORK = 45_000
"""Operations that may be dispatched while trying candidates, unless a number of `tries` is asked for."""

RULES = tuple(
    Greedy(in_turn=in_turn, patience=patience, overlap=overlap)
    for overlap, patience, in_turn in product((0, 0.5, 1), (STRICT, 0, 0.5, 1), (True, False))
)
"""Below 1F1B's memory they are tried beside the blocks; they never get stuck but where not one micro-batch fits."""

FOLLOWINGS = tuple(OrderFollowing(overlap, filling) for overlap, filling in product(OVERLAPS, (PATIENT, 0, 0.5)))


def best_order(
    name: str,
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    room: Sequence[Number | None],
    *,
    objective: Objective = "makespan",
    tries: int | None = None,
) -> Schedule | None:
    """The shortest order found whose activations stay within `room` (bytes per device); None if none fits."""
    sample = min(micro_batches, 2 * placement.devices)
    operations = 3 * placement.stages * micro_batches
    if tries is None:
        tries = min(max(10, WORK * micro_batches // (operations * sample)), 200)
    shaper = _Shaper(placement, costs, room, objective)
    fitting = filter(None, (shaper.outcome(c, micro_batches) for c in shaper.ranked(sample, tries)))
    outcomes = list(islice(fitting, max(2, WORK // (4 * operations))))
    if not outcomes:
        # Blocks may get stuck.
        outcomes = greedy(placement, micro_batches, costs, room, RULES[:2])
    if not outcomes:
        return None
    best = min(outcomes, key=shaper.value)
    return Schedule(name=name, placement=placement, micro_batches=micro_batches, orders=best.orders)


def greedy(
    placement: Placement, micro_batches: int, costs: StageCosts, room: Sequence[Number | None], rules: Iterable[Greedy]
) -> list[ListSchedule]:
    """The schedules of those rules that do not get stuck."""
    scheduler = ListScheduler(placement, micro_batches, OpCosts(costs=costs), room)
    schedules = (scheduler.schedule(rule) for rule in rules)
    return [schedule for schedule in schedules if schedule is not None]


class _Shaper:
    """Tries candidates on some or all micro-batches."""

    def __init__(
        self, placement: Placement, costs: StageCosts, room: Sequence[Number | None], objective: Objective
    ) -> None:
        self.placement, self.room, self.objective = placement, room, objective
        self.costs = {False: costs, True: StageCosts.of(stages=placement.stages)}
        self.pattern = cache(self.pattern_of)
        self.scheduler = cache(self.scheduler_of)

    def ranked(self, micro_batches: int, tries: int) -> list[BlockCandidate]:
        """Of the first candidates and of neighbours of the best so far those that fit, best first."""
        neighbours = Neighbours(2 * self.placement.chunks, random.Random(0))
        untried = list(FIRST[neighbours.legs][::-1])
        values: dict[Genes, Value] = {}
        seen: set[Genes] = set()
        for _ in range(tries):
            best = min(values, key=lambda genes: values[genes], default=None)
            genes = untried.pop() if untried else neighbours.near(best) if best else neighbours.any()
            if genes not in seen:
                seen.add(genes)
                outcome = self.outcome(BlockCandidate.of(genes), micro_batches)
                if outcome is not None:
                    values[genes] = self.value(outcome)
        return [BlockCandidate.of(genes) for genes in sorted(values, key=lambda genes: values[genes])]

    def value(self, outcome: ListSchedule) -> Value:
        both = (outcome.makespan, outcome.span)
        return both if self.objective == "makespan" else both[::-1]

    def outcome(self, candidate: BlockCandidate, micro_batches: int) -> ListSchedule | None:
        pattern = self.pattern(candidate.shape, candidate.even)
        if pattern is None:
            return None
        return self.scheduler(micro_batches).follow(repeated(pattern, micro_batches), candidate.manner)

    def pattern_of(self, shape: BlockShape, even: bool) -> Pattern | None:
        return pattern_of(self.placement, self.costs[even], shape)

    def scheduler_of(self, micro_batches: int) -> ListScheduler:
        costs = OpCosts(costs=self.costs[False])
        return ListScheduler(self.placement, micro_batches, costs, self.room, exact_sizes=True)


def shaped(
    name: str,
    placement: Placement,
    micro_batches: int,
    costs: StageCosts | None,
    *,
    activations: Number,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int = 0,
) -> Schedule:
    """The best order found that holds `activations` micro-batches per device, or less under a memory limit.

    `memory_limit` is that of StageCosts (bytes per device with what is static) and goes before theirs.  `steps`: moves
    of local search from there.  Raises InfeasibleError if no order fits.
    """
    costs = costs or StageCosts.of(stages=placement.stages)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    room = room_within(placement, costs, activations)
    found = best_order(name, placement, micro_batches, costs, room, objective=objective, tries=tries)
    if found is None:
        raise InfeasibleError(
            f"The schedule '{name}' finds no order within {', '.join(readable(float(r)) for r in room)} of activations"
            " per device; raise the memory limit."
        )
    return found if not steps else searched(found, costs, room, objective=objective, steps=steps)


def room_within(placement: Placement, costs: StageCosts, activations: Number) -> list[Number]:
    """Bytes per device for so many activations of one micro-batch, and no more than the costs' memory limit leaves."""
    largest = max(costs.micro_batch_scale or (1,))
    room: list[Number] = []
    for d, held in enumerate(placement.stages_of):
        size = activations * largest * sum(costs.activation[s] for s in held)
        limit = costs.limit_of(d)
        room.append(size if limit is None else min(size, limit - costs.static_of(d)))
    return room


def searched(
    schedule: Schedule, costs: StageCosts, room: Sequence[Number], *, objective: Objective, steps: int
) -> Schedule:
    """The best of exact search, and of so many moves of local search, from a schedule, within the same room."""
    # The search compiles its kernel, which the other orders need not pay for.
    from debubble.search.bounds import lower_bound
    from debubble.search.exact.tight_memory import tightened
    from debubble.search.problem import Incumbent, OrderProblem

    limits = [room[d] + costs.static_of(d) for d in range(schedule.devices)]
    problem = OrderProblem.of(
        schedule, costs.with_limit(limits).replace(offload=None, reload=None), objective=objective
    )
    by_rules = greedy(schedule.placement, schedule.micro_batches, costs, room, RULES)
    starts = [schedule, *(replace(schedule, orders=outcome.orders) for outcome in by_rules)]
    value, first = min(((problem.value(start), k) for k, start in enumerate(starts)))
    best = Incumbent(schedule=starts[first], value=value, bound=lower_bound(problem), source="start")
    for better in tightened(problem, best, steps=steps, complete=partial(completed, costs=costs, room=room)):
        best = better
    return replace(best.schedule, name=schedule.name)


def completed(schedule: Schedule, *, costs: StageCosts, room: Sequence[Number | None]) -> Schedule | None:
    """The shortest schedule found with a given one's order of F and I, and each W where memory needs it or in a gap."""
    scheduler = ListScheduler(schedule.placement, schedule.micro_batches, OpCosts(costs=costs), room, exact_sizes=True)
    lists = [[scheduler.number(op) for op in order if op.kind is not Kind.W] for order in schedule.orders]
    outcomes = filter(None, (scheduler.follow(lists, rule) for rule in FOLLOWINGS))
    best = min(outcomes, default=None, key=lambda outcome: outcome.makespan)
    return None if best is None else replace(schedule, orders=best.orders)
