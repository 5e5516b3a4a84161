"""The auxiliary loss of routers, which keeps experts equally busy: transformers' own, over the routers of all layers.

It is experts x sum over experts of (share of choices) x (mean probability), both averaged over all layers (Switch
Transformer, eq. 4-6, as transformers' `load_balancing_loss_func` has it): no sum of losses per layer.  But only the
probabilities have gradients.  All that a layer's backward needs of the others are their choices, and these are known:
a micro-batch passes all layers before its first backward.
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
    """The auxiliary loss of a model, and the messages that carry what it needs."""

    coefficient: float
    """The coefficient of one micro-batch's loss; that of a step has the mean over all."""
    experts: int
    layers: int
    """Layers that have experts."""
    hidden: int
    dtype: torch.dtype
    """The dtype of what stages hand on."""

    @classmethod
    def of(cls, config: ModelConfig, *, micro_batches: int, dtype: torch.dtype) -> Balance | None:
        """Read the loss from a model's config; None if it has none.  `micro_batches` counts those of all replicas."""
        mixtures = [layer.mlp for layer in config.per_layer if isinstance(layer.mlp, Experts)]
        if not config.router_balance or not mixtures:
            return None
        share = config.router_balance / micro_batches
        return cls(share, mixtures[0].count, len(mixtures), config.hidden, dtype)

    def nothing(self, *, on: torch.device) -> Tensor:
        """The sums before the first layer, in fp32 at least."""
        return widen(torch.zeros(2, self.experts, dtype=self.dtype, device=on))

    def message(self, tokens: torch.Size) -> tuple[int]:
        """The shape of what stages hand on for so many rows of tokens."""
        sums = self.nothing(on=torch.device("meta"))
        return (tokens.numel() * self.hidden + sums.view(self.dtype).numel(),)

    def pack(self, x: Tensor, sums: Tensor) -> Tensor:
        """Activations (or their gradients) and the routers' sums as one message."""
        return torch.cat((x.flatten(), sums.view(self.dtype).flatten()))

    def unpack(self, message: Tensor, tokens: torch.Size) -> tuple[Tensor, Tensor]:
        """The activations (or their gradients) and the sums."""
        size = tokens.numel() * self.hidden
        sums = message[size:].clone().view(self.nothing(on=torch.device("meta")).dtype)
        return message[:size].view(*tokens, self.hidden), sums.view(2, self.experts)

    def loss(self, sums: Tensor) -> Tensor:
        """The auxiliary loss, from the sums over all layers."""
        choices, probabilities = sums / self.layers
        loss: Tensor = self.coefficient * self.experts * (choices * probabilities).sum()
        return loss

    def gradient(self, sums: Tensor) -> Tensor:
        """The loss's gradient with respect to any layer's mean probabilities, from the sums over all layers."""
        return self.coefficient * self.experts * sums[0] / self.layers**2


@dataclass
class Routing:
    """The routers' record of one micro-batch: the sums over layers that its loss is made of."""

    balance: Balance
    shape: torch.Size
    """The shape of its tokens."""
    sums: Tensor
    """Share of choices and mean probability per expert, [2, experts]; in the backward of all layers."""

    def add(self, weights: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor:
        """Note a layer's probabilities [tokens, experts] and how often it has chosen each expert.

        Returns its weights: their backward is the auxiliary loss's too.
        """
        mean = probabilities.mean(0)
        shares = choices.to(self.sums.dtype) / len(probabilities)
        self.sums = self.sums + torch.stack((shares, mean.detach()))
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
