"""Initial weights of transformers' modules: what transformers draws, from a seed and the module's name.

So any rank gets the values that the whole model has, whatever the partition.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from debubble.ir import InputError
from debubble.runtime.models.seeded_random import DRAWING, drawn


def materialise(module: nn.Module, model: Any, *, prefix: str, seed: int, dtype: torch.dtype) -> None:
    """Bring a module of `model` from the meta device to the CPU, with initial weights of that dtype.

    `prefix`: of its names in the model.  Raises InputError if transformers leaves a value open.
    """
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in _floats(module):
            tensor.fill_(torch.nan)
        for name, part in reversed(list(module.named_modules(prefix=prefix.removesuffix(".")))):
            with _NamedRandomness(f"{seed} {name}"):
                model._init_weights(part)
        if any(tensor.isnan().any() for tensor in _floats(module)):
            raise InputError(f"transformers does not say with what '{prefix}' starts, so it cannot be built piecewise.")
        for parameter in module.parameters():
            # Drawn in fp32 whatever the dtype, so that runs in other precisions start alike.
            parameter.data = parameter.data.to(dtype)


def _floats(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


class _NamedRandomness(TorchFunctionMode):
    """A mode in which random numbers come from a name, and torch's global generator is left alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._draws = name, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in DRAWING:
            return function(*args, **(kwargs or {}))
        self._draws += 1
        return drawn(function, args, kwargs or {}, seed=zlib.crc32(f"{self._name} {self._draws}".encode()))
