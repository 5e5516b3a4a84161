"""Zero-bubble orders for arbitrary costs and memory: building blocks of many shapes, followed by list scheduling.

The search is deterministic and its work is limited: candidates are tried on the first micro-batches, and only the best
of them on all.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, product

from debubble.ir import InfeasibleError, Kind, Number, Placement, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.search.constructive.building_blocks import (
    INITIAL_GENES,
    OVERLAPS,
    BlockCandidate,
    Genes,
    GeneSampler,
    build_pattern,
    repeat_pattern,
)
from debubble.search.constructive.list_scheduling import (
    ALWAYS_WAIT,
    NO_OVERTAKING,
    Greedy,
    ListSchedule,
    ListScheduler,
    OrderFollowing,
)
from debubble.search.problem import Objective

Value = tuple[Number, Number]

TRIAL_OPERATIONS = 45_000
"""Number of operations to dispatch while trying candidates, unless `tries` is specified."""

RULES = tuple(
    Greedy(alternate=alternate, timeout=timeout, overlap=overlap)
    for overlap, timeout, alternate in product((0, 0.5, 1), (ALWAYS_WAIT, 0, 0.5, 1), (True, False))
)
"""Rules tried in addition to the blocks below 1F1B's memory; they get stuck only if not even one micro-batch fits."""

FEW_RULES = (
    Greedy(alternate=True, timeout=1, overlap=0.5),
    Greedy(alternate=False, timeout=1, overlap=0.5),
    Greedy(alternate=True, timeout=0.5, overlap=0.5),
    Greedy(alternate=False, timeout=1, overlap=0),
    Greedy(alternate=True, timeout=ALWAYS_WAIT, overlap=1),
)
"""The rules tried if time is short: on five models with even and uneven stages, looped and V-shaped, the best of them
came within 0.3% of the best of all RULES on average."""

FOLLOWING_RULES = tuple(OrderFollowing(*choices) for choices in product(OVERLAPS, (NO_OVERTAKING, 0, 0.5)))


def best_order(
    name: str,
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    capacity: Sequence[Number | None],
    *,
    objective: Objective = "makespan",
    tries: int | None = None,
) -> Schedule | None:
    """Search the shortest order of F, I and W with `capacity` bytes for activations per device; None if no order fits.

    `tries` is the number of candidates, by default as TRIAL_OPERATIONS allows.
    """
    sample = min(micro_batches, 2 * placement.devices)
    operations = 3 * placement.stages * micro_batches
    if tries is None:
        tries = min(max(10, TRIAL_OPERATIONS * micro_batches // (operations * sample)), 200)
    trials = _CandidateTrials(placement, costs, capacity, objective)
    fitting = filter(None, (trials.outcome(c, micro_batches) for c in trials.ranked(sample, tries)))
    outcomes = list(islice(fitting, max(2, TRIAL_OPERATIONS // (4 * operations))))
    if not outcomes:
        # Blocks may get stuck.
        outcomes = greedy_schedules(placement, micro_batches, costs, capacity, RULES[:2])
    if not outcomes:
        return None
    best = min(outcomes, key=trials.value)
    return Schedule(name=name, placement=placement, micro_batches=micro_batches, orders=best.orders)


def greedy_schedules(
    placement: Placement, micro_batches: int, costs: StageCosts, capacity: Sequence[Number | None],
    rules: Iterable[Greedy], *, split: bool = True,
) -> list[ListSchedule]:  # fmt: skip
    """Schedule by each rule, and return the schedules that do not get stuck; `split`: backwards are I and W."""
    scheduler = ListScheduler(placement, micro_batches, OpCosts(costs=costs), capacity, split=split)
    return [schedule for schedule in map(scheduler.schedule, rules) if schedule is not None]


def list_order(
    name: str, placement: Placement, micro_batches: int, costs: StageCosts, *, objective: Objective = "makespan"
) -> Schedule:
    """Schedule by each of FEW_RULES within the memory limit, and return the shortest order.

    Raises InfeasibleError if all rules get stuck for lack of memory.
    """
    capacity = [costs.capacity_of(device) for device in range(placement.devices)]
    outcomes = greedy_schedules(placement, micro_batches, costs, capacity, FEW_RULES)
    if not outcomes:
        raise InfeasibleError("List scheduling gets stuck for lack of memory; raise the limit.")
    best = min(outcomes, key=lambda outcome: getattr(outcome, objective))
    return Schedule(name=name, placement=placement, micro_batches=micro_batches, orders=best.orders)


class _CandidateTrials:
    """Tries candidates on some or all micro-batches."""

    def __init__(
        self, placement: Placement, costs: StageCosts, capacity: Sequence[Number | None], objective: Objective
    ) -> None:
        self.placement, self.objective = placement, objective
        op_costs, even_costs = OpCosts(costs=costs), StageCosts.of(stages=placement.stages)
        self.pattern = cache(lambda shape, even: build_pattern(placement, even_costs if even else costs, shape))
        self.scheduler = cache(lambda m: ListScheduler(placement, m, op_costs, capacity, exact_sizes=True))
        # Many candidates have the same pattern and rule, especially for small steps.
        self.followed = cache(lambda pattern, rule, m: self.scheduler(m).follow(repeat_pattern(pattern, m), rule))

    def ranked(self, micro_batches: int, tries: int) -> list[BlockCandidate]:
        """Try the initial candidates, then neighbors of the best so far; returns those that fit, best first."""
        sampler = GeneSampler(2 * self.placement.chunks, random.Random(0))
        untried = list(INITIAL_GENES.get(sampler.legs, ())[::-1])
        values: dict[Genes, Value] = {}
        seen: set[Genes] = set()
        for _ in range(tries):
            best = min(values, key=lambda genes: values[genes], default=None)
            genes = untried.pop() if untried else sampler.draw_near(best) if best else sampler.draw()
            if genes not in seen:
                seen.add(genes)
                outcome = self.outcome(BlockCandidate.from_genes(genes), micro_batches)
                if outcome is not None:
                    values[genes] = self.value(outcome)
        return [BlockCandidate.from_genes(genes) for genes in sorted(values, key=lambda genes: values[genes])]

    def value(self, outcome: ListSchedule) -> Value:
        both = (outcome.makespan, outcome.span)
        return both if self.objective == "makespan" else both[::-1]

    def outcome(self, candidate: BlockCandidate, micro_batches: int) -> ListSchedule | None:
        pattern = self.pattern(candidate.shape, candidate.equal_times)
        return None if pattern is None else self.followed(pattern, candidate.rule, micro_batches)


def capacity_within(placement: Placement, costs: StageCosts, activations: Number) -> list[Number]:
    """Bytes per device for the activations of `activations` micro-batches, at most what the memory limit leaves."""
    largest = max(costs.micro_batch_scale or (1,))
    capacity: list[Number] = []
    for d, device_stages in enumerate(placement.stages_of):
        size = activations * largest * sum(costs.activation[s] for s in device_stages)
        free = costs.capacity_of(d)
        capacity.append(size if free is None else min(size, free))
    return capacity


def place_weights(schedule: Schedule, *, costs: StageCosts, capacity: Sequence[Number | None]) -> Schedule | None:
    """Move each W to where memory requires it or to a gap, without changing the order of F and I.

    Returns the shortest schedule found within `capacity` bytes for activations per device; None if none fits.
    """
    scheduler = ListScheduler(
        schedule.placement, schedule.micro_batches, OpCosts(costs=costs), capacity, exact_sizes=True
    )
    lists = [[scheduler.number(op) for op in order if op.kind is not Kind.W] for order in schedule.orders]
    outcomes = filter(None, (scheduler.follow(lists, rule) for rule in FOLLOWING_RULES))
    best = min(outcomes, default=None, key=lambda outcome: outcome.makespan)
    return None if best is None else replace(schedule, orders=best.orders)
