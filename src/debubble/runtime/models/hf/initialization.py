"""Initial weights of transformers' modules: what transformers draws, from a seed and the module's name.

So any rank gets the values that the whole model has, whatever the partition.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from debubble.ir import InputError

INITIALISING = Lock()
"""Held while transformers builds or initialises modules: building replaces functions of `torch.nn.init` everywhere."""


def materialise(module: nn.Module, model: Any, *, prefix: str, seed: int, dtype: torch.dtype) -> None:
    """Bring a module of `model` from the meta device to the CPU, with initial weights of that dtype.

    What the model has computed, as buffers, stays.  `prefix`: of its names in the model.  Raises InputError if
    transformers leaves a value open.
    """
    computed = {name: tensor.detach().clone() for name, tensor in _named_tensors(module) if not tensor.is_meta}
    module.to_empty(device="cpu")
    with INITIALISING, torch.no_grad():
        for name, tensor in _named_tensors(module):
            if name in computed:
                tensor.copy_(computed[name])
            elif tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for name, part in reversed(list(module.named_modules(prefix=prefix.removesuffix(".")))):
            # A part may initialise modules inside it, of which other units have some.
            with _NamedRandomness(f"{seed} {name}"), suppress(AttributeError):
                model._init_weights(part)
        for name, tensor in _named_tensors(module):
            if tensor.is_floating_point() and tensor.isnan().any():
                raise InputError(
                    f"transformers does not say with what '{prefix}{name}' starts, so it cannot be built piecewise."
                )
        for parameter in module.parameters():
            # Drawn in fp32 whatever the dtype, so that runs in other precisions start alike.
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class _NamedRandomness(TorchFunctionMode):
    """A mode in which random numbers come from a name, and torch's global generator is left alone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._draws = name, 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in _DRAWING:
            return function(*args, **(kwargs or {}))
        self._draws += 1
        return _drawn(function, args, kwargs or {}, seed=zlib.crc32(f"{self._name} {self._draws}".encode()))


_LIKE: Mapping[Any, Any] = {torch.rand_like: Tensor.uniform_, torch.randn_like: Tensor.normal_}
_DRAWING = frozenset(
    (
        Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, torch.bernoulli, torch.rand,
        torch.randn, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, *_LIKE,
    )
)  # fmt: skip
"""The functions whose random numbers are replaced."""


def _drawn(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """Call one of them with a generator of that seed, on the device where the numbers are to be."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    if function in _LIKE:
        return _LIKE[function](torch.empty_like(*args, **kwargs), generator=generator)
    return function(*args, **{**kwargs, "generator": generator})
