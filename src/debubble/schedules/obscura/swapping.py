"""Obscura's activation swapping: offloads and reloads woven into one stage's order.

Source: Huang et al., Obscura, USENIX ATC 2025, section 6.1 and figure 10.

mu = warm_up, lambda = blocks; an activation block is what F of one micro-batch leaves.  Of every mu blocks alive,
lambda are away:

* eviction, while the warm-up fills the memory: lambda blocks leave;
* eviction-loading, in the steady phase: per forward and backward, one block leaves and one comes back;
* loading, in the ending phase: the last lambda blocks come back, one per backward.

The paper leaves open which blocks go.  Here the first and last few of the warm-up stay, in about equal numbers, so
that an eviction has several forwards and a reload several periods of time before anything waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from debubble.ir import InputError, Kind, Op


def swap(order: Iterable[Op], *, warm_up: int, blocks: int) -> list[Op]:
    """The order of one stage (forwards and backwards in micro-batch order) with `blocks` of its warm-up swapped.

    Raises InputError unless 0 <= blocks <= warm_up - 2: the next backward's block and the newest one have to stay.
    """
    if blocks == 0:
        return list(order)
    if not 0 < blocks <= warm_up - 2:
        raise InputError(
            f"A stage with {warm_up} forwards before its first backward can swap 0 to {max(warm_up - 2, 0)} blocks,"
            f" not {blocks}."
        )
    plain = list(order)
    micro_batches = 1 + max(op.micro_batch for op in plain)
    lead = first_swapped(warm_up, blocks)
    swapped = range(lead, micro_batches - (warm_up - blocks - lead))
    extended: list[Op] = []
    for kind, stage, j in plain:
        extended.append(Op(kind, stage, j))
        if kind is Kind.F and j in swapped:
            extended.append(Op(Kind.O, stage, j))
        if kind is Kind.B and j + lead in swapped:
            extended.append(Op(Kind.L, stage, j + lead))
    return extended


def first_swapped(warm_up: int, blocks: int) -> int:
    """The first micro-batch that leaves; each of the later ones returns that many backwards before its own."""
    return (warm_up - blocks + 1) // 2
