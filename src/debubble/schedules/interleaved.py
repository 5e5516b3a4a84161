"""Interleaved 1F1B: each device holds v chunks of the model, and runs them in turn on groups of micro-batches.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2.

A device runs its forwards group by group: p micro-batches on chunk 0, then the same on chunk 1, and so on; its
backwards likewise from the last chunk down.  It warms up with 2 (p - d - 1) + (v - 1) p forwards.

MindSpore's order (its documentation of pipeline parallelism, "interleaved pipeline scheduler") has p - d - 1 fewer
warm-up forwards: no device holds more than in 1F1B.  It is equally fast if messages take no time; otherwise a device
waits for messages that Megatron's additional forwards hide.

Combined 1F1B runs a forward alongside a backward of another micro-batch, so that the tokens of one are sent to their
experts while the other computes.  The two must be independent, so every device warms up with one more forward
(megatron/core/pipeline_parallel/schedules.py, `overlap_moe_expert_parallel_comm`).

Megatron requires p to divide m.  Here the micro-batches are divided into groups of nearly equal size, none smaller than
p unless m is: then no group waits for its own pass through the other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from debubble.ir import InputError, Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "interleaved",
    paper="Megatron-LM, SC 2021",
    bubble="(p - 1)(f + b) / v",
    memory="p + (p - 1) / v, for m a multiple of p",
    default_chunks=2,
    peak=lambda p, m, v: peak_in_groups(p, m, v, ahead=2 * p - 1),
)
def interleaved(*, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None) -> Schedule:
    """Megatron's interleaved 1F1B: v chunks per device, groups of p micro-batches."""
    ahead = [2 * (devices - d) - 1 for d in range(devices)]
    return in_groups("interleaved", micro_batches, chunks, ahead=ahead)


@schedule(
    "interleaved-less-memory",
    paper="MindSpore's documentation",
    bubble="(p - 1)(f + b) / v where messages take no time",
    memory="p, for m a multiple of p",
    default_chunks=2,
    peak=lambda p, m, v: peak_in_groups(p, m, v, ahead=p),
)
def interleaved_less_memory(
    *, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None
) -> Schedule:
    """MindSpore's interleaved 1F1B in 1F1B's memory: p - d - 1 forwards less of warm-up."""
    return in_groups("interleaved-less-memory", micro_batches, chunks, ahead=range(devices, 0, -1))


@schedule(
    "interleaved-combined",
    paper="Megatron-LM, combined 1F1B",
    bubble="(p - 1)(f + b) / v",
    memory="p + p / v, for m a multiple of p",
    default_chunks=2,
    peak=lambda p, m, v: peak_in_groups(p, m, v, ahead=2 * p),
)
def interleaved_combined(
    *, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None
) -> Schedule:
    """Megatron's interleaved 1F1B with one more forward of warm-up, so that it runs forwards next to backwards."""
    return in_groups("interleaved-combined", micro_batches, chunks, ahead=range(2 * devices, 0, -2))


def in_groups(
    name: str,
    micro_batches: int,
    chunks: int,
    *,
    ahead: Sequence[int],
    group: int | None = None,
    delays: Sequence[int] | None = None,
) -> Schedule:
    """The order of interleaved 1F1B with groups of micro-batches.

    Args:
        name: The schedule's name.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        ahead: Per device, its forwards on the last chunk before its first backward.
        group: Micro-batches of a group; by default the number of devices.
        delays: Per device, the number of backwards by which each W is delayed; None if backwards are fused.

    Raises:
        InputError: A group has less than one micro-batch, or so few that devices would deadlock.
    """
    devices = len(ahead)
    group = devices if group is None else group
    if group < 1:
        raise InputError(f"A group needs at least one micro-batch, not {group}.")
    sizes = group_sizes(micro_batches, group)
    if 2 * group < devices - 1 and chunks > 1 and len(sizes) > 1:
        # The last device's first backwards would need forwards that wait for these backwards on the first device.
        raise InputError(
            f"{devices} devices would wait for each other in groups of {group}: a group needs {devices // 2}"
            " micro-batches or more."
        )
    warm_ups = [count + (chunks - 1) * max(sizes) for count in ahead]
    forwards, backwards = turns(sizes, range(chunks)), turns(sizes, range(chunks)[::-1])
    orders = orders_in_turns(forwards, backwards, warm_ups=warm_ups, delays=delays)
    return Schedule.of(name, Placement.looped(devices, chunks), micro_batches, orders)


def orders_in_turns(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    *,
    warm_ups: Sequence[int],
    delays: Sequence[int] | None = None,
) -> list[list[Op]]:
    """Per device, its warm-up forwards, then backwards and forwards alternately.

    Args:
        forwards: (chunk, micro-batch) in the order in which every device runs them.
        backwards: The same for the backwards.
        warm_ups: Per device, its forwards before its first backward.
        delays: Per device, the number of backwards by which each W is delayed; None if backwards are fused.
    """
    devices, orders = len(warm_ups), []
    for d in range(devices):
        order = [Op(Kind.F, c * devices + d, j) for c, j in forwards[: warm_ups[d]]]
        pending_weights: list[Op] = []
        for k, (c, j) in enumerate(backwards):
            stage = c * devices + d
            order.append(Op(Kind.B if delays is None else Kind.I, stage, j))
            if delays is not None:
                pending_weights.append(Op(Kind.W, stage, j))
                order += [pending_weights.pop(0)] if k >= delays[d] else []
            order += [Op(Kind.F, c * devices + d, j) for c, j in forwards[warm_ups[d] + k : warm_ups[d] + k + 1]]
        orders.append(order + pending_weights)
    return orders


def peak_in_groups(p: int, m: int, v: int, *, ahead: int) -> Fraction:
    """Peak of device 0 with groups of p and `ahead` forwards on its last chunk before its first backward."""
    return min(Fraction(m), Fraction(ahead + (v - 1) * max(group_sizes(m, p)), v))


def group_sizes(micro_batches: int, group: int) -> list[int]:
    """Divide the micro-batches into the maximum number of groups of at least `group`, larger ones first."""
    count = max(1, micro_batches // group)
    return [micro_batches // count + (i < micro_batches % count) for i in range(count)]


def turns(sizes: Sequence[int], chunks: Sequence[int]) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which a device runs them, group by group."""
    groups = pairwise(accumulate(sizes, initial=0))
    return [(c, j) for begin, end in groups for c in chunks for j in range(begin, end)]
