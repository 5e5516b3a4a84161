"""Attention over slices of sequences, with the keys and values that slices share.

A slice attends to its own causal block and to full blocks of earlier slices, which are merged by their logsumexp as in
ring attention.

Keys and values of a slice are kept from its forward to its backward, whatever is recomputed or offloaded.  Backwards
run from the last slice to the first, and each adds to the gradients of earlier keys and values, in at least fp32.

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
    """A tensor with its entry in the ledger, which counts it while both are alive."""

    tensor: Tensor
    entry: SavedTensor | None


@dataclass(frozen=True)
class SlicedSequence:
    """The slices of one micro-batch, with their keys and values in every layer of a device."""

    lengths: tuple[int, ...]
    """Tokens of each slice."""
    counted: bool = True
    """True if ledgers count keys and values."""
    pairs: dict[tuple[int, int], Counted] = field(default_factory=dict)
    """Keys and values [2, batch, heads, length, head_dim], by the unit's salt and the slice's index."""
    gradients: dict[tuple[int, int], Counted] = field(default_factory=dict)
    """Gradients accumulated so far by later slices."""

    def slice(self, index: int) -> SequenceSlice:
        """The slice of this index."""
        return SequenceSlice(self, index)


@dataclass(frozen=True)
class SequenceSlice:
    """One slice of a micro-batch's sequences."""

    sequence: SlicedSequence
    index: int

    @property
    def start(self) -> int:
        """Tokens before the slice."""
        return sum(self.sequence.lengths[: self.index])

    def in_layer(self, layer: int, ledger: Ledger | None) -> LayerSlice:
        """The slice in the attention of one layer; the ledger counts its keys and values."""
        return LayerSlice(self.sequence, self.index, layer, ledger if self.sequence.counted else None)


@dataclass(frozen=True)
class LayerSlice(SequenceSlice):
    """A slice in one layer."""

    layer: int
    ledger: Ledger | None

    def save(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Save the slice's keys and values until `take_gradients`; a recomputation gets those of the forward."""
        if (self.layer, self.index) in self.sequence.pairs:
            keys, values = self.local
        else:
            keys, values = pair = torch.stack((k, v))
            self.sequence.pairs[self.layer, self.index] = self._counted(pair.detach())
        return keys, values

    @property
    def local(self) -> Tensor:
        """Keys and values of the slice itself."""
        return self.sequence.pairs[self.layer, self.index].tensor

    def earlier(self, window: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Indices, keys and values of the earlier slices within the first token's window, in order."""
        end = 0
        for index, length in enumerate(self.sequence.lengths[: self.index]):
            end += length
            if window is None or end > self.start - window + 1:
                yield index, self.sequence.pairs[self.layer, index].tensor

    def add_gradient(self, index: int, gradient: Tensor) -> None:
        """Add to the gradients of an earlier slice's keys and values."""
        gradients, key = self.sequence.gradients, (self.layer, index)
        if key in gradients:
            gradients[key].tensor.add_(gradient)
        else:
            gradients[key] = self._counted(widen(gradient).clone())

    def take_gradients(self, local: Tensor) -> Tensor:
        """Add the later slices' gradients of its keys and values to its own, `local`, and drop keys and values."""
        later = self.sequence.gradients.pop((self.layer, self.index), None)
        del self.sequence.pairs[self.layer, self.index]
        return local if later is None else later.tensor.add_(local).to(local.dtype)

    def _counted(self, tensor: Tensor) -> Counted:
        return Counted(tensor, None if self.ledger is None else self.ledger.save(tensor))


def on_exact_storage(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if its storage is larger, so that saving it saves nothing else."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def sliced_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, layer: LayerSlice) -> Tensor:
    """Causal attention of a slice's queries to its sequence so far, [batch, heads, slice length, head_dim].

    k and v are those of `layer.save`, and may have fewer heads.  It saves q, the result, and one number per query and
    head.
    """
    return call(_SlicedAttention, q, k, v, scale, layer)


class _SlicedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: LayerSlice) -> Tensor:
        merged = attend_to_block(q, k, v, Scores(scale=scale, causal=True)).widen()
        for _, (keys, values) in layer.earlier():
            merged.merge(attend_to_block(q, keys, values, Scores(scale=scale)), slice(None))
        output = merged.output.to(q.dtype)
        ctx.save_for_backward(q, output, merged.log_sum)
        ctx.scale, ctx.layer = scale, layer
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, output, log_sum = ctx.saved_tensors
        (gradient,), scale, layer = gradients, ctx.scale, ctx.layer
        merged = Attended(output, log_sum)
        keys, values = layer.local
        of_q, *local = block_gradients(gradient, q, keys, values, merged, Scores(scale=scale, causal=True))
        of_q = widen(of_q)
        for index, (keys, values) in layer.earlier():
            of_block, *of_pair = block_gradients(gradient, q, keys, values, merged, Scores(scale=scale))
            of_q = of_q.add_(of_block)
            layer.add_gradient(index, torch.stack(of_pair))
        of_k, of_v = layer.take_gradients(torch.stack(local))
        return of_q.to(q.dtype), of_k, of_v, None, None
