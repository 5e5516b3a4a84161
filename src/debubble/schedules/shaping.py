"""The best order that dispatching finds for given costs and memory: greedy rules and building blocks.

Deterministic, and no more work than the size of the step allows: the candidates are tried on the first micro-batches,
and only the best of them on all.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Literal

from debubble.ir import InfeasibleError, Number, Op, Placement, Schedule, StageCosts
from debubble.ir.errors import readable
from debubble.schedules.blocks import Shape, order_of
from debubble.schedules.dispatch import STRICT, Follow, Greedy, Outcome, Run

Objective = Literal["makespan", "span"]
Value = tuple[Number, Number]
Attempt = Callable[[int], Outcome | None]
"""An outcome for that many micro-batches, by one rule or block."""

Known = Callable[[int], list[list[Op]]]

WORK = 150_000
"""Operations that may be dispatched while trying candidates, unless a number of `tries` is asked for."""

SLACKS = (0.2, 0.4, 0.1, 0.3, 0.0, 0.01, 0.02, 0.05, 0.15, 0.25, 0.6, 0.8)
TURNS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0)
HOPS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
OVERLAPS = (0, 0.25, 0.5, 0.75, 1)
RULES = tuple(
    Greedy(in_turn=in_turn, patience=patience, overlap=overlap)
    for overlap, patience, in_turn in product((0, 0.5, 1), (STRICT, 0, 0.5, 1), (True, False))
)


def best_order(
    name: str,
    placement: Placement,
    micro_batches: int,
    costs: StageCosts,
    room: Sequence[Number | None],
    *,
    objective: Objective = "makespan",
    tries: int | None = None,
    known: Known | None = None,
) -> Schedule | None:
    """The shortest order found whose activations stay within `room` (bytes per device); None if none fits.

    `known`: a rule that gives forwards and backwards for a number of micro-batches, to be tried too.
    """
    sample = min(micro_batches, 2 * placement.devices)
    if tries is None:
        tries = min(max(5, WORK // (3 * placement.stages * sample)), 200)
    shaper = _Shaper(placement, costs, room, objective)
    ranked = shaper.ranked(sample, tries)
    if known is not None:
        ranked += shaper.rank([partial(shaper.known, known, overlap) for overlap in OVERLAPS], sample)
        ranked.sort(key=_by_value)
    if sample < micro_batches:
        finals = 2 if 3 * placement.stages * micro_batches > WORK else len(ranked)
        best = [attempt for _, attempt in ranked[:finals]]
        # A block that fits the sample may get stuck later; the greedy rules never do.
        ranked = shaper.rank(best, micro_batches) or shaper.rank(
            [partial(shaper.greedy, rule) for rule in RULES[:2]], micro_batches
        )
    if not ranked:
        return None
    outcome = ranked[0][1](micro_batches)
    assert outcome is not None
    return Schedule(name=name, placement=placement, micro_batches=micro_batches, orders=outcome.orders)


class _Shaper:
    def __init__(
        self, placement: Placement, costs: StageCosts, room: Sequence[Number | None], objective: Objective
    ) -> None:
        self.placement, self.costs, self.room, self.objective = placement, costs, room, objective

    def ranked(self, micro_batches: int, tries: int) -> list[tuple[Value, Attempt]]:
        """The best of the greedy rules and the best of the blocks, best first."""
        rules = self.rank([partial(self.greedy, rule) for rule in RULES[: max(2, tries // 4)]], micro_batches)
        return sorted(rules[:3] + self.climb(micro_batches, tries)[:2], key=_by_value)

    def rank(self, attempts: list[Attempt], micro_batches: int) -> list[tuple[Value, Attempt]]:
        return sorted(((v, a) for a in attempts if (v := self.value(a, micro_batches)) is not None), key=_by_value)

    def climb(self, micro_batches: int, tries: int) -> list[tuple[Value, Attempt]]:
        """Blocks of random shapes, then of shapes near the best, best first."""
        legs = 2 * self.placement.chunks
        choices: list[tuple[float, ...]] = [SLACKS, *[TURNS] * legs, *[HOPS] * legs, (0, 1), (0, 0.5), (0, 1)]
        dice = random.Random(0)
        best: list[tuple[Value, Attempt]] = []
        genes: list[float] = []
        seen = set()
        for n in range(tries):
            if n < tries // 4 or not best:
                tried = [dice.choice(c) if n and dice.random() < 0.5 else c[0] for c in choices]
            else:
                tried = genes.copy()
                for k in dice.sample(range(len(choices)), dice.choice((1, 1, 2, 3))):
                    tried[k] = dice.choice(choices[k])
            if tuple(tried) in seen:
                continue
            seen.add(tuple(tried))
            attempt = partial(self.block, tuple(tried))
            value = self.value(attempt, micro_batches)
            if value is not None and (not best or value <= best[0][0]):
                best.insert(0, (value, attempt))
                genes = tried
        return best

    def value(self, attempt: Attempt, micro_batches: int) -> Value | None:
        outcome = attempt(micro_batches)
        if outcome is None:
            return None
        both = (outcome.makespan, outcome.span)
        return both if self.objective == "makespan" else both[::-1]

    def greedy(self, rule: Greedy, micro_batches: int) -> Outcome | None:
        return Run(self.placement, micro_batches, self.costs, self.room)(rule)

    def known(self, rule: Known, overlap: float, micro_batches: int) -> Outcome | None:
        return Run(self.placement, micro_batches, self.costs, self.room)(Follow(rule(micro_batches), overlap=overlap))

    def block(self, genes: tuple[float, ...], micro_batches: int) -> Outcome | None:
        slack, *stretch, weight_first, overlap, even = genes
        legs = len(stretch) // 2
        shape = Shape(slack, tuple(stretch[:legs]), tuple(stretch[legs:]), weight_first == 1)
        # The paper's blocks are for even costs; their order may be the best for others too.
        costs = StageCosts.of(stages=self.placement.stages) if even else self.costs
        orders = order_of(self.placement, micro_batches, costs, shape)
        if orders is None:
            return None
        return Run(self.placement, micro_batches, self.costs, self.room)(Follow(orders, overlap=overlap))


def _by_value(ranked: tuple[Value, Attempt]) -> Value:
    return ranked[0]


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
    known: Known | None = None,
) -> Schedule:
    """The best order found that holds `activations` micro-batches per device, or less under a memory limit.

    `memory_limit` is that of StageCosts (bytes per device with what is static) and goes before theirs.  `steps`: moves
    of local search from there.  Raises InfeasibleError if no order fits.
    """
    costs = costs or StageCosts.of(stages=placement.stages)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    room = room_within(placement, costs, activations)
    found = best_order(name, placement, micro_batches, costs, room, objective=objective, tries=tries, known=known)
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
    from debubble.solver.bounds import lower_bound
    from debubble.solver.problem import Incumbent, OrderProblem
    from debubble.solver.tight import tightened

    limits = [room[d] + costs.static_of(d) for d in range(schedule.devices)]
    problem = OrderProblem.of(
        schedule, costs.with_limit(limits).replace(offload=None, reload=None), objective=objective
    )
    best = Incumbent(schedule=schedule, value=problem.value(schedule), bound=lower_bound(problem), source="start")
    for better in tightened(problem, best, steps=steps):
        best = better
    return replace(best.schedule, name=schedule.name)
