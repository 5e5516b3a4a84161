"""The mixture of experts that Mixtral and Qwen3-MoE have instead of an MLP: every token passes through a few of many.

A token's row is copied once per expert that it goes to; rows are sorted by expert, so that each expert's are a slice.
Ranks may divide the experts among them: then rows travel between sorting and computing, and back.
Permutations and sums over a token's experts have a fixed order: the same run gives the same bits.
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


class _Grouped(Function):
    """Every expert's rows [rows, in] times its own W^T, for W of [experts, out, in]; `sizes`: rows per expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: list[int], weight_grads: WeightGradStore) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight, ctx.sizes, ctx.weight_grads = weight, sizes, weight_grads
        return _each(x, weight.transpose(1, 2), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gy,), (x,) = gradients, ctx.saved_tensors
        weight, sizes = ctx.weight, ctx.sizes
        gx = _each(gy, weight, sizes) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None
        ctx.weight_grads.put(partial(_accumulate, weight, sizes), x, gy)
        return gx, None, None, None


def _each(x: Tensor, weight: Tensor, sizes: list[int]) -> Tensor:
    """Rows of [rows, in] times their expert's matrix of [experts, in, out]."""
    y = x.new_empty(len(x), weight.shape[2])
    for rows, matrix, result in zip(torch.split(x, sizes), weight, torch.split(y, sizes), strict=True):
        product(rows, matrix, out=result)
    return y


def _accumulate(weight: Tensor, sizes: list[int], x: Tensor, gy: Tensor) -> None:
    """Add to the gradient of every expert that has rows."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    for rows, gradients, total in zip(torch.split(x, sizes), torch.split(gy, sizes), weight.grad, strict=True):
        if len(rows):
            add_product_to(total, gradients.t(), rows)
    run_gradient_hooks(weight)


class _ExpertWeights(Deferring):
    """All experts of a layer: gate and up projections as one parameter, down projections as another."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts.count, 2 * experts.ffn, config.hidden))
        self.down_proj = nn.Parameter(torch.empty(experts.count, config.hidden, experts.ffn))

    def gate_and_up(self, x: Tensor, *, sizes: list[int]) -> Tensor:
        return call(_Grouped, x, self.gate_up_proj, sizes, self.weight_grads)

    def down(self, x: Tensor, *, sizes: list[int]) -> Tensor:
        return call(_Grouped, x, self.down_proj, sizes, self.weight_grads)


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
        """Divide every expert's inner dimension among the ranks; routers and norms stay whole."""
        inner = self.experts.ffn
        return {"mlp.experts.gate_up_proj": Cut(1, 2 * inner, fused=2), "mlp.experts.down_proj": Cut(2, inner)}

    def expert_cuts(self) -> Mapping[str, Cut]:
        """Divide the experts among the ranks."""
        return dict.fromkeys(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), Cut(0, self.experts.count))

    def _route(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose every token's experts: their weights and indices [tokens, per_token], and all probabilities."""
        probabilities = widen(self.mlp.gate(h)).softmax(-1)
        weights, chosen = probabilities.topk(self.experts.per_token)
        if self.experts.renormalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(h.dtype), chosen, probabilities

    def _dispatch(self, exchange: TokenExchange, h: Tensor, order: Tensor, *arrived: Tensor) -> Tensor:
        """A row for every token and expert, sorted by expert, where the expert is."""
        rows = self.group.copy_to_group(h).repeat_interleave(self.experts.per_token, 0).index_select(0, order)
        return exchange.dispatch(rows, *arrived)

    def _combine(
        self, exchange: TokenExchange, rows: Tensor, weights: Tensor, order: Tensor, *arrived: Tensor
    ) -> Tensor:
        """The weighted sum of every token's rows, where the token is."""
        results = exchange.combine(rows, *arrived).index_select(0, inverse(order)).view(*weights.shape, -1)
        return self.group.reduce_from_group(
            torch.bmm(self.group.copy_to_group(weights).unsqueeze(1), results).squeeze(1)
        )
