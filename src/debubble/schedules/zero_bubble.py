"""Zero bubble: the backward is split, and its weight part fills the bubbles.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (the paper's B is our I).

ZB-H1 and ZB-H2 (section 2) share one rule: stage s warms up with some forwards, then repeats I, W, F, and delays its W
by the difference between its warm-up and that of stage 0.  So all stages hold the same number of activations.

`zb` (section 3, ZB-1p and ZB-2p) searches an order for the actual costs and memory.  The paper's heuristic builds it
micro-batch by micro-batch.  Here greedy rules and building blocks are tried, and the shortest order is returned; with
less memory than 1F1B, where the best order is no simple pattern, exact and local search continue from it
(search/exact/tight_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from debubble.ir import Kind, Number, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule
from debubble.search.constructive.zero_bubble import capacity_within
from debubble.search.problem import Objective
from debubble.search.zero_bubble import zero_bubble_schedule


@schedule(
    "zb-h1",
    paper="Zero Bubble, ICLR 2024",
    bubble="(p - 1)(f + i - min(f, i, w))",
    memory="min(m, p)",
    peak=lambda p, m, v: min(m, p),
)
def zb_h1(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """1F1B's memory, a third of its bubble: p - s forwards ahead, W delayed by s micro-batches."""
    return _split_1f1b("zb-h1", micro_batches, [devices - s for s in range(devices)])


@schedule(
    "zb-h2",
    paper="Zero Bubble, ICLR 2024",
    bubble="(p - 1) max(0, f + i - 2 min(f, w)), of the span",
    memory="min(m, 2 p - 1)",
    peak=lambda p, m, v: min(m, 2 * p - 1),
)
def zb_h2(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """No bubble within any device's span, at nearly twice 1F1B's memory: 2 (p - s) - 1 forwards ahead."""
    return _split_1f1b("zb-h2", micro_batches, [2 * (devices - s) - 1 for s in range(devices)])


def _split_1f1b(name: str, micro_batches: int, ahead: list[int]) -> Schedule:
    orders = [split_order(s, micro_batches, n, delay=ahead[0] - n) for s, n in enumerate(ahead)]
    return Schedule.of(name, Placement.linear(len(ahead)), micro_batches, orders)


def split_order(stage: int, micro_batches: int, ahead: int, *, delay: int) -> list[Op]:
    """`ahead` forwards, then I, W (of the micro-batch `delay` earlier) and F alternately, then the remaining W."""
    ahead, delay = min(ahead, micro_batches), min(delay, micro_batches)
    order = [Op(Kind.F, stage, j) for j in range(ahead)]
    for j in range(micro_batches):
        order.append(Op(Kind.I, stage, j))
        if j >= delay:
            order.append(Op(Kind.W, stage, j - delay))
        if ahead + j < micro_batches:
            order.append(Op(Kind.F, stage, ahead + j))
    return order + [Op(Kind.W, stage, j) for j in range(micro_batches - delay, micro_batches)]


SEARCH_OPERATIONS = 160_000_000
"""Operations that local search may evaluate below 1F1B's memory, unless `steps` is specified."""


@schedule(
    "zb",
    paper="Zero Bubble, ICLR 2024",
    bubble="at most (p - 1)(f + i - min(f, i, w)), less with more memory",
    memory="min(m, 2 p), or memory_limit",
    peak=lambda p, m, v: min(m, 2 * p),
)
def zb(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int | None = None,
    recomputing: frozenset[int] = frozenset(),
) -> Schedule:
    """The shortest zero-bubble order found for the given costs and any memory limit.

    If stages recompute and memory is short, backwards stay fused: a W retains what was recomputed before its I.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Times and bytes per stage; all times 1 by default.
        memory_limit: Bytes per device, as in StageCosts; without one ZB-H2's memory is used.
        objective: `makespan`, or `span` for an optimizer step that each device takes by itself.
        tries: Candidates to try; by default fewer for larger steps.
        steps: Moves of local search from the best order; by default 0 with at least 1F1B's memory.
        recomputing: Stages whose backwards recompute.

    Raises:
        InfeasibleError: Not even one micro-batch fits.
    """
    placement = Placement.linear(devices)
    costs = costs or StageCosts.of(stages=devices)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    if steps is None:
        searches = not recomputing and _is_tight(placement, micro_batches, costs)
        steps = SEARCH_OPERATIONS // (3 * devices * micro_batches) if searches else 0
    return zero_bubble_schedule(
        "zb", placement, micro_batches, costs, activations=2 * devices, objective=objective, tries=tries, steps=steps,
        recomputing=recomputing,
    )  # fmt: skip


def _is_tight(placement: Placement, micro_batches: int, costs: StageCosts) -> bool:
    """Tell whether a device has less memory for activations than 1F1B needs on the first stage."""
    in_flight = min(micro_batches, placement.devices)
    required = capacity_within(placement, costs.with_limit(None), in_flight)
    available = capacity_within(placement, costs, in_flight)
    return any(a < r for a, r in zip(available, required, strict=True))
