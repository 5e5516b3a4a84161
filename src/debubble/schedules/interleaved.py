"""Interleaved 1F1B: each device holds v chunks of the model, and runs them in turn on groups of micro-batches.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2.

A device does its forwards group by group: p micro-batches on chunk 0, then the same on chunk 1, and so on; its
backwards likewise from the last chunk down.  It warms up with 2 (p - d - 1) + (v - 1) p forwards.

MindSpore's order (its documentation of pipeline parallelism, "interleaved pipeline scheduler") has p - d - 1 forwards
less of warm-up: no device holds more than in 1F1B.  Where messages take no time it is as fast; where they do, a device
waits for what Megatron's further forwards hide.

Combined 1F1B runs a forward next to a backward of another micro-batch, so that the tokens of one travel to their
experts while the other computes.  The two must not need each other, for which every device warms up with one more
forward (megatron/core/pipeline_parallel/schedules.py, `overlap_moe_expert_parallel_comm`).

Megatron refuses an m that p does not divide.  Here the micro-batches are cut into groups of nearly equal size, none
shorter than p unless m itself is: then no group waits for its own pass through the other devices.
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
    """The order of interleaved 1F1B whose micro-batches take turns in groups.

    Args:
        name: The schedule's name.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        ahead: Per device, its forwards on the last chunk before its first backward.
        group: Micro-batches of a group; as many as there are devices by default.
        delays: Per device, the backwards by which each W is late; None: backwards are whole.

    Raises:
        InputError: The groups are none, or so small that devices would wait for each other.
    """
    devices = len(ahead)
    group = devices if group is None else group
    if group < 1:
        raise InputError(f"A group needs at least one micro-batch, not {group}.")
    sizes = group_sizes(micro_batches, group)
    if 2 * group < devices - 1 and chunks > 1 and len(sizes) > 1:
        # The last device's first backwards then need forwards that wait for these backwards' turn on the first.
        raise InputError(
            f"{devices} devices would wait for each other in groups of {group}: a group needs {devices // 2}"
            " micro-batches or more."
        )
    first = [count + (chunks - 1) * max(sizes) for count in ahead]
    orders = orders_in_turns(turns(sizes, range(chunks)), turns(sizes, range(chunks)[::-1]), first=first, delays=delays)
    return Schedule.of(name, Placement.looped(devices, chunks), micro_batches, orders)


def orders_in_turns(
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    *,
    first: Sequence[int],
    delays: Sequence[int] | None = None,
) -> list[list[Op]]:
    """Per device, its first forwards, and then a backward and a forward in turn.

    Args:
        forwards: (chunk, micro-batch) in the order in which every device runs them.
        backwards: The same of the backwards.
        first: Per device, its forwards before its first backward.
        delays: Per device, the backwards by which each W is late; None: backwards are whole.
    """
    devices, orders = len(first), []
    for d in range(devices):
        order = [Op(Kind.F, c * devices + d, j) for c, j in forwards[: first[d]]]
        owed: list[Op] = []
        for k, (c, j) in enumerate(backwards):
            stage = c * devices + d
            order.append(Op(Kind.B if delays is None else Kind.I, stage, j))
            if delays is not None:
                owed.append(Op(Kind.W, stage, j))
                order += [owed.pop(0)] if k >= delays[d] else []
            order += [Op(Kind.F, c * devices + d, j) for c, j in forwards[first[d] + k : first[d] + k + 1]]
        orders.append(order + owed)
    return orders


def peak_in_groups(p: int, m: int, v: int, *, ahead: int) -> Fraction:
    """The most activations that device 0 holds with groups of p and so many forwards `ahead`."""
    return min(Fraction(m), Fraction(ahead + (v - 1) * max(group_sizes(m, p)), v))


def group_sizes(micro_batches: int, group: int) -> list[int]:
    """Cut the micro-batches into as many groups of at least `group` as there are, longer ones first."""
    count = max(1, micro_batches // group)
    return [micro_batches // count + (i < micro_batches % count) for i in range(count)]


def turns(sizes: Sequence[int], chunks: Sequence[int]) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which a device passes through them, group by group."""
    groups = pairwise(accumulate(sizes, initial=0))
    return [(c, j) for begin, end in groups for c in chunks for j in range(begin, end)]
