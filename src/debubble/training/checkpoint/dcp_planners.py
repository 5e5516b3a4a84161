"""Planners of torch.distributed.checkpoint for tensors of which every rank has parts (ZeRO's rows, shards).

A file says of each part where in the whole it lies; a rank that reads asks for its own parts, however the whole was
divided when it was written.
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
"""A rank's shard of each tensor, by name."""


PART_MARK = " of the part "
"""The word before the place of a part of a parameter, in the name of a state that belongs to this part alone."""


class OtherModelError(ValueError):
    """A checkpoint lacks a tensor, or has it in another shape."""


class OtherPartsError(ValueError):
    """A checkpoint lacks a state of a part of a parameter."""


def tensors(state: State) -> dict[str, Tensor]:
    """The rank's tensors, as a DCP state dict."""
    return {name: piece.tensor for name, piece in state.items()}


class SavePieces(DefaultSavePlanner):
    """Plans to write each tensor of the state dict as the blocks of a whole that `state` says it consists of."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> SavePlan:
        """Plan to write each block of this rank's tensors as an item of its own."""
        items = [_write_item(name, piece, block) for name, piece in self._state.items() for block in piece.blocks]
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the block of the copy that is being written."""
        # Of the copy that training does not change, not of the live tensor of `state`.
        return _block(self._state[index.fqn]._replace(tensor=self.state_dict[index.fqn]), index)


class LoadPieces(DefaultLoadPlanner):
    """Plans to read each tensor's blocks, whatever blocks were written."""

    def __init__(self, state: State) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> LoadPlan:
        """Plan to read every block of this rank's tensors.

        Raises OtherModelError if the checkpoint lacks a tensor or has it in another shape, OtherPartsError if it has a
        state of other parts of a parameter alone.
        """
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, piece in self._state.items():
            found = self.metadata.state_dict_metadata.get(name)
            if found is None and PART_MARK in name:
                raise OtherPartsError(name)
            if not isinstance(found, TensorStorageMetadata):
                raise OtherModelError(f"it has no '{name}'")
            if found.size != piece.shape:
                raise OtherModelError(f"'{name}' has shape {list(found.size)} there, {list(piece.shape)} here")
            items += create_read_items_for_chunk_list(name, found, [_chunk(block) for block in piece.blocks])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the block that is read into, a view of the live tensor."""
        return _block(self._state[index.fqn], index)


def _block(piece: TensorShard, index: MetadataIndex) -> Tensor:
    """The block of a piece that lies there in the whole."""
    return next(piece.block_view(block) for block in piece.blocks if index.offset == torch.Size(block.offsets))


def _chunk(block: ShardBlock) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(block.offsets), sizes=torch.Size(block.size))


def _write_item(name: str, piece: TensorShard, block: ShardBlock) -> WriteItem:
    chunk = _chunk(block)
    properties = dataclasses.replace(TensorProperties.create_from_tensor(piece.tensor), requires_grad=False)
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=piece.shape),
    )
