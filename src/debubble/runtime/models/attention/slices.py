"""Sequences in slices: their attention, what it leaves for the slices after it, and they for its backward.

A slice attends to a causal block of its own and whole blocks before it, which are merged by the logarithms of their
sums, as in a ring (see `ring`).

Keys and values of a slice stay from its forward to its backward, whatever is recomputed or offloaded.  Backwards go
from the last slice to the first, and each adds to the gradients of the keys and values before it, in fp32 at least.

Source: Zhuohan Li et al., TeraPipe, ICML 2021, section 3; Ao Sun et al., Seq1F1B, NAACL 2025, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from debubble.runtime.memory.activations import Ledger, SavedTensor
from debubble.runtime.models.attention.blocks import Attended, Scores, attend_to_block, block_gradients
from debubble.runtime.operators import call, widen


class Counted(NamedTuple):
    """A tensor, and what counts it in the ledger for as long as both are there."""

    tensor: Tensor
    entry: SavedTensor | None


@dataclass(frozen=True)
class SlicedSequence:
    """The slices of one micro-batch: how many tokens each has, and its keys and values in each layer.

    Keys and values are [2, batch, heads, length, head_dim], by the number that tells layers of a device apart and the
    slice's.
    """

    lengths: tuple[int, ...]
    counted: bool = True
    """True if ledgers count the tensors that its slices save."""
    pairs: dict[tuple[int, int], Counted] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Counted] = field(default_factory=dict)
    """Gradients that later slices have given so far."""

    def slice(self, index: int) -> SequenceSlice:
        """One of them, by its place."""
        return SequenceSlice(self, index)


@dataclass(frozen=True)
class SequenceSlice:
    """One slice of a micro-batch's sequences."""

    sequence: SlicedSequence
    index: int

    @property
    def start(self) -> int:
        """Tokens before it."""
        return sum(self.sequence.lengths[: self.index])

    def in_layer(self, layer: int, ledger: Ledger | None) -> LayerSlice:
        """The slice as the attention of one layer sees it; the ledger counts what it leaves."""
        return LayerSlice(self.sequence, self.index, layer, ledger if self.sequence.counted else None)


@dataclass(frozen=True)
class LayerSlice(SequenceSlice):
    """A slice in one layer, between those before and those after it."""

    layer: int
    ledger: Ledger | None

    def keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the slice's keys and values until `take_gradients`; a recomputation gets those of the forward."""
        if (self.layer, self.index) in self.sequence.pairs:
            keys, values = self.own
        else:
            keys, values = pair = torch.stack((k, v))
            self.sequence.pairs[self.layer, self.index] = self._counted(pair.detach())
        return keys, values

    @property
    def own(self) -> Tensor:
        """Keys and values of the slice."""
        return self.sequence.pairs[self.layer, self.index].tensor

    def before(self, window: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """The earlier slices of which its first token sees some, each with its keys and values, in order."""
        end = 0
        for index, length in enumerate(self.sequence.lengths[: self.index]):
            end += length
            if window is None or end > self.start - window + 1:
                yield index, self.sequence.pairs[self.layer, index].tensor

    def give(self, index: int, gradient: Tensor) -> None:
        """Add to the gradients of an earlier slice's keys and values."""
        gradients, place = self.sequence.gradients, (self.layer, index)
        if place in gradients:
            gradients[place].tensor.add_(gradient)
        else:
            gradients[place] = self._counted(widen(gradient).clone())

    def take_gradients(self, own: Tensor) -> Tensor:
        """The whole gradient of its keys and values, of which `own` is this slice's part; they are then forgotten."""
        given = self.sequence.gradients.pop((self.layer, self.index), None)
        del self.sequence.pairs[self.layer, self.index]
        return own if given is None else given.tensor.add_(own).to(own.dtype)

    def _counted(self, tensor: Tensor) -> Counted:
        return Counted(tensor, None if self.ledger is None else self.ledger.save(tensor))


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor on a storage that has nothing else, so that keeping it keeps no more."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def sliced_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, layer: LayerSlice) -> Tensor:
    """Causal attention of a slice's queries to its sequence so far, [batch, heads, own length, head_dim].

    k and v are what `layer` keeps of the slice, and may have fewer heads.  It keeps q, the result, and one number per
    query and head.
    """
    return call(_SlicedAttention, q, k, v, scale, layer)


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
