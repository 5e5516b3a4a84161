"""The order of micro-batches of different lengths, chosen before the rest of the plan.

Short micro-batches should come first and last, where they fill and drain the pipeline; the best order in between
depends on the times.  So orders are simulated with 1F1B on balanced stages: all permutations of a few micro-batches; of
more, some orders, the best of which is improved by swapping pairs of micro-batches, first at a distance of half a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from math import factorial

from debubble.costs.lengths import MicroBatchSize, orders_of
from debubble.costs.partition import Partition
from debubble.ir import Placement
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.problem import ModelUnits, Problem
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.simulator import Repricer

MAX_TRIALS = 400
"""Approximate number of orders that are simulated."""


def with_lengths(problem: Problem, sizes: Sequence[MicroBatchSize]) -> Problem:
    """The problem of model units with micro-batches of these sizes, in a good order.

    No planner changes the order.
    """
    order = _best_order(problem, sizes)
    return replace(problem, workload=ModelUnits(problem.units.of_lengths(*zip(*order, strict=True))))


def _best_order(problem: Problem, sizes: Sequence[MicroBatchSize]) -> tuple[MicroBatchSize, ...]:
    p, m = problem.devices, len(sizes)
    units = problem.units.of_lengths(*zip(*sizes, strict=True))
    placement = Placement.linear(p)
    costs = units.stage_costs(Partition.cut(units, balanced_counts(units, p)), placement).with_limit(None)
    repricer = Repricer(one_f_one_b(devices=p, micro_batches=m))

    def time(order: tuple[MicroBatchSize, ...]) -> float:
        tokens, keys = zip(*order, strict=True)
        priced = costs.replace(micro_batch_scale=tokens, attention_scale=[count / min(keys) for count in keys])
        return float(problem.time_of(repricer.price(priced)))

    if factorial(m) <= MAX_TRIALS:
        return min(sorted(set(permutations(sizes))), key=time)
    fastest, best = min((time(order), order) for order in orders_of(sizes))
    tried, distance = 0, m // 2
    while distance and tried < MAX_TRIALS:
        improved = False
        for i in range(m - distance):
            j = i + distance
            if best[i] == best[j] or tried >= MAX_TRIALS:
                continue
            tried += 1
            changed = list(best)
            changed[i], changed[j] = changed[j], changed[i]
            value = time(tuple(changed))
            if value < fastest * (1 - 1e-9):
                fastest, best, improved = value, tuple(changed), True
        if not improved:
            distance //= 2
    return best
