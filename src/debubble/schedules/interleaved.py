"""Interleaved 1F1B: each device holds v chunks of the model, and runs them in turn on groups of micro-batches.

Source: Narayanan et al., Megatron-LM, SC 2021, section 2.2.

A device does its forwards group by group: p micro-batches on chunk 0, then the same on chunk 1, and so on; its
backwards likewise from the last chunk down.  It warms up with 2 (p - d - 1) + (v - 1) p forwards.

MindSpore's order (its documentation of pipeline parallelism, "interleaved pipeline scheduler") has p - d - 1 forwards
less of warm-up: no device holds more than in 1F1B.  Where messages take no time it is as fast; where they do, a device
waits for what Megatron's further forwards hide.

Combined 1F1B runs a forward beside a backward of another micro-batch, so that the tokens of one travel to their experts
while the other computes.  The two must not need each other, for which every device warms up with one more forward
(megatron/core/pipeline_parallel/schedules.py, `overlap_moe_expert_parallel_comm`).

Megatron refuses an m that p does not divide.  Here the micro-batches are cut into groups of nearly equal size, none
shorter than p unless m itself is: then no group waits for its own pass through the other devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "interleaved",
    paper="Megatron-LM, SC 2021",
    bubble="(p - 1)(f + b) / v",
    memory="p + (p - 1) / v, for m a multiple of p",
    default_chunks=2,
    peak=lambda p, m, v: min(Fraction(m), Fraction(2 * p - 1 + (v - 1) * max(group_sizes(m, p)), v)),
)
def interleaved(*, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None) -> Schedule:
    """Megatron's interleaved 1F1B: v chunks per device, groups of p micro-batches.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Not read; the order is the same for any.
    """
    sizes = group_sizes(micro_batches, devices)
    ahead = [2 * (devices - d - 1) + (chunks - 1) * max(sizes) + 1 for d in range(devices)]
    return _in_groups("interleaved", chunks, sizes, ahead)


@schedule(
    "interleaved-less-memory",
    paper="MindSpore's documentation",
    bubble="(p - 1)(f + b) / v where messages take no time",
    memory="p, for m a multiple of p",
    default_chunks=2,
    peak=lambda p, m, v: min(Fraction(m), Fraction(p + (v - 1) * max(group_sizes(m, p)), v)),
)
def interleaved_less_memory(
    *, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None
) -> Schedule:
    """MindSpore's interleaved 1F1B in 1F1B's memory: p - d - 1 forwards less of warm-up.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Not read; the order is the same for any.
    """
    sizes = group_sizes(micro_batches, devices)
    ahead = [devices - d + (chunks - 1) * max(sizes) for d in range(devices)]
    return _in_groups("interleaved-less-memory", chunks, sizes, ahead)


@schedule(
    "interleaved-combined",
    paper="Megatron-LM, combined 1F1B",
    bubble="(p - 1)(f + b) / v",
    memory="p + p / v, for m a multiple of p",
    default_chunks=2,
    peak=lambda p, m, v: min(Fraction(m), Fraction(2 * p + (v - 1) * max(group_sizes(m, p)), v)),
)
def interleaved_combined(
    *, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None
) -> Schedule:
    """Megatron's interleaved 1F1B with one more forward of warm-up, so that it runs forwards beside backwards.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        chunks: Stages per device, v.
        costs: Not read; the order is the same for any.
    """
    sizes = group_sizes(micro_batches, devices)
    ahead = [2 * (devices - d) + (chunks - 1) * max(sizes) for d in range(devices)]
    return _in_groups("interleaved-combined", chunks, sizes, ahead)


def _in_groups(name: str, chunks: int, sizes: Sequence[int], ahead: Sequence[int]) -> Schedule:
    """Interleaved 1F1B with so many forwards on each device before its first backward."""
    devices = len(ahead)
    forwards = turns(sizes, range(chunks))
    backwards = turns(sizes, range(chunks)[::-1])
    orders = []
    for d, first in enumerate(ahead):
        order = [Op(Kind.F, c * devices + d, j) for c, j in forwards[:first]]
        for k, (c, j) in enumerate(backwards):
            order.append(Op(Kind.B, c * devices + d, j))
            order += [Op(Kind.F, c * devices + d, j) for c, j in forwards[first + k : first + k + 1]]
        orders.append(tuple(order))
    return Schedule(
        name=name, placement=Placement.looped(devices, chunks), micro_batches=sum(sizes), orders=tuple(orders)
    )


def group_sizes(micro_batches: int, group: int) -> list[int]:
    """Cut the micro-batches into as many groups of at least `group` as there are, longer ones first."""
    count = max(1, micro_batches // group)
    return [micro_batches // count + (i < micro_batches % count) for i in range(count)]


def turns(sizes: Sequence[int], chunks: Sequence[int]) -> list[tuple[int, int]]:
    """(chunk, micro-batch) in the order in which a device passes through them, group by group."""
    passes = []
    first = 0
    for size in sizes:
        passes += [(c, j) for c in chunks for j in range(first, first + size)]
        first += size
    return passes
