"""Ring attention: keys and values go around the ranks that divide a sequence, while ranks attend to those before.

(Liu et al., arXiv:2310.01889.)  With the chunks i and 2n - 1 - i of 2n, rank i sees of an earlier rank's keys the first
half, with all its queries, and of a later rank's all, with the second half of its queries: no block needs a mask but
its own, and all ranks have as much to do in every turn.  The backward sends keys and values around again, and their
gradients one turn later.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.models.attention.blocks import Attended, Scores, attend_to_block, block_gradients
from debubble.runtime.operators import call, widen


def ring_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, context: ContextGroup) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, [batch, heads, own length, head_dim].

    k and v are this rank's, and may have fewer heads.  It keeps these, the result, and one number per query and head.
    """
    return call(_RingAttention, q, k, v, scale, context)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, context: ContextGroup) -> Tensor:
        arriving = context.rotate(torch.stack((k, v)))
        whole = attend_to_block(q, k, v, Scores(scale=scale, causal=True)).widen()
        for turn in range(1, context.size):
            pair = arriving()
            if turn + 1 < context.size:
                arriving = context.rotate(pair)
            queries, keys = _seen(turn, q.shape[-2], context)
            there_k, there_v = pair[..., keys, :]
            whole.merge(attend_to_block(q[:, :, queries], there_k, there_v, Scores(scale=scale)), queries)
        output = whole.output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, whole.log_sum)
        ctx.scale, ctx.context = scale, context
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        (gradient,), scale, context = gradients, ctx.scale, ctx.context
        arriving = context.rotate(torch.stack((k, v)))
        of_q, *own = block_gradients(gradient, q, k, v, Attended(output, log_sum), Scores(scale=scale, causal=True))
        of_q, of_own = widen(of_q), torch.stack(own)
        # What earlier ranks have found of the gradients of the keys and values that are here
        travelling = None
        for turn in range(1, context.size):
            pair = arriving()
            if turn + 1 < context.size:
                arriving = context.rotate(pair)
            queries, keys = _seen(turn, q.shape[-2], context)
            there_k, there_v = pair[..., keys, :]
            seeing = q[:, :, queries], there_k, there_v, Attended(output[:, :, queries], log_sum[:, :, queries])
            of_block, *of_keys = block_gradients(gradient[:, :, queries], *seeing, Scores(scale=scale))
            of_q[:, :, queries] += of_block
            of_pair = torch.zeros_like(pair) if travelling is None else travelling()
            of_pair[..., keys, :] += torch.stack(of_keys)
            travelling = context.rotate(of_pair)
        if travelling is not None:
            of_own += travelling()
        return of_q.to(q.dtype), *of_own, None, None


def _seen(turn: int, length: int, context: ContextGroup) -> tuple[slice, slice]:
    """Which of this rank's queries see which of the keys that are here in a turn, of the rank so many before it."""
    everything, half = slice(0, length), length // 2
    if turn <= context.part:
        return everything, slice(0, half)
    return slice(half, length), everything
