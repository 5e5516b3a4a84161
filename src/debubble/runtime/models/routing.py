"""The load-balancing loss of routers, as in transformers, over the routers of all layers.

It is experts x sum over experts of (fraction of choices) x (mean probability), both averaged over all layers (Switch
Transformer, eq. 4-6, as in transformers' `load_balancing_loss_func`), so it is not a sum of losses per layer.  But only
the probabilities have gradients, which depend on other layers through their choices only, and these are known before
the first backward of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig
from debubble.runtime.operators import call, widen


@dataclass(frozen=True)
class Balance:
    """The load-balancing loss of a model, and the messages that carry its sums between stages."""

    coefficient: float
    """Coefficient of one micro-batch's loss; a step's loss is the mean over micro-batches."""
    experts: int
    layers: int
    """Number of layers that have experts."""
    hidden: int
    dtype: torch.dtype
    """Dtype of the activations between stages."""

    @classmethod
    def from_config(cls, config: ModelConfig, *, micro_batches: int, dtype: torch.dtype) -> Balance | None:
        """Read the loss from a model's config; None if it has none.  `micro_batches`: over all replicas."""
        mixtures = [layer.mlp for layer in config.per_layer if isinstance(layer.mlp, Experts)]
        if not config.router_balance or not mixtures:
            return None
        coefficient = config.router_balance / micro_batches
        return cls(coefficient, mixtures[0].count, len(mixtures), config.hidden, dtype)

    def zero_sums(self, *, on: torch.device) -> Tensor:
        """The sums before the first layer, in at least fp32."""
        return widen(torch.zeros(2, self.experts, dtype=self.dtype, device=on))

    def message(self, tokens: torch.Size) -> tuple[int]:
        """The shape of the messages between stages, for tokens of this shape."""
        sums = self.zero_sums(on=torch.device("meta"))
        return (tokens.numel() * self.hidden + sums.view(self.dtype).numel(),)

    def pack(self, x: Tensor, sums: Tensor) -> Tensor:
        """Activations (or their gradients) and the routers' sums as one message."""
        return torch.cat((x.flatten(), sums.view(self.dtype).flatten()))

    def unpack(self, message: Tensor, tokens: torch.Size) -> tuple[Tensor, Tensor]:
        """The activations (or their gradients) and the sums of a message."""
        size = tokens.numel() * self.hidden
        sums = message[size:].clone().view(self.zero_sums(on=torch.device("meta")).dtype)
        return message[:size].view(*tokens, self.hidden), sums.view(2, self.experts)

    def loss(self, sums: Tensor) -> Tensor:
        """The auxiliary loss, from the sums over all layers."""
        choices, probabilities = sums / self.layers
        loss: Tensor = self.coefficient * self.experts * (choices * probabilities).sum()
        return loss

    def gradient(self, sums: Tensor) -> Tensor:
        """The gradient of the loss with respect to a layer's mean probabilities, from the sums over all layers."""
        return self.coefficient * self.experts * sums[0] / self.layers**2


@dataclass
class Routing:
    """The sums over layers that one micro-batch's load-balancing loss consists of."""

    balance: Balance
    shape: torch.Size
    """Shape of its tokens."""
    sums: Tensor
    """Fraction of choices and mean probability per expert, [2, experts]; in the backward, over all layers."""

    def add(self, weights: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor:
        """Add a layer's probabilities [tokens, experts] and its number of choices per expert.

        Returns the weights; their backward adds the gradient of the load-balancing loss.
        """
        mean = probabilities.mean(0)
        fractions = choices.to(self.sums.dtype) / len(probabilities)
        self.sums = self.sums + torch.stack((fractions, mean.detach()))
        return call(_Balanced, weights, mean, self)


class _Balanced(Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, mean: Tensor, routing: Routing) -> Tensor:
        ctx.routing = routing
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        routing = ctx.routing
        return gradients[0], routing.balance.gradient(routing.sums), None
