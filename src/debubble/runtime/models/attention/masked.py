"""Attention under masks, caps or dropout, by blocks of queries and the keys that these can see.

A kernel computes the scores that a mask hides, too: so queries within a window are attended as many at a time as it has
tokens.  Ranks that divide a sequence gather its keys and values, and again for the backward, so that none keeps what
the others have.  No mask is kept, and no scores: the result, and one number per query and head, give the gradients.
A slice of a sequence attends to the earlier slices that its window reaches (see `slices`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.models.attention.blocks import Attended, Scores, attend_to_block, block_gradients
from debubble.runtime.models.attention.slices import LayerSlice
from debubble.runtime.operators import call, widen


def masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Scores,
    *,
    window: int | None,
    documents: Tensor | None,
    context: ContextGroup,
    layer: LayerSlice | None = None,
) -> Tensor:
    """Causal attention of this rank's queries to the whole sequence, [batch, heads, own length, head_dim].

    k and v are this rank's, and may have fewer heads.  `scores`: what is done to all scores alike.  `layer`: the slice
    of a sequence that these are.
    """
    return call(_MaskedAttention, q, k, v, _Masks(scores, window, documents, context, layer))


@dataclass(frozen=True)
class _Block:
    """Queries of this rank, and the keys of the whole sequence that some of them see."""

    queries: slice
    keys: slice
    scores: Scores

    def of_queries(self, x: Tensor) -> Tensor:
        return x[:, :, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[..., self.keys, :]


@dataclass(frozen=True)
class _Masks:
    """The keys that each query attends to."""

    scores: Scores
    window: int | None
    documents: Tensor | None
    context: ContextGroup
    layer: LayerSlice | None

    def whole(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values of the whole sequence, as far as the queries may see them, [2, ...]."""
        if self.layer is not None:
            return torch.cat([*(pair for _, pair in self.layer.before(self.window)), self.layer.own], -2)
        pair = torch.stack((k, v))
        return pair if self.context.size == 1 else self.context.gather(pair, -2)

    def own(self, pair: Tensor) -> Tensor:
        """This rank's part of what all ranks have for the whole sequence's keys and values, or this slice's."""
        if self.layer is None:
            return pair if self.context.size == 1 else self.context.reduce(pair, -2)
        before = [(index, earlier.shape[-2]) for index, earlier in self.layer.before(self.window)]
        *parts, own = pair.split([*(length for _, length in before), self.layer.own.shape[-2]], -2)
        for (index, _), part in zip(before, parts, strict=True):
            self.layer.give(index, part)
        return self.layer.take_gradients(own)

    def blocks(self, q: Tensor) -> Iterator[_Block]:
        """The blocks of this rank's queries."""
        first_key = 0
        if self.layer is not None:
            first_key = self.layer.start - sum(pair.shape[-2] for _, pair in self.layer.before(self.window))
        for own, first in self._runs(q.shape[-2]):
            step = self.window or own.stop - own.start
            for start in range(own.start, own.stop, step):
                queries = slice(start, min(start + step, own.stop))
                place, count = first + start - own.start, queries.stop - queries.start
                keys = slice(
                    first_key if self.window is None else max(first_key, place - self.window + 1), place + count
                )
                scores = self._scores(place, count, keys, q.device)
                yield _Block(queries, slice(keys.start - first_key, keys.stop - first_key), scores)

    def _runs(self, length: int) -> Iterator[tuple[slice, int]]:
        """The runs of consecutive queries, and the first one's place in the whole sequence."""
        if self.context.size == 1:
            yield slice(0, length), 0 if self.layer is None else self.layer.start
            return
        half = length // 2
        for start, chunk in zip((0, half), self.context.chunks, strict=True):
            yield slice(start, start + half), chunk * half

    def _scores(self, place: int, count: int, keys: slice, device: torch.device) -> Scores:
        if self.documents is None and keys.start == place:
            return replace(self.scores, causal=True)
        queries, places = (
            torch.arange(*span, device=device) for span in ((place, place + count), (keys.start, keys.stop))
        )
        distance = queries[:, None] - places
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.documents is not None:
            mine, theirs = self.documents[:, place : place + count], self.documents[:, keys]
            seen = (seen & (mine[:, :, None] == theirs[:, None, :]))[:, None]
        return replace(self.scores, seen=seen)


class _MaskedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, masks: _Masks) -> Tensor:
        keys, values = masks.whole(k, v)
        # As the kernels lay results out: heads lie in parallel in memory.
        output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        log_sums = []
        for block in masks.blocks(q):
            found = attend_to_block(block.of_queries(q), block.of_keys(keys), block.of_keys(values), block.scores)
            block.of_queries(output).copy_(found.output)
            log_sums.append(found.log_sum)
        kept = (q, k, v) if masks.layer is None else (q,)
        ctx.save_for_backward(output, torch.cat(log_sums, -1), *kept)
        ctx.masks = masks
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, log_sum, q, *kept = ctx.saved_tensors
        masks: _Masks = ctx.masks
        pair = masks.whole(*(kept or (q, q)))
        of_q, of_pair = torch.empty_like(q), torch.zeros_like(widen(pair))
        for block in masks.blocks(q):
            whole = Attended(block.of_queries(output), block.of_queries(log_sum))
            own, (keys, values) = block.of_queries(q), block.of_keys(pair)
            gradient = block.of_queries(gradients[0])
            of_block, *of_keys = block_gradients(gradient, own, keys, values, whole, block.scores)
            block.of_queries(of_q).copy_(of_block)
            block.of_keys(of_pair).add_(torch.stack(of_keys))
        of_k, of_v = masks.own(of_pair.to(pair.dtype))
        return of_q, of_k, of_v, None
