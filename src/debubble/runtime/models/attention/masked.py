"""Attention with masks, caps or dropout, by blocks of queries and their visible keys.

Kernels also compute masked scores, so with a sliding window queries are processed in blocks of the window's size.
Context-parallel ranks gather keys and values in the forward and again in the backward.  Neither masks nor scores are
saved: gradients are computed from the result and one number per query and head.  A slice of a sequence attends to the
earlier slices within its window (see `slices`).
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
    """Causal attention of this rank's queries to the full sequence, [batch, heads, local length, head_dim].

    k and v are this rank's, and may have fewer heads.  `scores`: the settings that all blocks share.  `layer`: the
    slice of a sequence that q, k and v are of.
    """
    return call(_MaskedAttention, q, k, v, _Masks(scores, window, documents, context, layer))


@dataclass(frozen=True)
class _Block:
    """A block of this rank's queries, and the keys of the full sequence that they attend to."""

    queries: slice
    keys: slice
    scores: Scores

    def select_queries(self, x: Tensor) -> Tensor:
        return x[:, :, self.queries]

    def select_keys(self, x: Tensor) -> Tensor:
        return x[..., self.keys, :]


@dataclass(frozen=True)
class _Masks:
    """The masks of one call, and the ranks and slices that its keys come from."""

    scores: Scores
    window: int | None
    documents: Tensor | None
    context: ContextGroup
    layer: LayerSlice | None

    def gather_keys(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values of the full sequence, or of the slices within the window, [2, ...]."""
        if self.layer is not None:
            return torch.cat([*(pair for _, pair in self.layer.earlier(self.window)), self.layer.local], -2)
        pair = torch.stack((k, v))
        return pair if self.context.size == 1 else self.context.gather(pair, -2)

    def reduce_gradients(self, pair: Tensor) -> Tensor:
        """Gradients of this rank's, or this slice's, keys and values, from those of the gathered ones."""
        if self.layer is None:
            return pair if self.context.size == 1 else self.context.reduce(pair, -2)
        lengths = {index: earlier.shape[-2] for index, earlier in self.layer.earlier(self.window)}
        *gradients, local = pair.split([*lengths.values(), self.layer.local.shape[-2]], -2)
        for index, gradient in zip(lengths, gradients, strict=True):
            self.layer.add_gradient(index, gradient)
        return self.layer.take_gradients(local)

    def blocks(self, q: Tensor) -> Iterator[_Block]:
        """The blocks of this rank's queries."""
        first_key = 0
        if self.layer is not None:
            first_key = self.layer.start - sum(pair.shape[-2] for _, pair in self.layer.earlier(self.window))
        for run, first in self._runs(q.shape[-2]):
            step = self.window or run.stop - run.start
            for start in range(run.start, run.stop, step):
                queries = slice(start, min(start + step, run.stop))
                position, count = first + start - run.start, queries.stop - queries.start
                keys = slice(
                    first_key if self.window is None else max(first_key, position - self.window + 1), position + count
                )
                scores = self._scores(position, count, keys, q.device)
                yield _Block(queries, slice(keys.start - first_key, keys.stop - first_key), scores)

    def _runs(self, length: int) -> Iterator[tuple[slice, int]]:
        """The runs of consecutive queries, and the position of the first in the full sequence."""
        if self.context.size == 1:
            yield slice(0, length), 0 if self.layer is None else self.layer.start
            return
        half = length // 2
        for start, chunk in zip((0, half), self.context.chunk_indices, strict=True):
            yield slice(start, start + half), chunk * half

    def _scores(self, position: int, count: int, keys: slice, device: torch.device) -> Scores:
        if self.documents is None and keys.start == position:
            return replace(self.scores, causal=True)
        queries, key_positions = (
            torch.arange(*span, device=device) for span in ((position, position + count), (keys.start, keys.stop))
        )
        distance = queries[:, None] - key_positions
        seen = distance >= 0
        if self.window is not None:
            seen &= distance < self.window
        if self.documents is not None:
            mine, theirs = self.documents[:, position : position + count], self.documents[:, keys]
            seen = (seen & (mine[:, :, None] == theirs[:, None, :]))[:, None]
        return replace(self.scores, seen=seen)


class _MaskedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, masks: _Masks) -> Tensor:
        keys, values = masks.gather_keys(k, v)
        # The kernels' memory layout: [batch, length, heads, head_dim].
        output = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
        log_sums = []
        for block in masks.blocks(q):
            local = block.select_queries(q), block.select_keys(keys), block.select_keys(values)
            result = attend_to_block(*local, block.scores)
            block.select_queries(output).copy_(result.output)
            log_sums.append(result.log_sum)
        inputs = (q, k, v) if masks.layer is None else (q,)
        ctx.save_for_backward(output, torch.cat(log_sums, -1), *inputs)
        ctx.masks = masks
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        output, log_sum, q, *inputs = ctx.saved_tensors
        masks: _Masks = ctx.masks
        pair = masks.gather_keys(*(inputs or (q, q)))
        of_q, of_pair = torch.empty_like(q), torch.zeros_like(widen(pair))
        for block in masks.blocks(q):
            merged = Attended(block.select_queries(output), block.select_queries(log_sum))
            block_q, (keys, values) = block.select_queries(q), block.select_keys(pair)
            gradient = block.select_queries(gradients[0])
            of_block, *select_keys = block_gradients(gradient, block_q, keys, values, merged, block.scores)
            block.select_queries(of_q).copy_(of_block)
            block.select_keys(of_pair).add_(torch.stack(select_keys))
        of_k, of_v = masks.reduce_gradients(of_pair.to(pair.dtype))
        return of_q, of_k, of_v, None
