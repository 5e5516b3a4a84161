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


def materialise(module: nn.Module, model: Any, *, prefix: str, seed: int, dtype: torch.dtype) -> None:
    """Bring a module of `model` from the meta device to the CPU, with initial weights of that dtype.

    `prefix`: of its names in the model.  Raises InputError if transformers leaves a value open.
    """
    module.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in _floats(module):
            tensor.fill_(torch.nan)
        for name, part in reversed(list(module.named_modules(prefix=prefix.removesuffix(".")))):
            with _Drawn(zlib.crc32(f"{seed} {name}".encode())):
                model._init_weights(part)
        if any(tensor.isnan().any() for tensor in _floats(module)):
            raise InputError(f"transformers does not say with what '{prefix}' starts, so it cannot be built piecewise.")
        for parameter in module.parameters():
            # Drawn in fp32 whatever the dtype, so that runs in other precisions start alike.
            parameter.data = parameter.data.to(dtype)


def _floats(module: nn.Module) -> list[Tensor]:
    return [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]


_DRAWING = {
    Tensor.normal_, Tensor.uniform_, Tensor.exponential_, torch.rand, torch.randn, nn.init.normal_, nn.init.uniform_,
    nn.init.kaiming_uniform_,
}  # fmt: skip


class _Drawn(TorchFunctionMode):
    """Where random numbers come from a seed, and torch's global generator is left alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function in _DRAWING:
            kwargs["generator"] = self._generator
        return function(*args, **kwargs)
