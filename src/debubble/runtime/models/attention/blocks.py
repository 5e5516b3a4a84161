"""Attention of queries to a block of the keys, with what merging the blocks takes, and a block's gradients.

A block's result is normalised by its own keys alone.  With the logarithm of the sum of its exponentials, `log_sum`,
results of several blocks are merged into that of all their keys (Milakov and Gimelshein, arXiv:1805.02867), and the
whole's gives each block its gradients without the others.
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
"""Dtypes of the kernels on CUDA; others are written out there."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The changes to the products of queries and keys, before and after their exponentials."""

    scale: float
    causal: bool = False
    """Query i sees the keys up to i."""
    seen: Tensor | None = None
    """The keys that each query sees, [queries, keys] or [batch, 1, queries, keys]."""
    cap: float | None = None
    drop: Callable[..., list[Tensor]] | None = None
    """One dropout of tensors [batch, heads, queries, keys], the same whenever it is called."""

    @property
    def fused(self) -> bool:
        """Tell whether a fused kernel can do that."""
        return self.cap is None and self.drop is None


@dataclass
class Attended:
    """A result [batch, heads, queries, head_dim] that is normalised, and how much it weighs [batch, heads, queries]."""

    output: Tensor
    log_sum: Tensor

    def widen(self) -> Attended:
        """The block's result in an output of its own that others can be merged into: in fp32 at least."""
        wide = widen(self.output)
        return Attended(wide.clone() if wide is self.output else wide, self.log_sum.clone())

    def merge(self, other: Attended, queries: slice) -> None:
        """Let these queries see the keys of another block too."""
        output, log_sum = self.output[:, :, queries], self.log_sum[:, :, queries]
        both = torch.logaddexp(log_sum, other.log_sum)
        output.mul_((log_sum - both).exp_().unsqueeze(-1))
        output.addcmul_(widen(other.output), (other.log_sum - both).exp_().unsqueeze(-1))
        log_sum.copy_(both)


def attend_to_block(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Attended:
    """Attention of all queries to all keys that they see.

    k and v may have fewer heads.
    """
    k, v = (_for_all_heads(t, q.shape[1]) for t in (k, v))
    if not _is_fused(q, scores):
        return attend_written_out(q, k, v, scores)
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
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that a block has part in, of the gradient of the result of all blocks."""
    heads = k.shape[1]
    k, v = (_for_all_heads(t, q.shape[1]) for t in (k, v))
    if _is_fused(q, scores):
        of_q, of_k, of_v = _fused_gradients(gradient, q, k, v, whole, scores)
    else:
        of_q, of_k, of_v = gradients_written_out(gradient, q, k, v, whole, scores)
    return of_q, _of_own_heads(of_k, heads), _of_own_heads(of_v, heads)


def _is_fused(q: Tensor, scores: Scores) -> bool:
    return scores.fused and (not q.is_cuda or (q.dtype in _FUSED_ON_CUDA and not q.shape[-1] % 8))


def _fused_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    causal, scale, bias = scores.causal, scores.scale, _bias(scores.seen, q)
    log_sum = whole.log_sum.contiguous()
    if not q.is_cuda:
        of_q, of_k, of_v = torch_internals.flash_attention_on_cpu_backward(
            gradient, q, k, v, whole.output, log_sum, 0.0, causal, attn_mask=bias, scale=scale
        )
        return of_q, of_k, of_v
    # Without dropout the kernels do not look at the random numbers' seed and offset.
    none = torch.empty(0, dtype=torch.int64, device=q.device)
    if bias is None:
        lengths = None, None, q.shape[-2], k.shape[-2]
        of_q, of_k, of_v = torch_internals.flash_attention_backward(
            gradient, q, k, v, whole.output, log_sum, *lengths, 0.0, causal, none, none, scale=scale
        )
        return of_q, of_k, of_v
    # The kernel takes the heads of one query's result to lie in parallel, whatever its strides say.
    output = whole.output.transpose(1, 2).contiguous().transpose(1, 2)
    # It reads the logarithms in blocks of 32, which at the end are filled up so that they weigh nothing.
    padded = functional.pad(log_sum, (0, -log_sum.shape[-1] % 32), value=float("inf"))
    of_q, of_k, of_v, _ = torch_internals.efficient_attention_backward(
        gradient, q, k, v, bias.expand(*q.shape[:2], -1, -1), output, padded, none, none, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    return of_q, of_k, of_v


def _bias(seen: Tensor | None, q: Tensor) -> Tensor | None:
    """The bias of the scores, in rows that begin at multiples of 16 bytes, as a kernel on CUDA asks for."""
    if seen is None:
        return None
    *rows, keys = seen.shape
    bias = q.new_zeros(*rows, keys + -keys % 8)[..., :keys]
    return bias.masked_fill_(~seen, float("-inf"))


def attend_written_out(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Attended:
    """`attend_to_block` where no fused kernel can: it makes the block's scores."""
    visible = _hide(_products(q, k, scores), scores)
    log_sum = visible.logsumexp(-1)
    weights = visible.sub_(log_sum.unsqueeze(-1)).exp_().to(v.dtype)
    if scores.drop is not None:
        (weights,) = scores.drop(weights)
    return Attended(weights @ v, log_sum)


def gradients_written_out(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` where no fused kernel can: it makes the block's scores again."""
    products = _products(q, k, scores)
    slope = None if scores.cap is None else 1 - (products / scores.cap).square()
    weights = _hide(products, scores).sub_(whole.log_sum.unsqueeze(-1)).exp_().to(q.dtype)
    share = (gradient * whole.output).sum(-1, keepdim=True)
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
    """Let the products with keys that are not seen weigh nothing, in place."""
    if scores.causal:
        later = torch.ones(products.shape[-2:], dtype=torch.bool, device=products.device).triu_(1)
        products.masked_fill_(later, float("-inf"))
    return products if scores.seen is None else products.masked_fill_(~scores.seen, float("-inf"))


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values once for every head of the queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_own_heads(gradient: Tensor, heads: int) -> Tensor:
    """The sum over the heads of queries that share a head of keys and values."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
