"""The parameters of one stage: those that compute, their masters, and where gradients add up.

A stage computes with *working* parameters in the run's dtype.  The optimizer sees *masters*: the same tensors in fp32
or fp64; for bf16, fp32 copies.  Gradients of bf16 parameters are taken after every backward and summed in fp32.
A stage whose step is the host's has its masters there: D brings the gradients down, P the parameters up.
Where replicas divide the optimizer states (ZeRO), a master is this replica's rows of the parameter.  Where the ranks of
a device divide the parameter, the optimizer sees the master as a DTensor (see dtensors.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from debubble.ir import Op
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.sharding import Piece, alike, blocks_of, cropped, show
from debubble.runtime.distributed.tensor_parallel import ALONE, Cut, TensorGroup
from debubble.runtime.models.operators import add_gradient
from debubble.runtime.models.units import Unit
from debubble.runtime.streams import used_here

Sums = list[Tensor | None]
"""Gradients in the order of a stage's parameters; None where there is none yet."""


class Pair(NamedTuple):
    """A parameter that computes, and the one that the optimizer steps for it."""

    working: nn.Parameter
    master: nn.Parameter


class Working:
    """Makes the working and the master parameter of each parameter; a table that two units share stays one."""

    def __init__(self, dtype: torch.dtype, on: torch.device, replicas: Replicas) -> None:
        self._dtype, self._on, self.replicas = dtype, on, replicas
        self._made: dict[nn.Parameter, Pair] = {}
        self.shown: dict[nn.Parameter, nn.Parameter] = {}
        """What the optimizer sees of each master."""

    def of(self, parameter: nn.Parameter, *, on_host: bool) -> Pair:
        if parameter not in self._made:
            self._made[parameter] = self._make(parameter, on_host=on_host)
        return self._made[parameter]

    def _make(self, parameter: nn.Parameter, *, on_host: bool) -> Pair:
        if not parameter.requires_grad:
            # What nothing steps needs no master, and every replica has all of it.
            frozen = nn.Parameter(parameter.detach().to(self._on, self._dtype), requires_grad=False)
            return Pair(frozen, frozen)
        if not on_host:
            parameter.data = parameter.data.to(self._on)
        elif self._on.type == "cuda":
            parameter.data = parameter.data.pin_memory()  # P copies at the link's pace, and beside compute
        same = parameter.dtype == self._dtype and not on_host
        copy = parameter.detach().to(self._on, self._dtype, copy=not same)
        working = parameter if same else nn.Parameter(copy, requires_grad=parameter.requires_grad)
        if not self.replicas.divided:
            return Pair(working, parameter)
        rows = self.replicas.own(parameter.detach())
        # Rows of a parameter that computes itself are a view of it; of another, the rest is not needed any more.
        return Pair(working, nn.Parameter(rows if same else rows.clone(), requires_grad=parameter.requires_grad))


class StageWeights:
    """The master parameters of one stage by their Hugging Face names, and what stands for them in its units.

    `cuts`: how tensor parallelism divides those that it does.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        working: Working,
        *,
        on_host: bool,
        group: TensorGroup = ALONE,
        cuts: Mapping[str, Cut] = MappingProxyType({}),
    ) -> None:
        named = {n: working.of(p, on_host=on_host) for unit in units for n, p in unit.hf_parameters().items()}
        for module in (module for unit in units for module in unit.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, working.of(parameter, on_host=on_host).working)
        self._group, self._cuts, self._replicas = group, cuts, working.replicas
        self._local = {name: pair.working.shape for name, pair in named.items()}
        self.shapes: Mapping[str, torch.Size] = {name: self._whole_shape(name) for name in named}
        """Of the whole parameters."""
        self._masters = {name: pair.master for name, pair in named.items()}
        for name, master in self._masters.items():
            if master not in working.shown:
                working.shown[master] = self._show(name, master)
        self.masters: Mapping[str, nn.Parameter] = {n: working.shown[master] for n, master in self._masters.items()}
        """As an optimizer sees them."""
        self._pairs = [pair for pair in dict.fromkeys(named.values()) if pair.master.requires_grad]
        self._shown = [working.shown[pair.master] for pair in self._pairs]
        self.on_host = on_host
        self._sums: Sums = [None] * len(self._pairs)
        self._aside: dict[Op, Sums] = {}
        self._reduced: Sums = [None] * len(self._pairs)

    def refresh(self) -> None:
        """Give the working parameters the masters' values; a host's wait for P."""
        if not self.on_host:
            self.load()

    def load(self) -> None:
        """P, or the refresh of copies on the device; rows that other replicas step come from them."""
        with torch.no_grad():
            for working, master in self._pairs:
                if working is not master:
                    self._replicas.own(working).copy_(master, non_blocking=True)
                    self._replicas.gather(working)

    def whole(self, name: str) -> Tensor:
        """The master of a parameter with all ranks' parts; they all call it.  The live one, unless divided."""
        master = self._masters[name]
        tensor = master.detach()
        if self._divides(master):
            tensor = master.new_empty(self._local[name])
            self._replicas.own(tensor).copy_(master)
            self._replicas.gather(tensor)
        return self._group.gather(tensor, self._cuts[name]) if name in self._cuts else tensor

    def piece(self, name: str) -> Piece:
        """The master of a parameter, and where it lies in the whole."""
        local, master = self._local[name], self._masters[name]
        blocks = tuple(blocks_of(local, self._cuts.get(name), self._group))
        if self._divides(master):
            rows = self._replicas.rows(local[0])
            blocks = tuple(block for whole in blocks if (block := cropped(whole, rows)) is not None)
        return Piece(master.detach(), self.shapes[name], blocks)

    def take(self, name: str, whole: Tensor) -> None:
        """Give the master of a parameter the values of a whole one."""
        master = self._masters[name]
        whole = self._group.own(whole, self._cuts[name]) if name in self._cuts else whole
        with torch.no_grad():
            master.copy_(self._replicas.own(whole) if self._divides(master) else whole)

    def counted(self, name: str) -> bool:
        """Whether its gradient counts here in the norm: what is the same on all ranks of a group does on its first."""
        return name in self._cuts or self._group.part == 0

    def _whole_shape(self, name: str) -> torch.Size:
        shape = list(self._local[name])
        if name in self._cuts:
            shape[self._cuts[name].dim] = self._cuts[name].size
        return torch.Size(shape)

    def _show(self, name: str, master: nn.Parameter) -> nn.Parameter:
        """The master as a part of what all ranks of the group have of the parameter."""
        cut, shape = self._cuts.get(name), list(self.shapes[name])
        if self._divides(master):
            shape[0] = len(master)
            if cut is not None and cut.dim == 0:
                shape[0] = sum(len(self._replicas.rows(length)) for length in self._group.lengths(cut))
                cut = Cut(0, shape[0])
        return show(master, torch.Size(shape), cut, self._group.mesh)

    def _divides(self, master: nn.Parameter) -> bool:
        """Whether it is this replica's rows alone."""
        return self._replicas.divided and master.requires_grad

    def collect(self) -> None:
        """After a backward: sum what it gave to working copies in the masters' dtype."""
        for index, (working, master) in enumerate(self._pairs):
            if working.dtype != master.dtype and working.grad is not None:
                self._sums[index] = _plus(self._sums[index], working.grad.to(master.dtype))
                working.grad = None

    def set_aside(self, op: Op) -> None:
        """Before G or D: the gradients up to here are its own; later backwards start from nothing."""
        self._aside[op] = self._take()

    def reduce(self, op: Op) -> None:
        """G: sum what was set aside over the data-parallel ranks."""
        self._reduce(self._aside.pop(op))

    def bring_down(self, op: Op) -> None:
        """D: the gradients, reduced, to the host's masters."""
        if op in self._aside:
            self.reduce(op)
        self._give()

    def finish(self) -> None:
        """The step is over: the masters have the whole gradient, reduced."""
        self._reduce(self._take())
        self._give()

    def _take(self) -> Sums:
        taken: Sums = []
        for index, (working, master) in enumerate(self._pairs):
            if working.dtype == master.dtype:
                taken.append(working.grad)
                working.grad = None
            else:
                taken.append(self._sums[index])
                self._sums[index] = None
        return taken

    def _reduce(self, gradients: Sums) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                gradients[index] = None
                used_here(gradient)  # backwards have made it, on the compute lane
                self._reduced[index] = _plus(self._reduced[index], self._replicas.reduce(gradient))

    def _give(self) -> None:
        for index, (_, master) in enumerate(self._pairs):
            gradient = self._reduced[index]
            if gradient is not None:
                shown = self._shown[index]
                used_here(gradient)  # the lane that sums over replicas may have made it
                add_gradient(shown, alike(shown, _moved(gradient, master.device)))
                self._reduced[index] = None


def _moved(gradient: Tensor, device: torch.device) -> Tensor:
    """The gradient where its master is; down to the host at the link's pace.  It is there when this returns."""
    if not gradient.is_cuda or device.type != "cpu":
        return gradient.to(device)
    return torch.empty_like(gradient, device=device, pin_memory=True).copy_(gradient)


def _plus(total: Tensor | None, gradient: Tensor) -> Tensor:
    return gradient if total is None else total.add_(gradient)
