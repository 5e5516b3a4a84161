"""Random numbers that follow from a seed, where modules would take them from torch's global generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_LIKE: Mapping[Any, Any] = {torch.rand_like: Tensor.uniform_, torch.randn_like: Tensor.normal_}
DRAWING = frozenset(
    (
        Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.bernoulli_, torch.bernoulli, torch.rand,
        torch.randn, nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_, *_LIKE,
    )
)  # fmt: skip
"""The functions whose random numbers are replaced."""


def drawn(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, seed: int) -> Any:
    """Call one of them with a generator of that seed, on the device where the numbers are to be."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device") or "cpu")
    generator = torch.Generator(device=device).manual_seed(seed)
    if function in _LIKE:
        return _LIKE[function](torch.empty_like(*args, **kwargs), generator=generator)
    return function(*args, **{**kwargs, "generator": generator})
