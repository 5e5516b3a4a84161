"""Where what a rank has of a tensor lies in the whole, when ranks divide it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from debubble.runtime.distributed.tensor_parallel import Cut, TensorGroup


class Block(NamedTuple):
    """Part of a tensor and where it lies in the whole that several ranks hold, per dimension."""

    start: tuple[int, ...]
    """In the rank's own tensor."""
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    """In the whole."""


class Piece(NamedTuple):
    """What this rank has of a tensor that several may hold parts of."""

    tensor: Tensor
    """The live one, detached."""
    shape: torch.Size
    """Of the whole."""
    blocks: tuple[Block, ...]
    """What the tensor consists of."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """All of it."""
        nowhere = (0,) * tensor.dim()
        return cls(tensor, tensor.shape, (Block(nowhere, tuple(tensor.shape), nowhere),))

    def of(self, block: Block) -> Tensor:
        """The block itself, live."""
        tensor = self.tensor
        for dim, (start, length) in enumerate(zip(block.start, block.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def blocks_of(local: torch.Size, cut: Cut | None, group: TensorGroup) -> Iterator[Block]:
    """Where the shard of a parameter lies in the whole: fused layers' parts lie apart."""
    nowhere = (0,) * len(local)
    if cut is None:
        yield Block(nowhere, tuple(local), nowhere)
        return
    layer = cut.size // cut.fused
    first, length = group.span(layer)
    before, after = nowhere[: cut.dim], nowhere[cut.dim + 1 :]
    size = (*local[: cut.dim], length, *local[cut.dim + 1 :])
    for k in range(cut.fused):
        yield Block((*before, k * length, *after), size, (*before, k * layer + first, *after))


def cropped(block: Block, rows: range) -> Block | None:
    """What of a shard's block lies in these rows of the shard, as part of the tensor that has these alone."""
    first = max(block.start[0], rows.start)
    length = min(block.start[0] + block.size[0], rows.stop) - first
    if length <= 0 or 0 in block.size:
        return None
    offset = block.offsets[0] + first - block.start[0]
    return Block((first - rows.start, *block.start[1:]), (length, *block.size[1:]), (offset, *block.offsets[1:]))
