"""Expert parallelism: ranks divide a layer's experts, and tokens travel to those that they are routed to.

The ranks have different tokens, as replicas or slices of sequences, and everything else of a layer is on each of them
(Lepikhin et al. 2021, GShard; the all-to-all dispatcher of Megatron-LM).  A rank has equally many experts as the
others, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from debubble.runtime.distributed.cuts import CutGroup
from debubble.runtime.distributed.transport import SingleProcessTransport
from debubble.runtime.operators import call


@dataclass(frozen=True)
class ExpertGroup(CutGroup):
    """The ranks that divide the experts of every layer among them, as one of them sees them."""

    def exchange(self, choices: Tensor) -> TokenExchange:
        """Tell the others how many rows each expert gets from here: `choices`, [experts]."""
        if self.size == 1:
            return TokenExchange(self, (), (), choices.tolist(), ())
        own = len(choices) // self.size
        even = [own] * self.size
        counts = self.transport.all_to_all(choices, self.ranks, sent=even, received=even).view(self.size, own)
        # Rows arrive by rank, and each rank's by expert.
        experts = torch.arange(own, device=choices.device).repeat(self.size).repeat_interleave(counts.flatten())
        return TokenExchange(
            self,
            sent=tuple(choices.view(self.size, own).sum(1).tolist()),
            received=tuple(counts.sum(1).tolist()),
            sizes=counts.sum(0).tolist() if len(experts) else [1] + [0] * (own - 1),
            order=(experts.argsort(stable=True),),
        )


NO_EXPERT_GROUP = ExpertGroup(SingleProcessTransport(), (0,))
"""The group of a rank that has all experts."""


@dataclass(frozen=True)
class TokenExchange:
    """The way of one micro-batch's rows to the ranks that have their experts, and back."""

    group: ExpertGroup
    sent: tuple[int, ...]
    """Rows for each rank."""
    received: tuple[int, ...]
    """Rows from each rank."""
    sizes: list[int]
    """Rows of each of this rank's experts."""
    order: tuple[Tensor, ...]
    """The indices that sort the rows that arrive by expert; empty where they do not travel."""

    def dispatch(self, rows: Tensor, *order: Tensor) -> Tensor:
        """Send rows that are sorted by expert; those of this rank's experts, sorted too."""
        if not order:
            return rows
        rows = call(_Exchange, rows, self.group, self.sent, self.received)
        if not len(rows):
            # A row of zeros, so that every rank has the same operators to recompute, and meets the others in them.
            return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        return rows.index_select(0, *order)

    def combine(self, rows: Tensor, *order: Tensor) -> Tensor:
        """Send the rows back to where they came from, in the order in which they were sent."""
        if not order:
            return rows
        rows = rows.index_select(0, inverse(*order)) if sum(self.received) else rows[:0]
        return call(_Exchange, rows, self.group, self.received, self.sent)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes this one."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Exchange(Function):
    """Rows to the ranks of a group, the first `sent[0]` to the first of them; their gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ExpertGroup, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return group.transport.all_to_all(rows.contiguous(), group.ranks, sent=sent, received=received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        group: ExpertGroup = ctx.group
        rows = gradients[0].contiguous()
        return (
            group.transport.all_to_all(rows, group.ranks, sent=ctx.received, received=ctx.sent), None, None, None
        )  # fmt: skip
