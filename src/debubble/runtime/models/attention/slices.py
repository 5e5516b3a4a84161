"""Sequences in slices: what one slice's attention leaves for the slices after it, and they for its backward.

Keys and values of a slice stay from its forward to its backward, whatever is recomputed or offloaded.  Backwards go
from the last slice to the first, and each adds to the gradients of the keys and values before it, in fp32 at least.

Source: Zhuohan Li et al., TeraPipe, ICML 2021, section 3; Ao Sun et al., Seq1F1B, NAACL 2025, section 3.2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from debubble.runtime.memory.activations import Ledger, SavedTensor
from debubble.runtime.operators import widen


class Counted(NamedTuple):
    """A tensor, and what counts it in the ledger for as long as both are there."""

    tensor: Tensor
    entry: SavedTensor | None


@dataclass
class LayerSlices:
    """Keys and values [2, batch, heads, length, head_dim] of a sequence's slices in one layer, by slice."""

    pairs: dict[int, Counted] = field(default_factory=dict)
    gradients: dict[int, Counted] = field(default_factory=dict)
    """Gradients that later slices have given so far."""


@dataclass(frozen=True)
class SlicedSequence:
    """The slices of one micro-batch: how many tokens each has, and what each layer has of them."""

    lengths: tuple[int, ...]
    counted: bool = True
    """True if ledgers count the tensors that its slices save."""
    layers: defaultdict[int, LayerSlices] = field(default_factory=lambda: defaultdict(LayerSlices))
    """By a number that tells the layers of a device apart."""

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
        return LayerSlice(self, self.sequence.layers[layer], ledger if self.sequence.counted else None)


@dataclass(frozen=True)
class LayerSlice:
    """A slice in one layer, between those before and those after it."""

    of: SequenceSlice
    layer: LayerSlices
    ledger: Ledger | None

    @property
    def start(self) -> int:
        """Tokens before it."""
        return self.of.start

    def keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the slice's keys and values until `take_gradients`; a recomputation gets those of the forward."""
        if self.of.index in self.layer.pairs:
            keys, values = self.own
        else:
            keys, values = pair = torch.stack((k, v))
            self.layer.pairs[self.of.index] = self._counted(pair.detach())
        return keys, values

    @property
    def own(self) -> Tensor:
        """Keys and values of the slice."""
        return self.layer.pairs[self.of.index].tensor

    def before(self, window: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """The earlier slices of which its first token sees some, each with its keys and values, in order."""
        end = 0
        for index, length in enumerate(self.of.sequence.lengths[: self.of.index]):
            end += length
            if window is None or end > self.start - window + 1:
                yield index, self.layer.pairs[index].tensor

    def give(self, index: int, gradient: Tensor) -> None:
        """Add to the gradients of an earlier slice's keys and values."""
        gradients = self.layer.gradients
        if index in gradients:
            gradients[index].tensor.add_(gradient)
        else:
            gradients[index] = self._counted(widen(gradient).clone())

    def take_gradients(self, own: Tensor) -> Tensor:
        """The whole gradient of its keys and values, of which `own` is this slice's part; they are then forgotten."""
        given = self.layer.gradients.pop(self.of.index, None)
        del self.layer.pairs[self.of.index]
        return own if given is None else given.tensor.add_(own).to(own.dtype)

    def _counted(self, tensor: Tensor) -> Counted:
        return Counted(tensor, None if self.ledger is None else self.ledger.save(tensor))


def own_storage(tensor: Tensor) -> Tensor:
    """The tensor on a storage that has nothing else, so that keeping it keeps no more."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
