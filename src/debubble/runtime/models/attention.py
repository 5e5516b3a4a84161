"""Rotary positions and the attention core."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.autograd import Function

from debubble.models.mixers import Rope
from debubble.runtime.distributed.context_parallel import WHOLE, ContextGroup
from debubble.runtime.models.ring_attention import ring_attention
from debubble.runtime.operators import call, capped, widen


class _Rotate(Function):
    """Turns pairs of features by their position's angle: the same table turns the gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.table = cosine, sine
        return _turn(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cosine, sine = ctx.table
        return _turn(gradients[0], cosine, -sine), None, None


def _turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Compute x cos + (-high, low) sin of halves (low, high), with no tensor of x's size but the result."""
    (low, high), (sine_low, sine_high) = x.chunk(2, dim=-1), sine.chunk(2, dim=-1)
    result = x * cosine
    result_low, result_high = result.chunk(2, dim=-1)
    result_low.sub_(high * sine_low)
    result_high.add_(low * sine_high)
    return result


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Apply rotary positions to [batch, heads, length, head_dim], Hugging Face's (half-split) layout."""
    return call(_Rotate, x, cosine, sine)


def rotary_table(rope: Rope, head_dim: int, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of positions [...], [..., head_dim] each, with `like`'s dtype; angles are computed in fp32."""
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
    """Llama 3's context extension: long wavelengths are stretched, short ones kept, those between interpolated."""
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
    context: ContextGroup = WHOLE,
) -> Tensor:
    """Causal attention over [batch, heads, length, head_dim]; k and v may have fewer heads.

    The heads' results lie side by side: [batch, length, heads x head_dim].  Attention stays within `documents`
    [batch, whole length], if they are given, and within `window` tokens.  A fused kernel can neither cap the scores nor
    take the mask of the `dropout` on the attention weights from `seed`: there it is written out.  `first_head`: how
    many heads of the layer lie before these, on other ranks.  `context`: the ranks that divide the sequence.
    """
    length = k.shape[-2] * context.size
    fused = not dropout and cap is None and (window is None or window >= length)
    attend = partial(
        _attend if window is None or dropout else partial(_attend_by_windows, length=window),
        scale=scale, window=window, documents=documents, cap=cap, dropout=dropout, seed=seed, first_head=first_head,
    )  # fmt: skip
    if context.size == 1:
        result = attend(q, k, v) if fused else call(_RecomputedAttention, attend, q, k, v)
    elif fused and documents is None:
        result = ring_attention(q, k, v, scale=scale, context=context)
    else:
        result = context.attend(q, k, v, partial(_attend_by_chunks, attend=attend, chunks=context.chunks))
    return result.transpose(1, 2).flatten(2)


def _attend_by_chunks(
    q: Tensor, k: Tensor, v: Tensor, *, attend: Callable[..., Tensor], chunks: tuple[int, int]
) -> Tensor:
    """Attention of the queries of two chunks of a sequence, each to the keys up to its own end."""
    parts = q.chunk(2, dim=-2)
    ends = [(chunk + 1) * parts[0].shape[-2] for chunk in chunks]
    return torch.cat(
        [attend(part, k[..., :end, :], v[..., :end, :]) for part, end in zip(parts, ends, strict=True)], -2
    )


def _attend_by_windows(
    q: Tensor, k: Tensor, v: Tensor, *, length: int, documents: Tensor | None, **options: Any
) -> Tensor:
    """Attention of as many queries at a time as the window has tokens, to the keys that these see alone.

    A kernel computes the scores that a mask hides, too.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    results = []
    for start in range(0, queries, length):
        end = min(start + length, queries)
        first, last = max(0, keys - queries + start - length + 1), keys - queries + end
        seen = None if documents is None else documents[:, first:last]
        results.append(
            _attend(q[..., start:end, :], k[..., first:last, :], v[..., first:last, :], documents=seen, **options)
        )
    return results[0] if len(results) == 1 else torch.cat(results, -2)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None,
    window: int | None,
    documents: Tensor | None,
    cap: float | None,
    dropout: float,
    seed: int,
    first_head: int,
) -> Tensor:
    """The attention of queries that stand at the end of the keys."""
    queries, keys = q.shape[-2], k.shape[-2]
    if not dropout and cap is None:
        causal = queries == keys and documents is None and (window is None or window >= keys)
        seen = None if causal else _visible(queries, keys, window=window, documents=documents, device=q.device)
        grouped = k.shape[1] != q.shape[1]
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    mask = _visible(queries, keys, window=window, documents=documents, device=q.device)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if cap is not None:
        scores = capped(scores, cap)
    weights = widen(scores.masked_fill(~mask, float("-inf"))).softmax(-1).to(q.dtype)
    return (_drop(weights, dropout, seed, first_head) if dropout else weights) @ v


class _RecomputedAttention(Function):
    """Attention that would keep scores, or the mask of a window: its backward attends again instead."""

    @staticmethod
    def forward(ctx: Any, attend: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.attend = attend
        return attend(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            y = ctx.attend(*inputs)
        return None, *torch.autograd.grad(y, inputs, gradients[0])


def _visible(queries: int, keys: int, *, window: int | None, documents: Tensor | None, device: torch.device) -> Tensor:
    """The keys that each query sees, [..., queries, keys]."""
    place = torch.arange(keys, device=device)
    distance = place[keys - queries :, None] - place
    mask = distance >= 0
    if window is not None:
        mask &= distance < window
    if documents is None:
        return mask
    documents = documents[:, :keys]
    return (mask & (documents[:, keys - queries :, None] == documents[:, None, :]))[:, None]


def _drop(weights: Tensor, p: float, seed: int, first_head: int) -> Tensor:
    """Dropout of [batch, heads, ...] with a mask of its own for every head, wherever the others are."""
    batch, heads, *scores = weights.shape
    keep = torch.empty(heads, batch, *scores, dtype=torch.bool, device=weights.device)
    generator = torch.Generator(device=weights.device)
    for head, mask in enumerate(keep, start=first_head):
        mask.bernoulli_(1 - p, generator=generator.manual_seed(zlib.crc32(f"{seed} {head}".encode())))
    return torch.where(keep.transpose(0, 1), weights / (1 - p), 0)
