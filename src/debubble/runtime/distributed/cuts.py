"""Division of parameters among the ranks of a group: each has a part of one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from debubble.runtime.distributed.transport import RankGroup


@dataclass(frozen=True)
class Cut:
    """The division of a parameter among the ranks of a group: each has a part of one dimension."""

    dim: int
    size: int
    """Size of the whole in that dimension."""
    fused: int = 1
    """Number of layers that lie in parallel in it; each is divided by itself."""


@dataclass(frozen=True)
class CutGroup(RankGroup):
    """The ranks that divide parameters among them."""

    def span(self, size: int, part: int | None = None) -> tuple[int, int]:
        """Start and length of a rank's part (None: this one's) of `size` rows or columns; the last may have fewer."""
        most = -(-size // self.size)
        start = min(most * (self.part if part is None else part), size)
        return start, min(most, size - start)

    def lengths(self, cut: Cut) -> list[int]:
        """Rows or columns of each rank of a parameter that is cut so."""
        return [cut.fused * self.span(cut.size // cut.fused, part)[1] for part in range(self.size)]

    def own(self, whole: Tensor, cut: Cut) -> Tensor:
        """This rank's part of a tensor; as a view, unless layers are fused."""
        parts = [layer.narrow(cut.dim, *self.span(layer.shape[cut.dim])) for layer in whole.chunk(cut.fused, cut.dim)]
        return parts[0] if cut.fused == 1 else torch.cat(parts, cut.dim)

    def gather(self, own: Tensor, cut: Cut) -> Tensor:
        """The whole of all ranks' parts; they all call it."""
        parts = []
        for rank, length in zip(self.ranks, self.lengths(cut), strict=True):
            shape = (*own.shape[: cut.dim], length, *own.shape[cut.dim + 1 :])
            parts.append(own.contiguous() if rank == self.transport.rank else own.new_empty(shape))
            self.transport.broadcast(parts[-1], self.ranks, source=rank)
        layers = zip(*(part.chunk(cut.fused, cut.dim) for part in parts), strict=True)
        return torch.cat([part for layer in layers for part in layer], cut.dim)


class Division(NamedTuple):
    """One division of a parameter: the ranks that share it out, and how."""

    group: CutGroup
    cut: Cut


Divisions = Sequence[Division]
"""Divisions of one parameter, each of what the one before it leaves to this rank; only the last has fused layers."""


def own_part(whole: Tensor, divisions: Divisions) -> Tensor:
    """This rank's part of a tensor."""
    for division in divisions:
        whole = division.group.own(whole, division.cut)
    return whole


def gathered(own: Tensor, divisions: Divisions) -> Tensor:
    """The whole of all ranks' parts; they all call it."""
    for division in reversed(divisions):
        own = division.group.gather(own, division.cut)
    return own


def whole_shape(local: torch.Size, divisions: Divisions) -> torch.Size:
    """The shape of a tensor of which this rank has a part of that shape."""
    shape = list(local)
    for division in divisions:
        shape[division.cut.dim] = division.cut.size
    return torch.Size(shape)
