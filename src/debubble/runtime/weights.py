"""The parameters of one stage: those that compute, their masters, and where gradients add up.

A stage computes with *working* parameters in the run's dtype.  The optimizer sees *masters*: the same tensors in fp32
or fp64; for bf16, fp32 copies.  Gradients of bf16 parameters are taken after every backward and summed in fp32.
A stage whose step is the host's has its masters there: D brings the gradients down, P the parameters up.
Where replicas divide the optimizer states (ZeRO), a master is this replica's rows of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from debubble.ir import Op
from debubble.runtime.operators import add_gradient
from debubble.runtime.replicas import Replicas
from debubble.runtime.tensor_parallel import ALONE, Cut, TensorGroup
from debubble.runtime.units import Unit

Sums = list[Tensor | None]
"""Gradients in the order of a stage's parameters; None where there is none yet."""


class Pair(NamedTuple):
    """A parameter that computes, and the one that the optimizer steps for it."""

    working: nn.Parameter
    master: nn.Parameter


class Block(NamedTuple):
    """Part of a tensor and where it lies in the whole that several ranks hold, per dimension."""

    start: tuple[int, ...]
    """In the rank's own tensor."""
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    """In the whole."""


class Piece(NamedTuple):
    """What this rank has of a tensor that several may hold parts of."""

    tensor: Tensor
    """The live one, detached."""
    shape: torch.Size
    """Of the whole."""
    blocks: tuple[Block, ...]
    """What the tensor consists of."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Piece:
        """All of it."""
        nowhere = (0,) * tensor.dim()
        return cls(tensor, tensor.shape, (Block(nowhere, tuple(tensor.shape), nowhere),))

    def of(self, block: Block) -> Tensor:
        """The block itself, live."""
        tensor = self.tensor
        for dim, (start, length) in enumerate(zip(block.start, block.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


class Working:
    """Makes the working and the master parameter of each parameter; a table that two units share stays one."""

    def __init__(self, dtype: torch.dtype, on: torch.device, replicas: Replicas) -> None:
        self._dtype, self._on, self.replicas = dtype, on, replicas
        self._made: dict[nn.Parameter, Pair] = {}

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
        self.masters: Mapping[str, nn.Parameter] = {name: pair.master for name, pair in named.items()}
        self._group, self._cuts = group, cuts
        self._local = {name: pair.working.shape for name, pair in named.items()}
        self.shapes: Mapping[str, torch.Size] = {name: self._whole_shape(name) for name in named}
        """Of the whole parameters."""
        self._pairs = [pair for pair in dict.fromkeys(named.values()) if pair.master.requires_grad]
        self._replicas = working.replicas
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
        master = self.masters[name]
        tensor = master.detach()
        if self._divides(master):
            tensor = master.new_empty(self._local[name])
            self._replicas.own(tensor).copy_(master)
            self._replicas.gather(tensor)
        return self._group.gather(tensor, self._cuts[name]) if name in self._cuts else tensor

    def piece(self, name: str) -> Piece:
        """The master of a parameter, and where it lies in the whole."""
        local, master = self._local[name], self.masters[name]
        blocks = tuple(_blocks(local, self._cuts.get(name), self._group))
        if self._divides(master):
            first = self._replicas.first_row(local[0])
            rows = range(first, first + len(master))
            blocks = tuple(block for whole in blocks if (block := _cropped(whole, rows)) is not None)
        return Piece(master.detach(), self.shapes[name], blocks)

    def take(self, name: str, whole: Tensor) -> None:
        """Give the master of a parameter the values of a whole one."""
        master = self.masters[name]
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

    def _divides(self, master: nn.Parameter) -> bool:
        """Whether it is this replica's rows alone."""
        return self._replicas.divided and master.requires_grad

    def collect(self) -> None:
        """After a backward: sum what it gave to working copies in the masters' dtype."""
        for index, (working, master) in enumerate(self._pairs):
            if working is not master and working.grad is not None:
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
            if working is master:
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
                self._reduced[index] = _plus(self._reduced[index], self._replicas.reduce(gradient))

    def _give(self) -> None:
        for index, (_, master) in enumerate(self._pairs):
            gradient = self._reduced[index]
            if gradient is not None:
                add_gradient(master, gradient.to(master.device))
                self._reduced[index] = None


def _plus(total: Tensor | None, gradient: Tensor) -> Tensor:
    return gradient if total is None else total.add_(gradient)


def _blocks(local: torch.Size, cut: Cut | None, group: TensorGroup) -> Iterator[Block]:
    """Where the shard of a parameter lies in the whole: fused layers' parts lie apart."""
    nowhere = (0,) * len(local)
    if cut is None:
        yield Block(nowhere, tuple(local), nowhere)
        return
    layer = cut.size // cut.fused
    first, length = group.span(layer)
    before, after = nowhere[: cut.dim], nowhere[cut.dim + 1 :]
    size = (*local[: cut.dim], length, *local[cut.dim + 1 :])
    for k in range(cut.fused):
        yield Block((*before, k * length, *after), size, (*before, k * layer + first, *after))


def _cropped(block: Block, rows: range) -> Block | None:
    """What of a shard's block lies in these rows of the shard, as part of the tensor that has these alone."""
    first = max(block.start[0], rows.start)
    length = min(block.start[0] + block.size[0], rows.stop) - first
    if length <= 0 or 0 in block.size:
        return None
    offset = block.offsets[0] + first - block.start[0]
    return Block((first - rows.start, *block.start[1:]), (length, *block.size[1:]), (offset, *block.offsets[1:]))
