"""Attention of queries to a block of keys, the merging of blocks, and the gradients of a block.

A block's result is normalised over its own keys.  With their logsumexp, `log_sum`, the results of several blocks are
merged (online softmax, Milakov and Gimelshein, arXiv:1805.02867), and from the merged result and `log_sum` the
gradients of each block are computed independently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import Tensor

from debubble.runtime import torch_internals
from debubble.runtime.operators import capped, widen

_FUSED_ON_CUDA = (torch.bfloat16, torch.float16)
"""Dtypes of the fused kernels on CUDA."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How attention weights are computed from the products of queries and keys."""

    scale: float
    causal: bool = False
    """Query i attends to keys up to i."""
    seen: Tensor | None = None
    """Mask of the keys that each query attends to, [queries, keys] or [batch, 1, queries, keys]."""
    cap: float | None = None
    drop: Callable[..., list[Tensor]] | None = None
    """Applies one dropout mask to tensors [batch, heads, queries, keys], the same in every call."""

    @property
    def fused(self) -> bool:
        """True if the fused kernels support it."""
        return self.cap is None and self.drop is None


@dataclass
class Attended:
    """A normalised result [batch, heads, queries, head_dim] and the logsumexp of its scores [batch, heads, queries]."""

    output: Tensor
    log_sum: Tensor

    def widen(self) -> Attended:
        """A copy, in at least fp32, that other blocks can be merged into."""
        wide = widen(self.output)
        return Attended(wide.clone() if wide is self.output else wide, self.log_sum.clone())

    def merge(self, other: Attended, queries: slice) -> None:
        """Merge the result of these queries over another block of keys, in place."""
        output, log_sum = self.output[:, :, queries], self.log_sum[:, :, queries]
        both = torch.logaddexp(log_sum, other.log_sum)
        output.mul_((log_sum - both).exp_().unsqueeze(-1))
        output.addcmul_(widen(other.output), (other.log_sum - both).exp_().unsqueeze(-1))
        log_sum.copy_(both)


def attend_to_block(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Attended:
    """Attention of queries to a block of keys; k and v may have fewer heads."""
    k, v = (_repeat_kv(t, q.shape[1]) for t in (k, v))
    if not _is_fused(q, scores):
        return attend_unfused(q, k, v, scores)
    causal, scale, bias = scores.causal, scores.scale, _bias(scores.seen, q)
    if not q.is_cuda:
        return Attended(*torch_internals.flash_attention_on_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale))
    if bias is None:
        output, log_sum, *_ = torch_internals.flash_attention(q, k, v, 0.0, causal, scale=scale)
        return Attended(output, log_sum)
    output, log_sum, *_ = torch_internals.efficient_attention(
        q, k, v, bias.expand(*q.shape[:2], -1, -1), True, 0.0, causal, scale=scale
    )
    return Attended(output, log_sum[..., : q.shape[-2]])


def block_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Attended, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's contributions to the gradients of q, k and v, from the gradient of the merged result."""
    heads = k.shape[1]
    k, v = (_repeat_kv(t, q.shape[1]) for t in (k, v))
    if _is_fused(q, scores):
        of_q, of_k, of_v = _fused_gradients(gradient, q, k, v, merged, scores)
    else:
        of_q, of_k, of_v = gradients_unfused(gradient, q, k, v, merged, scores)
    return of_q, _sum_query_groups(of_k, heads), _sum_query_groups(of_v, heads)


def _is_fused(q: Tensor, scores: Scores) -> bool:
    return scores.fused and (not q.is_cuda or (q.dtype in _FUSED_ON_CUDA and not q.shape[-1] % 8))


def _fused_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Attended, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    causal, scale, bias = scores.causal, scores.scale, _bias(scores.seen, q)
    log_sum = merged.log_sum.contiguous()
    if not q.is_cuda:
        of_q, of_k, of_v = torch_internals.flash_attention_on_cpu_backward(
            gradient, q, k, v, merged.output, log_sum, 0.0, causal, attn_mask=bias, scale=scale
        )
        return of_q, of_k, of_v
    # Without dropout the kernels do not read the seed and offset of random numbers.
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    if bias is None:
        lengths = None, None, q.shape[-2], k.shape[-2]
        of_q, of_k, of_v = torch_internals.flash_attention_backward(
            gradient, q, k, v, merged.output, log_sum, *lengths, 0.0, causal, none, none, scale=scale
        )
        return of_q, of_k, of_v
    # The kernel ignores strides and assumes the layout [batch, queries, heads, head_dim].
    output = merged.output.transpose(1, 2).contiguous().transpose(1, 2)
    # It reads the logsumexp in blocks of 32: the padding has weight 0.
    padded = functional.pad(log_sum, (0, -log_sum.shape[-1] % 32), value=float("inf"))
    of_q, of_k, of_v, _ = torch_internals.efficient_attention_backward(
        gradient, q, k, v, bias.expand(*q.shape[:2], -1, -1), output, padded, none, none, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return of_q, of_k, of_v


def _bias(seen: Tensor | None, q: Tensor) -> Tensor | None:
    """The attention bias of a mask, with rows aligned to 16 bytes for a CUDA kernel."""
    if seen is None:
        return None
    *rows, keys = seen.shape
    bias = q.new_zeros(*rows, keys + -keys % 8)[..., :keys]
    return bias.masked_fill_(~seen, float("-inf"))


def attend_unfused(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Attended:
    """`attend_to_block` without a fused kernel: it materialises the block's scores."""
    visible = _hide(_products(q, k, scores), scores)
    log_sum = visible.logsumexp(-1)
    weights = visible.sub_(log_sum.unsqueeze(-1)).exp_().to(v.dtype)
    if scores.drop is not None:
        (weights,) = scores.drop(weights)
    return Attended(weights @ v, log_sum)


def gradients_unfused(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, merged: Attended, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` without a fused kernel: it recomputes the block's scores."""
    products = _products(q, k, scores)
    slope = None if scores.cap is None else 1 - (products / scores.cap).square()
    weights = _hide(products, scores).sub_(merged.log_sum.unsqueeze(-1)).exp_().to(q.dtype)
    share = (gradient * merged.output).sum(-1, keepdim=True)
    of_weights = gradient @ v.transpose(-2, -1)
    dropped = weights
    if scores.drop is not None:
        of_weights, dropped = scores.drop(of_weights, weights)
    of_scores = of_weights.sub_(share).mul_(weights).mul_(scores.scale)
    if slope is not None:
        of_scores = (of_scores * slope).to(q.dtype)
    return of_scores @ k, of_scores.transpose(-2, -1) @ q, dropped.transpose(-2, -1) @ gradient


def _products(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    products = widen(q @ k.transpose(-2, -1)) * scores.scale
    return products if scores.cap is None else capped(products, scores.cap)


def _hide(products: Tensor, scores: Scores) -> Tensor:
    """Mask the products with hidden keys, in place."""
    if scores.causal:
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).triu_(1)
        products.masked_fill_(later, float("-inf"))
    return products if scores.seen is None else products.masked_fill_(~scores.seen, float("-inf"))


def _repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat keys or values for every query head (grouped-query attention)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _sum_query_groups(gradient: Tensor, heads: int) -> Tensor:
    """Sum gradients over the query heads that share a key-value head."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
