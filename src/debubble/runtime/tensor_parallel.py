"""Tensor parallelism: the ranks of a group divide the linear layers of every unit (Shoeybi et al. 2019, Megatron-LM).

A pair of linear layers is divided by columns, then by rows: between them each rank has its own heads or features, and
the sum of all ranks' results is that of the whole pair.  What lies outside of such pairs is the same on all ranks.
Parameters are local shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from debubble.runtime.operators import call, widen
from debubble.runtime.transport import Alone, Transport


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that divide a stage among them, as one of them sees them."""

    transport: Transport
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def part(self) -> int:
        """Which of them this rank is."""
        return self.ranks.index(self.transport.rank)

    def sum(self, tensor: Tensor) -> Tensor:
        """Over all of them, in place."""
        self.transport.all_reduce(tensor, self.ranks)
        return tensor

    def enter(self, x: Tensor) -> Tensor:
        """Where a tensor that is the same on all ranks meets their own shards: its gradient is the sum of theirs."""
        return x if self.size == 1 else call(_Enter, x, self)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of what the ranks have computed with their own shards, the same on all."""
        return x if self.size == 1 else call(_Leave, x, self)

    def own(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of a tensor along a dimension, as a view."""
        return whole.chunk(self.size, dim)[self.part]

    def gather(self, own: Tensor, dim: int) -> Tensor:
        """The whole of all ranks' parts; they all call it."""
        parts = [own.contiguous() if rank == self.transport.rank else torch.empty_like(own) for rank in self.ranks]
        for rank, part in zip(self.ranks, parts, strict=True):
            self.transport.broadcast(part, self.ranks, source=rank)
        return torch.cat(parts, dim)


ALONE = TensorGroup(Alone(), (0,))


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _Leave(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _TokenLoss(Function):
    """Cross entropy where every rank has the logits of its own part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: TensorGroup) -> Tensor:
        wide = widen(logits)
        rows, width = torch.arange(len(targets), device=logits.device), wide.shape[-1]
        highest = wide.new_zeros(group.size, len(targets))
        highest[group.part] = wide.amax(-1)
        exponentials = (wide - group.sum(highest).amax(0)[:, None]).exp()
        local = targets - group.part * width
        mine = (local >= 0) & (local < width)
        local = local.where(mine, 0)
        at_target = (wide[rows, local] - highest.amax(0)) * mine
        total, found = group.sum(torch.stack((exponentials.sum(-1), at_target)))
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, mine, targets)
        ctx.dtype = logits.dtype
        loss: Tensor = ((total.log() - found) * (targets >= 0)).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        softmax, local, mine, targets = ctx.saved_tensors
        gradient = softmax * (targets >= 0)[:, None]
        gradient[torch.arange(len(local), device=local.device), local] -= mine.to(gradient.dtype)
        return (gradient * gradients[0]).to(ctx.dtype), None, None


def divided_token_loss(logits: Tensor, *, targets: Tensor, scale: float, group: TensorGroup) -> Tensor:
    """As `token_loss`, of logits divided over the group along the vocabulary."""
    return call(_TokenLoss, logits.flatten(0, -2), targets.flatten(), group) * scale


def embed_divided(tokens: Tensor, table: nn.Embedding, group: TensorGroup) -> Tensor:
    """The rows of the tokens, of a table divided over the group along the vocabulary."""
    rows = len(table.weight)
    first = group.part * rows
    local = tokens - first
    mine = (local >= 0) & (local < rows)
    padding = None if table.padding_idx is None else table.padding_idx - first
    here = padding if padding is not None and 0 <= padding < rows else None
    return group.leave(nn.functional.embedding(local.where(mine, 0), table.weight, here) * mine.unsqueeze(-1))
