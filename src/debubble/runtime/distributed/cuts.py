"""Sharding of parameters over the ranks of a group, along one dimension."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from debubble.runtime.distributed.transport import RankGroup


@dataclass(frozen=True)
class Cut:
    """How a parameter is sharded: along which dimension, like DTensor's `Shard`, with fused layers."""

    dim: int
    size: int
    """Size of the full tensor in that dimension."""
    fused: int = 1
    """Number of layers concatenated in that dimension; each is sharded separately."""


@dataclass(frozen=True)
class CutGroup(RankGroup):
    """The ranks that shard parameters."""

    def span(self, size: int, group_rank: int | None = None) -> tuple[int, int]:
        """Start and length of a rank's shard (default: this rank's) of `size` rows; the last may have fewer."""
        max_length = -(-size // self.size)
        start = min(max_length * (self.group_rank if group_rank is None else group_rank), size)
        return start, min(max_length, size - start)

    def lengths(self, cut: Cut) -> list[int]:
        """Length of each rank's shard in the dimension of the cut."""
        return [cut.fused * self.span(cut.size // cut.fused, rank)[1] for rank in range(self.size)]

    def local_shard(self, full: Tensor, cut: Cut) -> Tensor:
        """This rank's shard of a full tensor: a view, unless layers are fused."""
        shards = [layer.narrow(cut.dim, *self.span(layer.shape[cut.dim])) for layer in full.chunk(cut.fused, cut.dim)]
        return shards[0] if cut.fused == 1 else torch.cat(shards, cut.dim)

    def gather(self, local: Tensor, cut: Cut) -> Tensor:
        """The full tensor of all ranks' shards; all ranks call it."""
        shards = []
        for rank, length in zip(self.ranks, self.lengths(cut), strict=True):
            shape = (*local.shape[: cut.dim], length, *local.shape[cut.dim + 1 :])
            shards.append(local.contiguous() if rank == self.transport.rank else local.new_empty(shape))
            self.transport.broadcast(shards[-1], self.ranks, source=rank)
        layers = zip(*(shard.chunk(cut.fused, cut.dim) for shard in shards), strict=True)
        return torch.cat([shard for layer in layers for shard in layer], cut.dim)


class Division(NamedTuple):
    """One level of sharding of a parameter: the group, and the cut among its ranks."""

    group: CutGroup
    cut: Cut


Divisions = Sequence[Division]
"""Nested sharding of one parameter: each division shards the local result of the one before; only the last is fused."""


def local_shard(full: Tensor, divisions: Divisions) -> Tensor:
    """This rank's shard of a full tensor."""
    for division in divisions:
        full = division.group.local_shard(full, division.cut)
    return full


def gather_full(local: Tensor, divisions: Divisions) -> Tensor:
    """The full tensor of all ranks' shards; all ranks call it."""
    for division in reversed(divisions):
        local = division.group.gather(local, division.cut)
    return local


def full_shape(local: torch.Size, divisions: Divisions) -> torch.Size:
    """The full shape of a tensor, from the shape of this rank's shard."""
    shape = list(local)
    for division in divisions:
        shape[division.cut.dim] = division.cut.size
    return torch.Size(shape)
