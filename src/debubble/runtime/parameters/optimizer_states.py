"""Parameters, settings and states of a torch optimizer, and snapshots that roll a step back.

An AdamW step cannot be inverted exactly in floating point, so a step that may have to be rolled back copies what it
changes first: for AdamW 12 bytes per fp32 parameter (the parameter and two moments), on the parameter's device, which
is the host for host-stepped stages, and sharded with ZeRO.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from debubble.runtime.distributed.sharding import local_tensor


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def scale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Multiply the gradients of parameters, in place."""
    for parameter in parameters:
        if parameter.grad is not None and scale != 1.0:
            local_tensor(parameter.grad).mul_(scale)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group, such as its learning rate."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def change_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Set the settings of each parameter group."""
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)


class OptimizerSnapshot:
    """Copies that roll back the last step of one optimizer, bitwise; their buffers are reused for the next step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._copies: dict[Tensor, Tensor] = {}
        self._groups: list[dict[str, Any]] = []
        """Settings of each parameter group: all before the step, former values of changed ones after it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def save(self) -> None:
        """Before a step, copy every parameter that has a gradient, and its states."""
        parameters = [p for p in parameters_of(self._optimizer) if p.grad is not None]
        self._states = {p: dict(self._optimizer.state.get(p, {})) for p in parameters}
        states = [value for state in self._states.values() for value in state.values() if isinstance(value, Tensor)]
        changing = [local_tensor(tensor) for tensor in (*parameters, *states)]
        if [(t.shape, t.dtype) for t in changing] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = {t: torch.empty_like(t) for t in changing}
        else:
            self._copies = dict(zip(changing, self._copies.values(), strict=True))
        for tensor, copy in self._copies.items():
            copy.copy_(tensor)
        self._groups = [{k: copied(v) for k, v in group.items()} for group in settings_of(self._optimizer)]

    def end_step(self) -> None:
        """After a step, keep only settings that it changed, as learning rates may change before a rollback."""
        self._groups = [
            {name: value for name, value in before.items() if not _equal(value, group[name])}
            for before, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]

    def restore(self) -> None:
        """Roll the step back."""
        for tensor, copy in self._copies.items():
            tensor.copy_(copy)
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = state
        change_settings(self._optimizer, self._groups)


def copied(value: Any) -> Any:
    """A copy of a tensor; other values, which are never changed in place, themselves."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)
