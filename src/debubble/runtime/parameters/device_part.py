"""The stages of one device of a plan with their parameters, by Hugging Face name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from debubble.ir import InputError
from debubble.runtime.distributed.sharding import TensorShard
from debubble.runtime.models.lora import Adapters
from debubble.runtime.models.nf4 import is_scales
from debubble.runtime.models.stage import Stage
from debubble.runtime.parameters.stage_parameters import StageWeights


@dataclass
class DevicePart:
    """The stages of one device with their parameters."""

    stages: dict[int, Stage] = field(default_factory=dict)
    weights: dict[int, StageWeights] = field(default_factory=dict)
    adapters: Adapters | None = None
    """LoRA adapters of the stages; None: all parameters are trained."""
    tied: tuple[str, str] | None = None
    """The names of the embedding's and the head's table, if they are tied."""

    @cached_property
    def masters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that an optimizer steps, by Hugging Face name; a table tied on this rank comes twice."""
        return {name: p for weights in self.weights.values() for name, p in weights.masters.items()}

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that an optimizer steps, each once."""
        return list(dict.fromkeys(p for p in self.masters.values() if p.requires_grad))

    def parameters_of(self, stage: int) -> list[nn.Parameter]:
        """The parameters that the optimizer of one stage steps."""
        return [p for p in self.weights[stage].masters.values() if p.requires_grad]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters by name, including frozen ones; a table that is tied on this rank comes once."""
        seen: set[nn.Parameter] = set()
        for name, parameter in self.masters.items():
            if parameter not in seen:
                seen.add(parameter)
                yield name, parameter

    def load_working(self) -> None:
        """Copy the masters to all working parameters, including those of host-stepped stages."""
        for weights in self.weights.values():
            weights.load_working()

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters in full; all ranks that shard them call it."""
        return {name: w.full_tensor(name) for w in self.weights.values() for name in w.masters if not is_scales(name)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load all parameters from a state, which may have more.  Raises InputError if it lacks one."""
        for name in self.masters:
            if is_scales(name):
                continue  # they come with their weight
            if name not in state:
                raise InputError(f"The state has no parameter '{name}'.")
            self.load(name, state[name])

    def load(self, name: str, full: Tensor) -> None:
        """Load a parameter from its full tensor."""
        self._weights_of(name).load(name, full)

    def shape_of(self, name: str) -> torch.Size:
        """Full shape of a parameter."""
        return self._weights_of(name).divisions[name].shape

    def shards(self) -> Iterator[tuple[str, nn.Parameter, TensorShard]]:
        """This rank's shard of every parameter; a tied table has the embedding's name."""
        first_name = {} if self.tied is None else {self.tied[1]: self.tied[0]}
        for weights in self.weights.values():
            for name, parameter in weights.masters.items():
                yield first_name.get(name, name), parameter, weights.divisions[name].shard()

    def _weights_of(self, name: str) -> StageWeights:
        return next(weights for weights in self.weights.values() if name in weights.masters)
