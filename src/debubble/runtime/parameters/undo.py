"""Copies that take an optimizer's step back, to the bit.

An AdamW step cannot be inverted exactly in floating point, so what it changes is copied before it: for AdamW 12 bytes
per fp32 parameter (the parameter and two moments), where the parameter is: on the host for a stage that the host
steps, divided over the replicas with ZeRO.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from debubble.runtime.distributed.dtensors import local


class Undo:
    """Takes back the last step of one optimizer.  Its buffers stay, for the next step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._copies: dict[Tensor, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def save(self) -> None:
        """Before a step: copy every parameter that has a gradient, and its states."""
        parameters = [p for p in parameters_of(self._optimizer) if p.grad is not None]
        self._states = {p: dict(self._optimizer.state.get(p, {})) for p in parameters}
        states = [value for state in self._states.values() for value in state.values() if isinstance(value, Tensor)]
        changing = [local(tensor) for tensor in (*parameters, *states)]
        if [(t.shape, t.dtype) for t in changing] != [(t.shape, t.dtype) for t in self._copies]:
            self._copies = {t: torch.empty_like(t) for t in changing}
        else:
            self._copies = dict(zip(changing, self._copies.values(), strict=True))
        for tensor, copy in self._copies.items():
            copy.copy_(tensor)

    def restore(self) -> None:
        """After the step: everything as it was before."""
        for tensor, copy in self._copies.items():
            tensor.copy_(copy)
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = state


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]
