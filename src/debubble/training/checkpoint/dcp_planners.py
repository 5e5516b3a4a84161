"""Planners of torch.distributed.checkpoint for sharded tensors (ZeRO's rows, tensor-parallel shards).

Files record the offsets of each block in the full tensor; a rank reads its own blocks, however the tensor was sharded
when it was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from debubble.runtime.distributed.sharding import ShardBlock, TensorShard

State = Mapping[str, TensorShard]
"""Name of a tensor -> this rank's shard."""


PART_MARK = " of the part "
"""Separator in the name of a state that belongs to one shard of a parameter only, before the shard's offsets."""


class WrongModelError(ValueError):
    """A checkpoint lacks a tensor, or has it in another shape."""


class ReshardError(ValueError):
    """A checkpoint lacks a state that belongs to one shard of a parameter."""


def tensors(state: State) -> dict[str, Tensor]:
    """The rank's tensors, as a DCP state dict."""
    return {name: shard.tensor for name, shard in state.items()}


class ShardSavePlanner(DefaultSavePlanner):
    """Plans to write each tensor of the state dict as the blocks of its shard in `state`."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> SavePlan:
        """Plan to write each block of this rank's tensors as a separate item."""
        items = [_write_item(name, shard, block) for name, shard in self._state.items() for block in shard.blocks]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the block of the copy that is being written, not of the live tensor in `state`."""
        return _block(self._state[index.fqn]._replace(tensor=self.state_dict[index.fqn]), index)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans to read each tensor's blocks, regardless of the sharding in the checkpoint."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> LoadPlan:
        """Plan to read every block of this rank's tensors.

        Raises WrongModelError if the checkpoint lacks a tensor or has it in another shape, ReshardError if a
        state was written for other shards of a parameter.
        """
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, shard in self._state.items():
            entry = self.metadata.state_dict_metadata.get(name)
            if entry is None and PART_MARK in name:
                raise ReshardError(name)
            if not isinstance(entry, TensorStorageMetadata):
                raise WrongModelError(f"it has no '{name}'")
            if entry.size != shard.shape:
                raise WrongModelError(f"'{name}' has shape {list(entry.size)} there, {list(shard.shape)} here")
            items += create_read_items_for_chunk_list(name, entry, [_chunk(block) for block in shard.blocks])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the target block, a view of the live tensor."""
        return _block(self._state[index.fqn], index)


def _block(shard: TensorShard, index: MetadataIndex) -> Tensor:
    """The block of a shard at the offset of the index."""
    return next(shard.block_view(block) for block in shard.blocks if index.offset == torch.Size(block.offsets))


def _chunk(block: ShardBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.size))


def _write_item(name: str, shard: TensorShard, block: ShardBlock) -> WriteItem:
    chunk = _chunk(block)
    properties = dataclasses.replace(TensorProperties.create_from_tensor(shard.tensor), requires_grad=False)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shard.shape),
    )
