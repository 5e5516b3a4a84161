"""The parameters of one stage: those that compute, their masters, and where gradients add up.

A stage computes with *working* parameters in the run's dtype.  The optimizer sees *masters*: the same tensors in fp32
or fp64; for bf16, fp32 copies.  Gradients of bf16 parameters are taken after every backward and summed in fp32.
A stage whose step is the host's has its masters there: D brings the gradients down, P the parameters up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from debubble.ir import Op
from debubble.runtime.operators import add_gradient
from debubble.runtime.units import Unit

Sums = list[Tensor | None]
"""Gradients in the order of a stage's parameters; None where there is none yet."""


class Working:
    """Makes the working parameter of each master; a table that two units share stays one."""

    def __init__(self, dtype: torch.dtype, on: torch.device) -> None:
        self._dtype, self._on = dtype, on
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, master: nn.Parameter, *, on_host: bool) -> nn.Parameter:
        if master not in self._made:
            if not on_host:
                master.data = master.data.to(self._on)
            same = master.dtype == self._dtype and not on_host
            copy = master.detach().to(self._on, self._dtype, copy=True)
            self._made[master] = master if same else nn.Parameter(copy, requires_grad=master.requires_grad)
        return self._made[master]


class StageWeights:
    """The master parameters of one stage by their Hugging Face names, and what stands for them in its units."""

    def __init__(self, units: Sequence[Unit], working: Working, *, on_host: bool) -> None:
        self.masters: Mapping[str, nn.Parameter] = {n: p for unit in units for n, p in unit.hf_parameters().items()}
        for module in (module for unit in units for module in unit.modules()):
            for name, master in module.named_parameters(recurse=False):
                setattr(module, name, working.of(master, on_host=on_host))
        masters = dict.fromkeys(p for p in self.masters.values() if p.requires_grad)
        self._pairs = [(working.of(p, on_host=on_host), p) for p in masters]
        self.on_host = on_host
        self._sums: Sums = [None] * len(self._pairs)
        self._aside: dict[Op, Sums] = {}
        self._reduced: Sums = [None] * len(self._pairs)

    def refresh(self) -> None:
        """Give the working parameters the masters' values; a host's wait for P."""
        if not self.on_host:
            self.load()

    def load(self) -> None:
        """P, or the refresh of copies on the device."""
        with torch.no_grad():
            for working, master in self._pairs:
                if working is not master:
                    working.copy_(master, non_blocking=True)

    def collect(self) -> None:
        """After a backward: sum what it gave to working copies in the masters' dtype."""
        for index, (working, master) in enumerate(self._pairs):
            if working is not master and working.grad is not None:
                self._sums[index] = _plus(self._sums[index], working.grad.to(master.dtype))
                working.grad = None

    def set_aside(self, op: Op) -> None:
        """Before G or D: the gradients up to here are its own; later backwards start from nothing."""
        self._aside[op] = self._take()

    def reduce(self, op: Op, all_reduce: Callable[[Tensor], None]) -> None:
        """G: sum what was set aside over the data-parallel ranks."""
        self._reduce(self._aside.pop(op), all_reduce)

    def bring_down(self, op: Op, all_reduce: Callable[[Tensor], None]) -> None:
        """D: the gradients, reduced, to the host's masters."""
        if op in self._aside:
            self.reduce(op, all_reduce)
        self._give()

    def finish(self, all_reduce: Callable[[Tensor], None]) -> None:
        """The step is over: the masters have the whole gradient, reduced."""
        self._reduce(self._take(), all_reduce)
        self._give()

    def _take(self) -> Sums:
        taken: Sums = []
        for index, (working, master) in enumerate(self._pairs):
            if working is master:
                taken.append(working.grad)
                working.grad = None
            else:
                taken.append(self._sums[index])
                self._sums[index] = None
        return taken

    def _reduce(self, gradients: Sums, all_reduce: Callable[[Tensor], None]) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                all_reduce(gradient)
                self._reduced[index] = _plus(self._reduced[index], gradient)

    def _give(self) -> None:
        for index, (_, master) in enumerate(self._pairs):
            gradient = self._reduced[index]
            if gradient is not None:
                add_gradient(master, gradient.to(master.device))
                self._reduced[index] = None


def _plus(total: Tensor | None, gradient: Tensor) -> Tensor:
    return gradient if total is None else total.add_(gradient)
