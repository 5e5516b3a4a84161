"""One parameter of a stage as ranks divide it: this rank's part, and where that lies in the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from debubble.runtime.distributed.cuts import Cut, Divisions, gathered, own_part, whole_shape
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.sharding import TensorShard, blocks_of, crop, dtensor_view
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.parameters.zero3 import DividedParameter


class ParameterPair(NamedTuple):
    """A parameter that computes, and the one that the optimizer steps for it; they may be one."""

    working: nn.Parameter
    master: nn.Parameter
    replicas: Replicas
    """Ranks that have the same parameter, and may divide the master (ZeRO)."""
    gathering: DividedParameter | None = None
    """The working parameter as the replicas divide it (ZeRO-3), if they do."""

    @property
    def divided(self) -> bool:
        """True if the master has this replica's rows alone."""
        return self.gathering is not None or (self.replicas.divided and self.master.requires_grad)


@dataclass(frozen=True)
class ParameterDivision:
    """A parameter's divisions: by the ranks of a device, of experts, and by its replicas.

    Args:
        pair: The working parameter and its master.
        group: The ranks that divide the stage.
        divisions: Those of the tensor that is kept: of a quantised weight, of its codes.
        of_floats: Those of the floats.
        local: The shape of the floats that this rank has, before replicas divide them.
        scales: Hugging Face's names of a quantised weight's scales.
    """

    pair: ParameterPair
    group: TensorGroup
    divisions: Divisions
    of_floats: Divisions
    local: torch.Size
    scales: tuple[str, ...] = ()

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole, in floats."""
        return whole_shape(self.local, self.of_floats)

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of floats, before replicas divide it."""
        return own_part(whole, self.of_floats)

    def load(self, whole: Tensor) -> None:
        """Give the master the values of a whole tensor."""
        own = self.own(whole)
        with torch.no_grad():
            self.pair.master.copy_(self.pair.replicas.own(own) if self.pair.divided else own)

    def whole(self) -> Tensor:
        """The whole of a tensor of which ranks have parts; they all call it.  The live master, unless it is divided."""
        tensor = self.pair.master.detach()
        if self.pair.divided:
            tensor = tensor.new_empty(self.pair.working.shape)
            self.pair.replicas.own(tensor).copy_(self.pair.master)
            self.pair.replicas.gather(tensor)
        return gathered(tensor, self.divisions)

    def shard(self) -> TensorShard:
        """This rank's part of the master, and where it lies in the whole."""
        local = self.pair.working.shape
        blocks = blocks_of(local, self.divisions)
        if self.pair.divided:
            rows = self.pair.replicas.rows(local[0])
            blocks = [block for whole in blocks if (block := crop(whole, rows)) is not None]
        return TensorShard(self.pair.master.detach(), whole_shape(local, self.divisions), tuple(blocks))

    @property
    def counts_in_norm(self) -> bool:
        """True if a gradient counts here in the norm: one that several ranks share does on the first of them."""
        replicas = self.pair.replicas
        return (self._cut is not None or self.group.part == 0) and (replicas.divided or replicas.first)

    def optimizer_view(self) -> nn.Parameter:
        """The master as a part of what all ranks of the group have of the parameter."""
        pair, cut, shape = self.pair, self._cut, list(self.pair.working.shape)
        if cut is not None:
            shape[cut.dim] = cut.size
        if pair.divided:
            shape[0] = len(pair.master)
            if cut is not None and cut.dim == 0:
                shape[0] = sum(len(pair.replicas.rows(length)) for length in self.group.lengths(cut))
                cut = Cut(0, shape[0])
        return dtensor_view(pair.master, torch.Size(shape), cut, self.group.mesh)

    @property
    def _cut(self) -> Cut | None:
        """The cut by which the group divides the parameter, if it does."""
        return next((division.cut for division in self.divisions if division.group is self.group), None)
