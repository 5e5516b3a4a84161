"""Ring attention: keys and values rotate among the context-parallel ranks while they compute (arXiv:2310.01889).

Rank i of n has chunks i and 2n - 1 - i of 2n.  All its queries attend to the first half of an earlier rank's keys, and
the second half of its queries to all of a later rank's keys.  So only the local block needs a mask, and every rank has
the same work in every turn.  The backward rotates keys and values again, and their gradients one turn later.
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
    """Causal attention of this rank's queries to the full sequence, [batch, heads, local length, head_dim].

    k and v are this rank's, and may have fewer heads.  It saves q, k, v, the result, and one number per query and head.
    """
    return call(_RingAttention, q, k, v, scale, context)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, context: ContextGroup) -> Tensor:
        arriving = context.rotate(torch.stack((k, v)))
        merged = attend_to_block(q, k, v, Scores(scale=scale, causal=True)).widen()
        for turn in range(1, context.size):
            pair = arriving()
            if turn + 1 < context.size:
                arriving = context.rotate(pair)
            queries, keys = _seen(turn, q.shape[-2], context)
            remote_k, remote_v = pair[..., keys, :]
            merged.merge(attend_to_block(q[:, :, queries], remote_k, remote_v, Scores(scale=scale)), queries)
        output = merged.output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, merged.log_sum)
        ctx.scale, ctx.context = scale, context
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, log_sum = ctx.saved_tensors
        (gradient,), scale, context = gradients, ctx.scale, ctx.context
        arriving = context.rotate(torch.stack((k, v)))
        of_q, *local = block_gradients(gradient, q, k, v, Attended(output, log_sum), Scores(scale=scale, causal=True))
        of_q, of_local = widen(of_q), torch.stack(local)
        # Gradients, so far, of the keys and values that are on this rank now
        travelling = None
        for turn in range(1, context.size):
            pair = arriving()
            if turn + 1 < context.size:
                arriving = context.rotate(pair)
            queries, keys = _seen(turn, q.shape[-2], context)
            remote_k, remote_v = pair[..., keys, :]
            block = q[:, :, queries], remote_k, remote_v, Attended(output[:, :, queries], log_sum[:, :, queries])
            of_block, *of_keys = block_gradients(gradient[:, :, queries], *block, Scores(scale=scale))
            of_q[:, :, queries] += of_block
            of_pair = torch.zeros_like(pair) if travelling is None else travelling()
            of_pair[..., keys, :] += torch.stack(of_keys)
            travelling = context.rotate(of_pair)
        if travelling is not None:
            of_local += travelling()
        return of_q.to(q.dtype), *of_local, None, None


def _seen(turn: int, length: int, context: ContextGroup) -> tuple[slice, slice]:
    """This rank's queries, and the keys that they attend to, in a turn in which it has those of `turn` ranks before."""
    everything, half = slice(0, length), length // 2
    if turn <= context.group_rank:
        return everything, slice(0, half)
    return slice(half, length), everything
