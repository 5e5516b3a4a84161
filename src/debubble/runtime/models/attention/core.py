"""Rotary position embeddings, and attention, which dispatches to the other modules."""

from __future__ import annotations

import math
import zlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd import Function

from debubble.models.mixers import Rope
from debubble.runtime.distributed.context_parallel import NO_CONTEXT_GROUP, ContextGroup
from debubble.runtime.models.attention.blocks import Scores
from debubble.runtime.models.attention.masked import masked_attention
from debubble.runtime.models.attention.ring import ring_attention
from debubble.runtime.models.attention.slices import LayerSlice, sliced_attention
from debubble.runtime.operators import call


class _Rotate(Function):
    """Rotates pairs of features by their position's angle; the backward rotates the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.table = cosine, sine
        return _turn(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.table
        return _turn(gradients[0], cosine, -sine), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Compute x cos + (-high, low) sin of halves (low, high), in three passes and without temporary tensors."""
    (low, high), (sine_low, sine_high) = x.chunk(2, dim=-1), sine.chunk(2, dim=-1)
    result = x * cosine
    result_low, result_high = result.chunk(2, dim=-1)
    result_low.addcmul_(high, sine_low, value=-1)
    result_high.addcmul_(low, sine_high)
    return result


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary embeddings to [batch, heads, length, head_dim], in Hugging Face's (half-split) layout."""
    return call(_Rotate, x, cosine, sine)


def rotary_table(rope: Rope, head_dim: int, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions [...], each [..., head_dim] in `like`'s dtype; angles are computed in fp32."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device) / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3(rope, frequency)
    angle = positions.float()[..., None] * frequency
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _llama3(rope: Rope, frequency: Tensor) -> Tensor:
    """Llama 3's context extension: long wavelengths are stretched, short ones not, those between interpolated."""
    turns = rope.original_length * frequency / (2 * math.pi)
    smooth = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | None = None,
    cap: float | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    first_head: int = 0,
    context: ContextGroup = NO_CONTEXT_GROUP,
    layer: LayerSlice | None = None,
) -> Tensor:
    """Causal attention over [batch, heads, length, head_dim]; k and v may have fewer heads.

    Returns [batch, length, heads x head_dim].  Attention stays within `documents` [batch, full length], if given, and
    within `window` tokens.  Dropout on the attention weights is determined by `seed`.  `first_head`: index of the first
    head in the layer, whose other heads are on other ranks.  `context`: the ranks that shard the sequence.  `layer`:
    the slice of a sequence that q, k and v are of; None: full sequences.  Under `torch.autocast` it computes in that
    dtype, as torch's attention does.
    """
    device = "cuda" if q.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    start = 0 if layer is None else layer.start
    full_window = window is None or window >= start + k.shape[-2] * context.size
    if dropout or cap is not None or documents is not None or not full_window:
        drop = partial(_drop, p=dropout, seed=seed, first_head=first_head) if dropout else None
        scores = Scores(scale=factor, cap=cap, drop=drop)
        result = masked_attention(
            q, k, v, scores, window=None if full_window else window, documents=documents, context=context,
            layer=layer,
        )  # fmt: skip
    elif layer is not None:
        result = sliced_attention(q, k, v, scale=factor, layer=layer)
    elif context.size > 1:
        result = ring_attention(q, k, v, scale=factor, context=context)
    else:
        result = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
        )
    return result.transpose(1, 2).flatten(2)


def _drop(*weights: Tensor, p: float, seed: int, first_head: int) -> list[Tensor]:
    """Dropout of [batch, heads, ...] with an independent mask per head, whichever rank the head is on."""
    batch, heads, *scores = weights[0].shape
    keep = torch.empty(heads, batch, *scores, dtype=torch.bool, device=weights[0].device)
    generator = torch.Generator(device=keep.device)
    for head, mask in enumerate(keep, start=first_head):
        mask.bernoulli_(1 - p, generator=generator.manual_seed(zlib.crc32(f"{seed} {head}".encode())))
    return [torch.where(keep.transpose(0, 1), weight / (1 - p), 0) for weight in weights]
