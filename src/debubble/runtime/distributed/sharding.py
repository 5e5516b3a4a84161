"""The part of a tensor that a rank holds, as blocks of the whole and as torch's DTensor.

Optimizers, checkpoints and users see DTensors where ranks divide layers.  Units compute with the plain shards that
these consist of: a stage keeps, drops, moves and defers storages, of which a DTensor has none of its own, and its
dispatch takes longer than a small operator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from debubble.runtime.distributed.cuts import Cut, CutGroup, Divisions
from debubble.runtime.torch_internals import strided_shard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


class ShardBlock(NamedTuple):
    """A block of a shard and where it lies in the whole, per dimension."""

    start: tuple[int, ...]
    """Place in the rank's own tensor."""
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    """Place in the whole tensor."""


class TensorShard(NamedTuple):
    """This rank's part of a tensor that several may divide."""

    tensor: Tensor
    """The live one, detached."""
    shape: torch.Size
    """Shape of the whole."""
    blocks: tuple[ShardBlock, ...]
    """Blocks of the whole that the tensor consists of."""

    @classmethod
    def whole(cls, tensor: Tensor) -> TensorShard:
        """The shard of a tensor that no rank divides."""
        nowhere = (0,) * tensor.dim()
        return cls(tensor, tensor.shape, (ShardBlock(nowhere, tuple(tensor.shape), nowhere),))

    def of(self, block: ShardBlock) -> Tensor:
        """The block itself, live."""
        tensor = self.tensor
        for dim, (start, length) in enumerate(zip(block.start, block.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def blocks_of(local: torch.Size, divisions: Divisions) -> list[ShardBlock]:
    """The blocks of the whole that the shard of a parameter consists of: fused layers' parts lie apart."""
    nowhere = (0,) * len(local)
    blocks = [ShardBlock(nowhere, tuple(local), nowhere)]
    for group, cut in reversed(divisions):
        blocks = [part for block in blocks for part in _parts(block, group, cut)]
    return blocks


def _parts(block: ShardBlock, group: CutGroup, cut: Cut) -> Iterator[ShardBlock]:
    """A block of what a rank has of something, as blocks of the whole, of which each of the fused layers has one."""
    layer = cut.size // cut.fused
    first, length = group.span(layer)
    for k in range(cut.fused):
        size = length if cut.fused > 1 else block.size[cut.dim]
        yield ShardBlock(
            _shift(block.start, cut.dim, k * length),
            _with(block.size, cut.dim, size),
            _shift(block.offsets, cut.dim, k * layer + first),
        )


def _shift(place: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return _with(place, dim, place[dim] + by)


def _with(place: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*place[:dim], value, *place[dim + 1 :])


def crop(block: ShardBlock, rows: range) -> ShardBlock | None:
    """The part of a block that lies in these rows of its shard, as a block of the tensor that has these rows alone."""
    first = max(block.start[0], rows.start)
    length = min(block.start[0] + block.size[0], rows.stop) - first
    if length <= 0 or 0 in block.size:
        return None
    offset = block.offsets[0] + first - block.start[0]
    return ShardBlock((first - rows.start, *block.start[1:]), (length, *block.size[1:]), (offset, *block.offsets[1:]))


def dtensor_view(own: nn.Parameter, shape: torch.Size, cut: Cut | None, mesh: DeviceMesh | None) -> nn.Parameter:
    """A rank's part of a parameter of that shape, cut over the mesh (None: the same on all ranks), as a DTensor.

    It has the storage of `own`.  Without a mesh, and of what the host steps for a GPU, it is `own` itself.
    """
    if mesh is None or mesh.device_type != own.device.type:
        return own
    from torch.distributed.tensor import Replicate, Shard

    placement: Placement
    if cut is None:
        placement = Replicate()
    elif cut.fused == 1:
        placement = Shard(cut.dim)
    else:
        # Chunk i of each of the fused layers: what torch has it for is FSDP over tensor parallelism.
        placement = strided_shard(cut.dim, parts=cut.fused)
    return nn.Parameter(_dtensor(own.detach(), shape, mesh, placement), requires_grad=own.requires_grad)


def viewed_like(view: Tensor, own: Tensor) -> Tensor:
    """A rank's part of another tensor, such as the gradient, as a DTensor if `view` is one."""
    if not _is_dtensor(view):
        return own
    return _dtensor(own, view.shape, view.device_mesh, *view.placements)


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, live and detached."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def local_bytes(tensor: Tensor) -> int:
    """The bytes of this rank's part of a tensor."""
    return tensor.to_local().nbytes if _is_dtensor(tensor) else tensor.nbytes


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that one of a class of its own consists of, such as codes and scales; none of a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    # The class itself takes a second to import, and most runs have no use for it.
    return hasattr(tensor, "device_mesh")


def _dtensor(own: Tensor, shape: torch.Size, mesh: DeviceMesh, *placements: Placement) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
