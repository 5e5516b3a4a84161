"""ZB-H1 and ZB-H2: the backward is split, and its weight part fills the bubbles.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2 (the paper's B is our I).

Both are one rule: stage s warms up with some forwards, then repeats I, W, F, and delays its W by as many micro-batches
as it has fewer forwards in flight than stage 0.  So every stage holds equally many activations.
"""

from __future__ import annotations

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "zb-h1",
    paper="Zero Bubble, ICLR 2024",
    bubble="(p - 1)(f + i - w)",
    memory="min(m, p)",
    peak=lambda p, m, v: min(m, p),
)
def zb_h1(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """1F1B's memory, a third of its bubble: p - s forwards ahead, W delayed by s micro-batches."""
    return _split_1f1b("zb-h1", micro_batches, [devices - s for s in range(devices)])


@schedule(
    "zb-h2",
    paper="Zero Bubble, ICLR 2024",
    bubble="(p - 1)(f + i - 2 w), of the span",
    memory="min(m, 2 p - 1)",
    peak=lambda p, m, v: min(m, 2 * p - 1),
)
def zb_h2(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """No bubble within any device's span, at nearly twice 1F1B's memory: 2 (p - s) - 1 forwards ahead."""
    return _split_1f1b("zb-h2", micro_batches, [2 * (devices - s) - 1 for s in range(devices)])


def _split_1f1b(name: str, micro_batches: int, ahead: list[int]) -> Schedule:
    orders = tuple(tuple(split_order(s, micro_batches, n, delay=ahead[0] - n)) for s, n in enumerate(ahead))
    return Schedule(name=name, placement=Placement.linear(len(ahead)), micro_batches=micro_batches, orders=orders)


def split_order(stage: int, micro_batches: int, ahead: int, *, delay: int) -> list[Op]:
    """`ahead` forwards, then I, W (of the micro-batch `delay` before) and F in turn, then what is left of W."""
    ahead, delay = min(ahead, micro_batches), min(delay, micro_batches)
    order = [Op(Kind.F, stage, j) for j in range(ahead)]
    for j in range(micro_batches):
        order.append(Op(Kind.I, stage, j))
        if j >= delay:
            order.append(Op(Kind.W, stage, j - delay))
        if ahead + j < micro_batches:
            order.append(Op(Kind.F, stage, ahead + j))
    return order + [Op(Kind.W, stage, j) for j in range(micro_batches - delay, micro_batches)]
