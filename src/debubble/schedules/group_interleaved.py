"""Group-interleaved: interleaved 1F1B with any group size and a split backward, in no more memory than 1F1B.

Source: Wan et al., PipeOffload, ICML 2025, section 4 (GIS).  Its B is our I.

The order of forwards and backwards is Megatron's (see `interleaved`), with groups of g micro-batches in place of p.
The split backward passes a stage in half the time, so device d needs only p - d + (v - 1) g forwards ahead, and delays
each W by d backwards, as ZB-H1 does.  A group smaller than p holds less, and waits for its forwards to come around.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from debubble.ir import InputError, Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.interleaved import group_sizes, turns
from debubble.schedules.registry import schedule


@schedule(
    "group-interleaved",
    paper="PipeOffload, ICML 2025",
    bubble="(p - 1)(f + i - w) / v, for g = p",
    memory="(p + (v - 1) g) / v, for m a multiple of g",
    default_chunks=2,
    peak=lambda p, m, v: min(Fraction(m), Fraction(p + (v - 1) * max(group_sizes(m, p)), v)),
)
def group_interleaved(
    *, devices: int, micro_batches: int, chunks: int = 2, group: int | None = None, costs: StageCosts | None = None
) -> Schedule:
    """Interleaved with groups of `group` micro-batches (default p) and W apart: (p + (v - 1) g) / v activations.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        group: Micro-batches of a group, g; p by default.
        costs: Not read; the order is the same for any.
    """
    if group is not None and group < 1:
        raise InputError(f"A group needs at least one micro-batch, not {group}.")
    return with_delays("group-interleaved", devices, micro_batches, chunks, group or devices, delays=range(devices))


def with_delays(
    name: str, devices: int, micro_batches: int, chunks: int, group: int, *, delays: Sequence[int]
) -> Schedule:
    """The schedule with W on device d delayed by `delays[d]` backwards: less memory and more bubble than with d."""
    sizes = group_sizes(micro_batches, group)
    forwards = turns(sizes, range(chunks))
    backwards = turns(sizes, range(chunks)[::-1])
    orders = []
    for d, delay in enumerate(delays):
        ahead = devices - d + (chunks - 1) * max(sizes)
        order = [Op(Kind.F, c * devices + d, j) for c, j in forwards[:ahead]]
        for k, (c, j) in enumerate(backwards):
            order.append(Op(Kind.I, c * devices + d, j))
            if k >= delay:
                order.append(_weight(backwards[k - delay], d, devices))
            order += [Op(Kind.F, c * devices + d, j) for c, j in forwards[ahead + k : ahead + k + 1]]
        order += [_weight(turn, d, devices) for turn in backwards[max(len(backwards) - delay, 0) :]]
        orders.append(tuple(order))
    return Schedule(
        name=name,
        placement=Placement.looped(devices, chunks),
        micro_batches=micro_batches,
        orders=tuple(orders),
    )


def _weight(turn: tuple[int, int], device: int, devices: int) -> Op:
    chunk, j = turn
    return Op(Kind.W, chunk * devices + device, j)
