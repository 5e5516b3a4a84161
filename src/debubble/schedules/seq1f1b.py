"""Seq1F1B: 1F1B on slices of sequences, so that few long sequences fill the pipeline.

Source: Ao Sun et al., Seq1F1B, NAACL 2025 (arXiv:2406.03488): sections 3.2 (the order), 3.4 (interleaved) and 3.5 (zero
bubble).  A causal model can compute a slice of a sequence after the slices before it: TeraPipe (Zhuohan Li et al., ICML
2021).  SlimPipe (Zhouyang Li et al., arXiv:2504.14519) has the interleaved order with at least as many slices as
devices; its exchange of attention work between devices is not modeled.

A slice's backward needs the gradients of its keys and values from later slices, so the first backward is that of the
first sequence's last slice, and every device warms up with n - 1 more forwards than in 1F1B.

==========  =================================  ====================================================
the paper   here                               meaning
==========  =================================  ====================================================
k           `slices`                           slices of a sequence, n
w_i         p - s + n - 1                      forwards of stage s before its first backward
==========  =================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from debubble.ir import InputError, Placement, Schedule, StageCosts
from debubble.schedules.interleaved import group_sizes, orders_in_turns
from debubble.schedules.registry import check_size, schedule


@schedule(
    "seq1f1b", paper="Seq1F1B, NAACL 2025", bubble="(p - 1)(f + b)", memory="min(m, p)",
    peak=lambda p, m, v: min(m, p),
)  # fmt: skip
def seq1f1b(*, devices: int, micro_batches: int, slices: int = 1, costs: StageCosts | None = None) -> Schedule:
    """1F1B on slices: p - s + n - 1 forwards, then the backward of the latest slice and a forward in turn.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Number of sequences, m.
        slices: Slices per sequence, n.
        costs: Not read; the order is the same for any.

    Raises:
        InputError: There are fewer slices than one.
    """
    ahead = [devices - d + slices - 1 for d in range(devices)]
    return _in_slices("seq1f1b", micro_batches, slices, chunks=1, ahead=ahead)


@schedule(
    "seq1f1b-interleaved", paper="Seq1F1B, NAACL 2025", bubble="(p - 1)(f + b) / v",
    memory="p + (p - 1) / v, for m a multiple of p", default_chunks=2,
)  # fmt: skip
def seq1f1b_interleaved(
    *, devices: int, micro_batches: int, slices: int = 1, chunks: int = 2, costs: StageCosts | None = None
) -> Schedule:
    """Interleaved 1F1B on slices; with as many slices as devices each group is one sequence, as in SlimPipe.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Number of sequences, m.
        slices: Slices per sequence, n.
        chunks: Stages per device, v.
        costs: Not read; the order is the same for any.

    Raises:
        InputError: There are fewer slices than one.
    """
    ahead = [2 * (devices - d - 1) + slices for d in range(devices)]
    return _in_slices("seq1f1b-interleaved", micro_batches, slices, chunks=chunks, ahead=ahead)


@schedule(
    "seq1f1b-zb", paper="Seq1F1B, NAACL 2025", bubble="(p - 1)(f + i - min(f, i, w))", memory="min(m, p)",
    peak=lambda p, m, v: min(m, p),
)  # fmt: skip
def seq1f1b_zb(*, devices: int, micro_batches: int, slices: int = 1, costs: StageCosts | None = None) -> Schedule:
    """ZB-H1 on slices: the backward is split, and stage s delays its W by s slices.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Number of sequences, m.
        slices: Slices per sequence, n.
        costs: Not read; the order is the same for any.

    Raises:
        InputError: There are fewer slices than one.
    """
    ahead = [devices - d + slices - 1 for d in range(devices)]
    return _in_slices("seq1f1b-zb", micro_batches, slices, chunks=1, ahead=ahead, delays=range(devices))


def _in_slices(
    name: str,
    micro_batches: int,
    slices: int,
    *,
    chunks: int,
    ahead: Sequence[int],
    delays: Sequence[int] | None = None,
) -> Schedule:
    """Interleaved 1F1B with groups of sequences that have at least as many slices as there are devices.

    Args:
        name: The schedule's name.
        micro_batches: Number of sequences.
        slices: Slices per sequence.
        chunks: Stages per device.
        ahead: Per device, its forwards on the last chunk before its first backward.
        delays: Per device, the number of backwards by which each W is delayed; None if backwards are fused.
    """
    if slices < 1:
        raise InputError(f"A sequence needs at least one slice, not {slices}.")
    devices = len(ahead)
    check_size(devices * chunks, micro_batches * slices)
    sequences = -(-devices // slices) if chunks > 1 else micro_batches
    sizes = group_sizes(micro_batches, sequences)
    groups = [range(begin, end) for begin, end in pairwise(accumulate(sizes, initial=0))]
    forwards = [(c, j * slices + i) for group in groups for c in range(chunks) for j in group for i in range(slices)]
    backwards = [
        (c, j * slices + i)
        for group in groups for c in reversed(range(chunks)) for j in group for i in reversed(range(slices))
    ]  # fmt: skip
    warm_ups = [count + (chunks - 1) * max(sizes) * slices for count in ahead]
    orders = orders_in_turns(forwards, backwards, warm_ups=warm_ups, delays=delays)
    plain = Schedule.of(name, Placement.looped(devices, chunks), micro_batches * slices, orders)
    return replace(plain, slices=slices)
