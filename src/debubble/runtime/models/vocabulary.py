"""The vocabulary divided over the ranks of a tensor-parallel group: the table's rows, the logits and their loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.models.operators import call, look_up, widen


class _TokenLoss(Function):
    """Cross entropy where every rank has the logits of its own part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: TensorGroup, first: int) -> Tensor:
        wide = widen(logits)
        rows, width = torch.arange(len(targets), device=logits.device), wide.shape[-1]
        highest = wide.new_zeros(group.size, len(targets))
        highest[group.part] = wide.amax(-1)
        exponentials = (wide - group.sum(highest).amax(0)[:, None]).exp()
        local = targets - first
        mine = (local >= 0) & (local < width)
        local = local.where(mine, 0)
        at_target = (wide[rows, local] - highest.amax(0)) * mine
        total, found = group.sum(torch.stack((exponentials.sum(-1), at_target)))
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, mine, targets)
        ctx.dtype = logits.dtype
        loss: Tensor = ((total.log() - found) * (targets >= 0)).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, mine, targets = ctx.saved_tensors
        gradient = softmax * (targets >= 0)[:, None]
        gradient[torch.arange(len(local), device=local.device), local] -= mine.to(gradient.dtype)
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None


def divided_cross_entropy(logits: Tensor, targets: Tensor, *, group: TensorGroup, vocab: int) -> Tensor:
    """As `cross_entropy`, of the group's logits for so many tokens, divided along these."""
    return call(_TokenLoss, logits.flatten(0, -2), targets.flatten(), group, group.span(vocab)[0])


def embed(tokens: Tensor, table: nn.Embedding, group: TensorGroup) -> Tensor:
    """The rows of the tokens, of a table divided over the group along the vocabulary."""
    if group.size == 1:
        return look_up(tokens, table.weight, padding=table.padding_idx)
    first, rows = group.span(table.num_embeddings)
    local = tokens - first
    mine = (local >= 0) & (local < rows)
    padding = None if table.padding_idx is None else table.padding_idx - first
    here = padding if padding is not None and 0 <= padding < rows else None
    return group.leave(look_up(local.where(mine, 0), table.weight, padding=here) * mine.unsqueeze(-1))
