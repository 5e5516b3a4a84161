"""Attention of one slice of a sequence to all tokens up to it: a causal block of its own, and whole blocks before it.

The blocks are merged by the logarithms of their sums, as in a ring (see `ring_attention`); what stays of a slice is in
`slices`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from debubble.runtime.models.attention.blocks import Attended, Scores, attend_to_block, block_gradients
from debubble.runtime.models.attention.slices import LayerSlice
from debubble.runtime.operators import call, widen


def sliced_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, layer: LayerSlice) -> Tensor:
    """Causal attention of a slice's queries to its sequence so far, [batch, heads, own length, head_dim].

    k and v are what `layer` keeps of the slice, and may have fewer heads.  It keeps q, the result, and one number per
    query and head.
    """
    return call(_SlicedAttention, q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, layer)


class _SlicedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerSlice) -> Tensor:
        whole = attend_to_block(q, k, v, Scores(scale=scale, causal=True)).widen()
        for _, (keys, values) in layer.before():
            whole.merge(attend_to_block(q, keys, values, Scores(scale=scale)), slice(None))
        output = whole.output.to(q.dtype)
        ctx.save_for_backward(q, output, whole.log_sum)
        ctx.scale, ctx.layer = scale, layer
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, output, log_sum = ctx.saved_tensors
        (gradient,), scale, layer = gradients, ctx.scale, ctx.layer
        whole = Attended(output, log_sum)
        keys, values = layer.own
        of_q, *own = block_gradients(gradient, q, keys, values, whole, Scores(scale=scale, causal=True))
        of_q = widen(of_q)
        for index, (keys, values) in layer.before():
            of_block, *of_pair = block_gradients(gradient, q, keys, values, whole, Scores(scale=scale))
            of_q = of_q.add_(of_block)
            layer.give(index, torch.stack(of_pair))
        of_k, of_v = layer.take_gradients(torch.stack(own))
        return of_q.to(q.dtype), of_k, of_v, None, None
