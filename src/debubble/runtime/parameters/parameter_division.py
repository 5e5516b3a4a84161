"""The sharding of one parameter of a stage: this rank's shard, and its place in the full tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from debubble.runtime.distributed.cuts import Cut, Divisions, full_shape, gather_full, local_shard
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.sharding import TensorShard, blocks_of, crop, dtensor_view
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.parameters.zero3 import ShardedParameter


class ParameterPair(NamedTuple):
    """A working parameter, which computes, and its master, which the optimizer steps; they may be the same."""

    working: nn.Parameter
    master: nn.Parameter
    replicas: Replicas
    """Ranks that have the same parameter, and may shard the master (ZeRO)."""
    sharded: ShardedParameter | None = None
    """The working parameter as replicas shard it (ZeRO-3); None if they do not."""

    @property
    def master_is_sharded(self) -> bool:
        """True if the master has this replica's rows only."""
        return self.sharded is not None or (self.replicas.shards_states and self.master.requires_grad)


@dataclass(frozen=True)
class ParameterDivision:
    """The sharding of a parameter by tensor and expert parallelism, and by its replicas.

    Args:
        pair: The working parameter and its master.
        group: The tensor-parallel ranks.
        divisions: Divisions of the stored tensor; for a quantised weight, of its codes.
        of_floats: Divisions of the unquantised tensor.
        local: Shape of this rank's shard of the unquantised tensor, before replicas shard it.
        scales: Hugging Face names of a quantised weight's scales.
    """

    pair: ParameterPair
    group: TensorGroup
    divisions: Divisions
    of_floats: Divisions
    local: torch.Size
    scales: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The full, unquantised shape."""
        return full_shape(self.local, self.of_floats)

    def local_shard(self, full: Tensor) -> Tensor:
        """This rank's shard of an unquantised tensor, before replicas shard it."""
        return local_shard(full, self.of_floats)

    def load(self, full: Tensor) -> None:
        """Load the master from a full tensor."""
        local = self.local_shard(full)
        with torch.no_grad():
            self.pair.master.copy_(self.pair.replicas.local_rows(local) if self.pair.master_is_sharded else local)

    def full_tensor(self) -> Tensor:
        """Gather the full tensor; all ranks that shard it call it.  If it is not sharded, this is the live master."""
        tensor = self.pair.master.detach()
        if self.pair.master_is_sharded:
            tensor = tensor.new_empty(self.pair.working.shape)
            self.pair.replicas.local_rows(tensor).copy_(self.pair.master)
            self.pair.replicas.gather(tensor)
        return gather_full(tensor, self.divisions)

    def shard(self) -> TensorShard:
        """This rank's shard of the master."""
        local = self.pair.working.shape
        blocks = blocks_of(local, self.divisions)
        if self.pair.master_is_sharded:
            rows = self.pair.replicas.row_range(local[0])
            blocks = [cropped for block in blocks if (cropped := crop(block, rows)) is not None]
        return TensorShard(self.pair.master.detach(), full_shape(local, self.divisions), tuple(blocks))

    @property
    def counts_in_norm(self) -> bool:
        """True if the gradient counts in this rank's norm: a replicated one counts on the first rank only."""
        replicas = self.pair.replicas
        return (self._cut is not None or self.group.group_rank == 0) and (replicas.shards_states or replicas.first)

    def optimizer_view(self) -> nn.Parameter:
        """The master as a DTensor over the tensor-parallel group."""
        pair, cut, shape = self.pair, self._cut, list(self.pair.working.shape)
        if cut is not None:
            shape[cut.dim] = cut.size
        if pair.master_is_sharded:
            shape[0] = len(pair.master)
            if cut is not None and cut.dim == 0:
                shape[0] = sum(len(pair.replicas.row_range(length)) for length in self.group.lengths(cut))
                cut = Cut(0, shape[0])
        return dtensor_view(pair.master, torch.Size(shape), cut, self.group.mesh)

    @property
    def _cut(self) -> Cut | None:
        """The tensor-parallel cut of the parameter; None if it is replicated."""
        return next((division.cut for division in self.divisions if division.group is self.group), None)
