"""Expert parallelism: ranks divide a layer's experts, and an all-to-all sends tokens to the ranks of their experts.

The ranks have different tokens (they are replicas, or context-parallel) and replicate the rest of the layer
(Lepikhin et al. 2021, GShard; the all-to-all dispatcher of Megatron-LM).  Every rank has the same number of consecutive
experts.
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
    """The ranks that divide the experts of every layer, as seen by one of them."""

    def exchange(self, choices: Tensor) -> TokenExchange:
        """Exchange the row counts per expert: `choices`, [experts], are those of this rank's tokens."""
        if self.size == 1:
            return TokenExchange(self, (), (), choices.tolist(), ())
        local_count = len(choices) // self.size
        even = [local_count] * self.size
        counts = self.transport.all_to_all(choices, self.ranks, sent=even, received=even).view(self.size, local_count)
        # Rows arrive grouped by source rank, then by expert.
        experts = torch.arange(local_count, device=choices.device).repeat(self.size).repeat_interleave(counts.flatten())
        return TokenExchange(
            self,
            sent=tuple(choices.view(self.size, local_count).sum(1).tolist()),
            received=tuple(counts.sum(1).tolist()),
            sizes=counts.sum(0).tolist() if len(experts) else [1] + [0] * (local_count - 1),
            order=(experts.argsort(stable=True),),
        )


NO_EXPERT_GROUP = ExpertGroup(SingleProcessTransport(), (0,))
"""The group of a rank that has all experts."""


@dataclass(frozen=True)
class TokenExchange:
    """The all-to-all of one micro-batch's rows to the ranks of their experts, and back."""

    group: ExpertGroup
    sent: tuple[int, ...]
    """Rows sent to each rank."""
    received: tuple[int, ...]
    """Rows received from each rank."""
    sizes: list[int]
    """Rows per local expert."""
    order: tuple[Tensor, ...]
    """The permutation that sorts received rows by expert; empty for a group of one rank."""

    def dispatch(self, rows: Tensor, *order: Tensor) -> Tensor:
        """Send rows sorted by expert, and return those of the local experts, sorted by expert."""
        if not order:
            return rows
        rows = call(_Exchange, rows, self.group, self.sent, self.received)
        if not len(rows):
            # A row of zeros, so that every rank recomputes the same operators and their collectives match.
            return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))
        return rows.index_select(0, *order)

    def combine(self, rows: Tensor, *order: Tensor) -> Tensor:
        """Return the rows to the ranks that they came from, in the order in which they were sent."""
        if not order:
            return rows
        rows = rows.index_select(0, inverse(*order)) if sum(self.received) else rows[:0]
        return call(_Exchange, rows, self.group, self.received, self.sent)


def inverse(order: Tensor) -> Tensor:
    """The inverse permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Exchange(Function):
    """Differentiable all-to-all of rows: `sent[i]` go to rank i of the group; gradients return in the backward."""

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
