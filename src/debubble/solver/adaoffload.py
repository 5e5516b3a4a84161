"""PipeOffload's rule for one stage per device, and AdaOffload, which starts from it.

Source: OptPipe, section 4.1.3 and appendix D, algorithm 1.  Symbols: s is our stage, m our micro-batch j, B our
backward, T the tolerance, EstStart(B_{s,0}) `earliest`.  Of the printed algorithm three lines cannot be meant: line 18
waits for F_{s-1,n_mb} (the last micro-batch) where it must be F_{s-1,m}; line 19 uses complete(F_{s,m}) before line 20
sets it; and the memory limit, which the text asks for, is missing.  Here a forward starts when its input is there, the
lane is free, and a free place in memory remains or the oldest offload has made one.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from debubble.ir import InfeasibleError, Kind, Number, Op, Placement, Schedule, StageCosts
from debubble.solver.eviction import all_pairs, offload_to_fit
from debubble.solver.problem import OrderProblem


def pipe_offload(costs: StageCosts, micro_batches: int) -> Schedule:
    """1F1B's order with every activation offloaded that does not follow at once, and reloaded just in time.

    Raises InfeasibleError if that does not fit the memory limit.
    """
    p = costs.stages
    return _schedule("pipeoffload", costs, micro_batches, [p - s for s in range(p)], split=False)


def ada_offload(costs: StageCosts, micro_batches: int, *, tolerance: Number = 0) -> Schedule:
    """As many forwards before the first backward as start before it can, then PipeOffload's rule with I and W apart.

    Raises InfeasibleError if that does not fit the memory limit.
    """
    return _schedule("adaoffload", costs, micro_batches, _fill(costs, micro_batches, tolerance), split=True)


def _fill(costs: StageCosts, micro_batches: int, tolerance: Number) -> list[int]:
    """Forwards before the first backward, per stage (algorithm 1, steps 1 and 2)."""
    assert costs.offload is not None
    assert costs.reload is not None
    p = costs.stages
    arrival: list[Number] = [0] * micro_batches
    counts: list[int] = []
    for s in range(p):
        earliest = sum(costs.forward) + sum(costs.communication[: p - 1])
        earliest += sum(costs.backward_input[i] + costs.communication[i - 1] for i in range(s + 1, p))
        limit = costs.limit_of(s)
        slots = micro_batches
        if limit is not None and costs.activation[s]:
            slots = max(1, int((limit - costs.static_of(s)) // costs.activation[s]))
        ends: list[Number] = []
        offloaded: list[Number] = []
        for j in range(micro_batches):
            last_offload = offloaded[-1] if offloaded else 0
            if j and max(ends[-1], last_offload + costs.reload[s]) >= earliest + tolerance and j >= min(p - s, slots):
                break
            freed = offloaded[j - slots] if j >= slots else 0
            start = max(ends[-1] if ends else 0, freed, arrival[j])
            ends.append(start + costs.forward[s])
            offloaded.append(max(ends[-1], last_offload) + costs.offload[s])
        counts.append(len(ends))
        gap = costs.communication[s] if s < p - 1 else 0
        rest = itertools.repeat(ends[-1] + gap)
        arrival = [end + gap for end in ends]
        arrival += list(itertools.islice(rest, micro_batches - len(arrival)))
    # A stage cannot have more forwards behind it than the one that feeds it.
    return [min(counts[: s + 1]) for s in range(p)]


def _schedule(name: str, costs: StageCosts, micro_batches: int, warm_up: list[int], *, split: bool) -> Schedule:
    problem = OrderProblem(
        placement=Placement.linear(costs.stages), micro_batches=micro_batches, costs=costs, split=split, offload=True
    )
    orders = [_order(s, micro_batches, warm_up[s], split=split) for s in range(costs.stages)]
    schedule = offload_to_fit(problem, orders, eager=all_pairs(problem))
    if schedule is None:
        raise InfeasibleError(f"{name} does not fit the memory limit: it needs at least two activations per device.")
    return replace(schedule, name=name)


def _order(s: int, micro_batches: int, warm_up: int, *, split: bool) -> list[Op]:
    """`warm_up` forwards, then in turn a backward and a forward."""
    order = [Op(Kind.F, s, j) for j in range(min(warm_up, micro_batches))]
    for j in range(micro_batches):
        order += [Op(Kind.I, s, j), Op(Kind.W, s, j)] if split else [Op(Kind.B, s, j)]
        if warm_up + j < micro_batches:
            order.append(Op(Kind.F, s, warm_up + j))
    return order
