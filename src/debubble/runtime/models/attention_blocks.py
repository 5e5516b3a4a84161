"""Attention of queries to a block of the keys, with what merging the blocks takes, and a block's gradients.

A block's result is normalised by its own keys alone.  With the logarithm of the sum of its exponentials, `log_sum`,
results of several blocks are merged into that of all their keys (Milakov and Gimelshein, arXiv:1805.02867), and the
whole's gives each block its gradients without the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from debubble.runtime.operators import widen

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_FUSED_ON_CUDA = (torch.bfloat16, torch.float16)
"""What the kernel on CUDA takes; other dtypes are written out there."""


@dataclass
class Attended:
    """A result [batch, heads, queries, head_dim] that is normalised, and how much it weighs [batch, heads, queries]."""

    output: Tensor
    log_sum: Tensor

    def widen(self) -> Attended:
        """The same, with an output of its own that others can be merged into: in fp32 at least."""
        wide = widen(self.output)
        return Attended(wide.clone() if wide is self.output else wide, self.log_sum.clone())

    def merge(self, other: Attended, queries: slice) -> None:
        """Let these queries see the keys of another block too."""
        output, log_sum = self.output[:, :, queries], self.log_sum[:, :, queries]
        both = torch.logaddexp(log_sum, other.log_sum)
        output.mul_((log_sum - both).exp_().unsqueeze(-1))
        output.addcmul_(widen(other.output), (other.log_sum - both).exp_().unsqueeze(-1))
        log_sum.copy_(both)


def attend_to_block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Attended:
    """Attention of all queries to all keys, or if `causal` to those that do not stand behind them.

    k and v may have fewer heads.
    """
    k, v = (_for_all_heads(t, q.shape[1]) for t in (k, v))
    if not q.is_cuda:
        return Attended(*_CPU(q, k, v, 0.0, causal, scale=scale))
    if q.dtype in _FUSED_ON_CUDA and not q.shape[-1] % 8:
        output, log_sum, *_ = _CUDA(q, k, v, 0.0, causal, scale=scale)
        return Attended(output, log_sum)
    return attend_written_out(q, k, v, causal=causal, scale=scale)


def block_gradients(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v that a block has part in, of the gradient of the result of all blocks."""
    heads = k.shape[1]
    k, v = (_for_all_heads(t, q.shape[1]) for t in (k, v))
    arguments = gradient, q, k, v, whole.output, whole.log_sum.contiguous()
    if not q.is_cuda:
        of_q, of_k, of_v = _CPU_BACKWARD(*arguments, 0.0, causal, scale=scale)
    elif q.dtype in _FUSED_ON_CUDA and not q.shape[-1] % 8:
        # Without dropout the kernel does not look at the random numbers' seed and offset.
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        lengths = None, None, q.shape[-2], k.shape[-2]
        of_q, of_k, of_v = _CUDA_BACKWARD(*arguments, *lengths, 0.0, causal, none, none, scale=scale)
    else:
        of_q, of_k, of_v = gradients_written_out(*arguments[:4], whole, causal=causal, scale=scale)
    return of_q, _of_own_heads(of_k, heads), _of_own_heads(of_v, heads)


def attend_written_out(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Attended:
    """`attend_to_block` where no fused kernel can: it makes the block's scores."""
    scores = _scores(q, k, causal=causal, scale=scale)
    log_sum = scores.logsumexp(-1)
    return Attended(((scores - log_sum.unsqueeze(-1)).exp_().to(v.dtype) @ v), log_sum)


def gradients_written_out(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, whole: Attended, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`block_gradients` where no fused kernel can: it makes the block's scores again."""
    weights = (_scores(q, k, causal=causal, scale=scale) - whole.log_sum.unsqueeze(-1)).exp_().to(q.dtype)
    share = (gradient * whole.output).sum(-1, keepdim=True)
    of_scores = (gradient @ v.transpose(-2, -1)).sub_(share).mul_(weights).mul_(scale)
    return of_scores @ k, of_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ gradient


def _scores(q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
    scores = widen(q @ k.transpose(-2, -1)) * scale
    if not causal:
        return scores
    behind = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu_(1)
    return scores.masked_fill_(behind, float("-inf"))


def _for_all_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values once for every head of the queries."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def _of_own_heads(gradient: Tensor, heads: int) -> Tensor:
    """The sum over the heads of queries that share a head of keys and values."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)
