"""Tensor parallelism: the ranks of a group shard the linear layers of every unit (Shoeybi et al. 2019, Megatron-LM).

A column-parallel layer is followed by a row-parallel one: between them each rank has its own heads or features, and the
results are summed over the ranks.  Everything else is replicated.  Units hold local shards only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from debubble.runtime.distributed.cuts import Cut, CutGroup
from debubble.runtime.distributed.transport import SingleProcessTransport
from debubble.runtime.operators import Linear, call, deferrable_linear

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class TensorGroup(CutGroup):
    """The ranks that shard a stage, as seen by one of them."""

    mesh: DeviceMesh | None = None
    """torch's device mesh of the ranks."""

    def sum(self, tensor: Tensor) -> Tensor:
        """All-reduce (sum) the tensor over the group, in place."""
        self.transport.all_reduce(tensor, self.ranks)
        return tensor

    def copy_to_group(self, x: Tensor) -> Tensor:
        """Identity in the forward, all-reduce of the gradient in the backward."""
        return x if self.size == 1 else call(_CopyToGroup, x, self)

    def reduce_from_group(self, x: Tensor) -> Tensor:
        """All-reduce in the forward, identity in the backward."""
        return x if self.size == 1 else call(_ReduceFromGroup, x, self)

    def column_parallel(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Apply column-parallel layers to their common input: the outputs are sharded."""
        multiplications = [layer.multiplication(layer.bias) for layer in layers]
        results = deferrable_linear(self.copy_to_group(x), multiplications, weight_grads=layers[0].weight_grads)
        return tuple(self._adapted(x, y, layer) for y, layer in zip(results, layers, strict=True))

    def row_parallel(self, x: Tensor, layer: Linear) -> Tensor:
        """Apply a row-parallel layer to sharded inputs: the output is replicated."""
        if self.size == 1:
            y: Tensor = layer(x)
            return y
        (y,) = deferrable_linear(x, [layer.multiplication(None)], weight_grads=layer.weight_grads)
        y = self.reduce_from_group(y)
        if layer.lora_A is not None and layer.lora_B is not None:
            y = torch.add(y, layer.lora_B(self.reduce_from_group(layer.lora_A(x))), alpha=layer.scaling)
        return y if layer.bias is None else y + layer.bias

    def _adapted(self, x: Tensor, y: Tensor, layer: Linear) -> Tensor:
        """The result of a column-parallel layer plus that of its adapter."""
        if layer.lora_A is None or layer.lora_B is None:
            return y
        # A is replicated, so its result is copied to the shards of B.
        return torch.add(y, layer.lora_B(self.copy_to_group(layer.lora_A(x))), alpha=layer.scaling)


NO_TENSOR_GROUP = TensorGroup(SingleProcessTransport(), (0,))


def column_cuts(layer: nn.Module, fused: int = 1) -> Mapping[str, Cut]:
    """Cuts of the parameters of a column-parallel layer, by outputs (of an embedding, by rows)."""
    weight = int(isinstance(layer, Linear) and layer.transposed)
    return _cuts(layer, {"weight": weight, "bias": 0, "lora_B.weight": 0}, fused)


def row_cuts(layer: nn.Module) -> Mapping[str, Cut]:
    """Cuts of the parameters of a row-parallel linear layer, by inputs."""
    weight = 1 - int(isinstance(layer, Linear) and layer.transposed)
    return _cuts(layer, {"weight": weight, "lora_A.weight": 1})


def _cuts(layer: nn.Module, dims: Mapping[str, int], fused: int = 1) -> Mapping[str, Cut]:
    parameters = dict(layer.named_parameters())
    return {name: Cut(dim, parameters[name].shape[dim], fused) for name, dim in dims.items() if name in parameters}


class _CopyToGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.sum(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _ReduceFromGroup(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.sum(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
