"""Parameters as torch's own tools see them: where ranks divide layers, DTensors, which know of the whole.

Optimizers, checkpoints and users see DTensors.  Units compute with the plain shards that these consist of: what a stage
keeps, drops, moves and leaves for later are storages, of which a DTensor has none of its own, and its dispatch takes
longer than a small operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

from debubble.runtime.distributed.tensor_parallel import Cut

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def show(own: nn.Parameter, shape: torch.Size, cut: Cut | None, mesh: DeviceMesh | None) -> nn.Parameter:
    """A rank's part of a parameter of that shape, cut over the mesh (None: the same on all ranks), as a DTensor.

    It has the storage of `own`.  Without a mesh, and of what the host steps for a GPU, it is `own` itself.
    """
    if mesh is None or mesh.device_type != own.device.type:
        return own
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    placement: Placement
    if cut is None:
        placement = Replicate()
    elif cut.fused == 1:
        placement = Shard(cut.dim)
    else:
        # Chunk i of each of the fused layers: what torch has it for is FSDP over tensor parallelism.
        placement = _StridedShard(cut.dim, split_factor=cut.fused)
    return nn.Parameter(_of(own.detach(), shape, mesh, placement), requires_grad=own.requires_grad)


def alike(shown: Tensor, own: Tensor) -> Tensor:
    """A rank's part of another tensor, such as the gradient, shown in the same way."""
    if not _is_dtensor(shown):
        return own
    return _of(own, shown.shape, shown.device_mesh, *shown.placements)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, live and detached."""
    tensor = tensor.detach()
    return tensor.to_local() if _is_dtensor(tensor) else tensor


def _is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    # The class itself takes a second to import, and most runs have no use for it.
    return hasattr(tensor, "device_mesh")


def _of(own: Tensor, shape: torch.Size, mesh: DeviceMesh, *placements: Placement) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)
