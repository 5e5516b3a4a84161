"""The loss of a model: cross entropy, or a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as functional
from torch import Tensor, nn

from debubble.ir import InputError, Plan
from debubble.runtime.models.operators import widen

Loss = Callable[[Tensor, Tensor], Tensor]
"""`loss(output, targets)`, *summed* over the targets of a micro-batch that count (those that are not -100).

The output is the last unit's: of a language model its logits [rows, length, vocabulary], in the run's dtype.  Targets
are [rows, length].  The runtime divides by the number of targets of the whole batch, over all micro-batches and
replicas, so the step's loss and gradients are those of the mean over tokens, however the batch is cut.  An auxiliary
loss of routers comes on top.
"""


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The usual loss of language models, summed, in fp32 at least; target -100: ignored."""
    return functional.cross_entropy(widen(logits.flatten(0, -2)), targets.flatten(), reduction="sum")


def scaled_loss(output: Tensor, *, loss: Loss, targets: Tensor, scale: float) -> Tensor:
    """A micro-batch's part of the step's loss.  Raises InputError if the function gives no number to learn from."""
    total = loss(output, targets)
    if total.dim():
        raise InputError(f"The loss must be one number, summed over the targets, but has shape {list(total.shape)}.")
    if output.requires_grad and not total.requires_grad:
        raise InputError("The loss has no gradient: compute it from the output with torch's operators.")
    return total * scale


def check_loss(loss: Loss, plan: Plan) -> None:
    """Refuse a loss that this plan's ranks cannot compute, or that would have to be trained itself."""
    if isinstance(loss, nn.Module) and any(parameter.requires_grad for parameter in loss.parameters()):
        raise InputError("The loss has parameters to train: make them part of the model's last unit.")
    if loss is not cross_entropy and plan.options.tensor > 1:
        raise InputError(
            "A loss of your own needs whole logits, which tensor parallelism divides: plan with --tensor 1."
        )
