"""The mixture-of-experts MLP of Mixtral and Qwen3-MoE.

A token's row is copied once per chosen expert, and rows are sorted by expert.  With expert parallelism an all-to-all
follows the sorting, and another one the computation.  Permutations and sums over a token's experts have a fixed order,
so results are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig
from debubble.runtime.distributed.cuts import Cut
from debubble.runtime.distributed.expert_parallel import TokenExchange, inverse
from debubble.runtime.matrix_products import add_product_to, product
from debubble.runtime.memory.recomputation import Operators
from debubble.runtime.models.llama import GatedUnit
from debubble.runtime.models.units import MicroBatch, norm, residual
from debubble.runtime.operators import Deferring, Linear, WeightGradStore, call, run_gradient_hooks, widen


class _GroupedLinear(Function):
    """Grouped product: rows [rows, in], `sizes` per expert, times their expert's W^T, for W of [experts, out, in]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int], weight_grads: WeightGradStore) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.sizes, ctx.weight_grads = weight, sizes, weight_grads
        return _grouped_mm(x, weight.transpose(1, 2), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x,) = gradients, ctx.saved_tensors
        weight, sizes = ctx.weight, ctx.sizes
        gx = _grouped_mm(gy, weight, sizes) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None
        ctx.weight_grads.put(partial(_accumulate, weight, sizes), x, gy)
        return gx, None, None, None


def _grouped_mm(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Rows [rows, in], sorted by expert, times their expert's matrix of [experts, in, out]."""
    y = x.new_empty(len(x), weight.shape[2])
    for rows, matrix, result in zip(torch.split(x, sizes), weight, torch.split(y, sizes), strict=True):
        product(rows, matrix, out=result)
    return y


def _accumulate(weight: Tensor, sizes: list[int], x: Tensor, gy: Tensor) -> None:
    """Add to the weight gradients of the experts that have rows."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    for rows, gradients, total in zip(torch.split(x, sizes), torch.split(gy, sizes), weight.grad, strict=True):
        if len(rows):
            add_product_to(total, gradients.t(), rows)
    run_gradient_hooks(weight)


class _ExpertWeights(Deferring):
    """All experts of a layer: one parameter for gate and up projections, one for down projections."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts.count, 2 * experts.ffn, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(experts.count, config.hidden, experts.ffn))

    def gate_and_up(self, x: Tensor, *, sizes: list[int]) -> Tensor:
        return call(_GroupedLinear, x, self.gate_up_proj, sizes, self.weight_grads)

    def down(self, x: Tensor, *, sizes: list[int]) -> Tensor:
        return call(_GroupedLinear, x, self.down_proj, sizes, self.weight_grads)


class _Mixture(nn.Module):
    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.gate = Linear(config.hidden, experts.count, bias=False)
        self.experts = _ExpertWeights(config, experts)


class MoeMlp(GatedUnit):
    """x + sum over a token's experts e of weight_e down_e(activation(gate_e(n)) up_e(n)) with n = norm(x)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config)
        experts = config.per_layer[layer].mlp
        assert isinstance(experts, Experts)
        self.prefix, self.half_of = f"model.layers.{layer}.", layer
        self.salt = 2 * layer + 2
        self.experts = experts
        self.post_attention_layernorm = norm(config)
        self.mlp = _Mixture(config, experts)

    def forward(self, x: Tensor, micro_batch: MicroBatch, op: Operators) -> Tensor:
        """Map hidden states [rows, length, hidden] to hidden states of the same shape."""
        h = op("norm", self.post_attention_layernorm, x).flatten(0, -2)
        weights, chosen, probabilities = op("router", self._route, h)
        with torch.no_grad():
            order = chosen.flatten().argsort(stable=True)
            choices = chosen.flatten().bincount(minlength=self.experts.count)
        exchange = self.expert_group.exchange(choices)
        if micro_batch.routing is not None:
            weights = micro_batch.routing.add(weights, probabilities, choices)
        rows = op("dispatch", partial(self._dispatch, exchange), h, order, *exchange.order)
        experts = self.mlp.experts
        gate, up = op("projections", partial(experts.gate_and_up, sizes=exchange.sizes), rows).chunk(2, dim=-1)
        rows = op("output", partial(experts.down, sizes=exchange.sizes), self.product(gate, up, op))
        y: Tensor = op("combine", partial(self._combine, exchange), rows, weights, order, *exchange.order)
        return residual(x, y.view_as(x), op)

    def cuts(self) -> Mapping[str, Cut]:
        """Cuts of every expert's inner dimension; routers and norms are replicated."""
        inner = self.experts.ffn
        return {"mlp.experts.gate_up_proj": Cut(1, 2 * inner, fused=2), "mlp.experts.down_proj": Cut(2, inner)}

    def expert_cuts(self) -> Mapping[str, Cut]:
        """Cuts by experts."""
        return dict.fromkeys(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), Cut(0, self.experts.count))

    def _route(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens: the weights and indices of their experts [tokens, per_token], and all probabilities."""
        probabilities = widen(self.mlp.gate(h)).softmax(-1)
        weights, chosen = probabilities.topk(self.experts.per_token)
        if self.experts.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(h.dtype), chosen, probabilities

    def _dispatch(self, exchange: TokenExchange, h: Tensor, order: Tensor, *arrived: Tensor) -> Tensor:
        """A row per token and chosen expert, sorted by expert, on the expert's rank."""
        rows = self.group.copy_to_group(h).repeat_interleave(self.experts.per_token, 0).index_select(0, order)
        return exchange.dispatch(rows, *arrived)

    def _combine(
        self, exchange: TokenExchange, rows: Tensor, weights: Tensor, order: Tensor, *arrived: Tensor
    ) -> Tensor:
        """The weighted sum of every token's rows, on the token's rank."""
        results = exchange.combine(rows, *arrived).index_select(0, inverse(order)).view(*weights.shape, -1)
        return self.group.reduce_from_group(
            torch.bmm(self.group.copy_to_group(weights).unsqueeze(1), results).squeeze(1)
        )
