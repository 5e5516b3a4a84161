"""Units whose linear layers are torch's own: what a runtime without debubble's operators would run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch.nn.functional as functional
from torch import Tensor

from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.distributed.transport import Alone
from debubble.runtime.models.units import UnitModule
from debubble.runtime.operators import Linear


class TorchsLayers(TensorGroup):
    """One rank, which multiplies by torch's linear layers."""

    def columns(self, x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
        """Apply layers to their common input."""
        return tuple(functional.linear(x, layer.weight, layer.bias) for layer in layers)

    def rows(self, x: Tensor, layer: Linear) -> Tensor:
        """Apply a layer."""
        return functional.linear(x, layer.weight, layer.bias)


def use_torchs_layers(units: Iterable[UnitModule]) -> None:
    """Let the units multiply by torch's linear layers, whose gradients are autograd's."""
    for unit in units:
        unit.group = TorchsLayers(Alone(), (0,))
