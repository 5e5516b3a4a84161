"""The loss of a model, cross entropy or a user's function, and vocabulary-parallel embedding and cross entropy.

Tensor-parallel ranks shard the embedding's rows and the logits' columns; their loss does not gather logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn
from torch.autograd import Function

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.operators import call, look_up, widen

Loss = Callable[..., Tensor]
"""`loss(output, targets)`, *summed* over the targets of a micro-batch that are not -100.

The output is the last unit's; for a language model the logits [rows, length, vocabulary], in the run's dtype.  Targets
are [rows, length].  The runtime divides by the number of targets of the whole batch, over all micro-batches and
replicas, so the step's loss and gradients are those of the mean over tokens, however the batch is split.  The auxiliary
loss of routers is added.

Keyword-only parameters without a default get the batch's entries of these names: the rows of the micro-batch.
"""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy summed over targets, in at least fp32; targets of -100 are ignored."""
    return functional.cross_entropy(widen(logits.flatten(0, -2)), targets.flatten(), reduction="sum")


def loss_entries(loss: Loss) -> tuple[str, ...]:
    """The batch entries that a loss requires: its keyword-only parameters without a default."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a function without a signature, such as some of torch's
        return ()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty)


def scaled_loss(output: Tensor, *, loss: Loss, targets: Tensor, scale: float) -> Tensor:
    """A micro-batch's share of the step's loss.  Raises InputError if it is no scalar, or has no gradient."""
    total = loss(output, targets)
    if total.dim():
        raise InputError(f"The loss must be one number, summed over the targets, but has shape {list(total.shape)}.")
    if output.requires_grad and not total.requires_grad:
        raise InputError("The loss has no gradient: compute it from the output with torch's operators.")
    return widen(total) * scale


def check_loss(loss: Loss, plan: Plan) -> None:
    """Refuse a loss that the plan's ranks cannot compute, or that has parameters to train."""
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise InputError("The loss has parameters to train: make them part of the model's last unit.")
    if loss_entries(loss) and plan.options.context > 1:
        raise InputError(
            "A loss that takes entries of the batch needs whole sequences, which context parallelism divides: plan with"
            " --context 1."
        )
    if loss is not cross_entropy and plan.options.tensor > 1:
        raise InputError(
            "A loss of your own needs whole logits, which tensor parallelism divides: plan with --tensor 1."
        )


class _TokenLoss(Function):
    """Cross entropy of logits that are sharded by vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: TensorGroup, first: int) -> Tensor:
        wide = widen(logits)
        rows, width = torch.arange(len(targets), device=logits.device), wide.shape[-1]
        highest = wide.new_zeros(group.size, len(targets))
        highest[group.group_rank] = wide.amax(-1)
        exponentials = (wide - group.sum(highest).amax(0)[:, None]).exp()
        local = targets - first
        is_local = (local >= 0) & (local < width)
        local = local.where(is_local, 0)
        at_target = (wide[rows, local] - highest.amax(0)) * is_local
        total, target_logit = group.sum(torch.stack((exponentials.sum(-1), at_target)))
        ctx.save_for_backward(exponentials.div_(total[:, None]), local, is_local, targets)
        ctx.dtype = logits.dtype
        loss: Tensor = ((total.log() - target_logit) * (targets >= 0)).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, local, is_local, targets = ctx.saved_tensors
        gradient = softmax * (targets >= 0)[:, None]
        gradient[torch.arange(len(local), device=local.device), local] -= is_local.to(gradient.dtype)
        return (gradient * gradients[0]).to(ctx.dtype), None, None, None


def divided_cross_entropy(logits: Tensor, targets: Tensor, *, group: TensorGroup, vocab: int) -> Tensor:
    """The `cross_entropy` of logits that the group shards along the `vocab` tokens."""
    return call(_TokenLoss, logits.flatten(0, -2), targets.flatten(), group, group.span(vocab)[0])


def embed(tokens: Tensor, table: nn.Embedding, group: TensorGroup) -> Tensor:
    """Embedding lookup in a table that the group shards along the vocabulary."""
    if group.size == 1:
        return look_up(tokens, table.weight, padding=table.padding_idx)
    first, rows = group.span(table.num_embeddings)
    local = tokens - first
    is_local = (local >= 0) & (local < rows)
    padding = None if table.padding_idx is None else table.padding_idx - first
    if padding is not None and not 0 <= padding < rows:
        padding = None
    embeddings = look_up(local.where(is_local, 0), table.weight, padding=padding)
    return group.reduce_from_group(embeddings * is_local.unsqueeze(-1))
