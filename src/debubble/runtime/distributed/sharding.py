"""A rank's shard of a tensor, as blocks of the full tensor and as torch's DTensor.

Optimizers, checkpoints and users see DTensors under tensor parallelism.  Units compute with the local tensors: a stage
saves, drops and offloads storages, which a DTensor does not own, and DTensor dispatch takes longer than a small
operator.
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
    """A block of a shard and its offsets in the full tensor, per dimension."""

    start: tuple[int, ...]
    """Offsets in the rank's local tensor."""
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    """Offsets in the full tensor."""


class TensorShard(NamedTuple):
    """This rank's shard of a tensor."""

    tensor: Tensor
    """The local tensor, live and detached."""
    shape: torch.Size
    """Shape of the full tensor."""
    blocks: tuple[ShardBlock, ...]
    """Blocks of the full tensor that the local one consists of."""

    @classmethod
    def unsharded(cls, tensor: Tensor) -> TensorShard:
        """The shard of a tensor that is not sharded."""
        origin = (0,) * tensor.dim()
        return cls(tensor, tensor.shape, (ShardBlock(origin, tuple(tensor.shape), origin),))

    def block_view(self, block: ShardBlock) -> Tensor:
        """A view of a block, live."""
        tensor = self.tensor
        for dim, (start, length) in enumerate(zip(block.start, block.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


def blocks_of(local: torch.Size, divisions: Divisions) -> list[ShardBlock]:
    """The blocks of the full tensor that a rank's shard consists of: one per fused layer."""
    origin = (0,) * len(local)
    blocks = [ShardBlock(origin, tuple(local), origin)]
    for group, cut in reversed(divisions):
        blocks = [piece for block in blocks for piece in _split_block(block, group, cut)]
    return blocks


def _split_block(block: ShardBlock, group: CutGroup, cut: Cut) -> Iterator[ShardBlock]:
    """Map a block of a rank's shard to blocks of the tensor before the cut, one per fused layer."""
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
    """The part of a block within these rows of its shard, as a block of the tensor of these rows."""
    first = max(block.start[0], rows.start)
    length = min(block.start[0] + block.size[0], rows.stop) - first
    if length <= 0 or 0 in block.size:
        return None
    offset = block.offsets[0] + first - block.start[0]
    return ShardBlock((first - rows.start, *block.start[1:]), (length, *block.size[1:]), (offset, *block.offsets[1:]))


def dtensor_view(local: nn.Parameter, shape: torch.Size, cut: Cut | None, mesh: DeviceMesh | None) -> nn.Parameter:
    """A DTensor parameter of the full shape on a local one's storage, sharded by the cut (None: replicated).

    Returns `local` itself without a mesh, and for parameters of a GPU stage whose optimizer runs on the host.
    """
    if mesh is None or mesh.device_type != local.device.type:
        return local
    from torch.distributed.tensor import Replicate, Shard

    placement: Placement
    if cut is None:
        placement = Replicate()
    elif cut.fused == 1:
        placement = Shard(cut.dim)
    else:
        # Chunk i of every fused layer.  torch has this placement for FSDP over tensor parallelism.
        placement = strided_shard(cut.dim, parts=cut.fused)
    return nn.Parameter(_dtensor(local.detach(), shape, mesh, placement), requires_grad=local.requires_grad)


def viewed_like(view: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor, such as a gradient, as a DTensor like `view`, if that is one."""
    if not _is_dtensor(view):
        return local
    return _dtensor(local, view.shape, view.device_mesh, *view.placements)


def local_tensor(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, or a plain tensor itself: live and detached."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def local_bytes(tensor: Tensor) -> int:
    """Bytes of the local tensor."""
    return tensor.to_local().nbytes if _is_dtensor(tensor) else tensor.nbytes


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The inner tensors of a wrapper subclass, such as codes and scales; none for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [] if flatten is None else [getattr(tensor, name) for name in flatten()[0]]


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    # Importing the class takes a second, and most runs do not need it.
    return hasattr(tensor, "device_mesh")


def _dtensor(local: Tensor, shape: torch.Size, mesh: DeviceMesh, *placements: Placement) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
