"""Initial weights of transformers' modules, by transformers' initialisation, with random numbers seeded per module.

Seeds depend on the run's seed and the module's name, so initial weights do not depend on the partition.
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
"""Lock for building and initialising modules by transformers, which patches `torch.nn.init` globally."""


def materialise(module: nn.Module, model: Any, *, prefix: str, seed: int, dtype: torch.dtype) -> None:
    """Materialise a module of `model` from the meta device on the CPU, with initial weights in `dtype`.

    Tensors with values, such as computed buffers, keep them.  `prefix`: prefix of the module's names in the model.
    Raises InputError if transformers does not initialise a value.
    """
    computed = {name: tensor.detach().clone() for name, tensor in _named_tensors(module) if not tensor.is_meta}
    module.to_empty(device="cpu")
    with INITIALISING, torch.no_grad():
        for name, tensor in _named_tensors(module):
            if name in computed:
                tensor.copy_(computed[name])
            elif tensor.is_floating_point():
                tensor.fill_(torch.nan)
        for name, submodule in reversed(list(module.named_modules(prefix=prefix.removesuffix(".")))):
            # A module's initialisation may access children that are in other units.
            with _NamedRandomness(f"{seed} {name}"), suppress(AttributeError):
                model._init_weights(submodule)
        for name, tensor in _named_tensors(module):
            if tensor.is_floating_point() and tensor.isnan().any():
                raise InputError(
                    f"transformers does not say with what '{prefix}{name}' starts, so it cannot be built piecewise."
                )
        for parameter in module.parameters():
            # Drawn in fp32 for any dtype, so that runs in all precisions start from the same values.
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class _NamedRandomness(TorchFunctionMode):
    """A mode in which random numbers are seeded by a name, and torch's global generator is not used."""

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
"""Random functions that take a generator."""


def _drawn(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """Call a random function with a generator of this seed."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    if function in _LIKE:
        return _LIKE[function](torch.empty_like(*args, **kwargs), generator=generator)
    return function(*args, **{**kwargs, "generator": generator})
