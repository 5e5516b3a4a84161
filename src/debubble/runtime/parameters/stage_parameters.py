"""The parameters of one stage: those that compute, their masters, and where gradients add up.

A stage computes with *working* parameters in the run's dtype.  The optimizer sees *masters*: the same tensors in fp32,
fp64 and full bf16 training; else for bf16 and fp16 fp32 copies.  Gradients of these are taken after every backward and
summed in fp32.  A stage whose step is the host's has its masters there: D brings the gradients down, P the parameters
up.

Where replicas divide the optimizer states (ZeRO), a master is this replica's rows of the parameter; where they divide
the parameters too (ZeRO-3), a working one is there while it is gathered alone.  Where the ranks of a device divide the
parameter, the optimizer sees the master as a DTensor (see distributed/sharding.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from debubble.ir import Op
from debubble.models.quantization import NF4_BLOCK
from debubble.runtime.distributed.cuts import Divisions
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.sharding import viewed_like
from debubble.runtime.distributed.tensor_parallel import NO_TENSOR_GROUP, TensorGroup
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.streams import used_here
from debubble.runtime.models.nf4 import dequantized, packed, quantized, scales_names, shapes_of
from debubble.runtime.models.units import UnitModule
from debubble.runtime.operators import add_gradient
from debubble.runtime.parameters.parameter_division import ParameterDivision, ParameterPair
from debubble.runtime.parameters.zero3 import DividedParameter

Sums = list[Tensor | None]
"""Gradients in the order of a stage's parameters; None where there is none yet."""


class ParameterPairs:
    """Makes the working and the master parameter of each parameter; a table that two units share stays one.

    Args:
        dtype: Of the working parameters.
        on: The torch device that computes.
        ledger: Counts what is gathered.
        copies: Whether the optimizer steps fp32 copies of parameters in 16 bits.
    """

    def __init__(self, dtype: torch.dtype, on: torch.device, ledger: Ledger, *, copies: bool) -> None:
        self._dtype, self._on, self._ledger, self._copies = dtype, on, ledger, copies
        self._made: dict[nn.Parameter, ParameterPair] = {}
        self.optimizer_views: dict[nn.Parameter, nn.Parameter] = {}
        """Each master as the optimizer sees it."""

    def of(
        self, parameter: nn.Parameter, replicas: Replicas, *, on_host: bool, keeps_dtype: bool = False
    ) -> ParameterPair:
        """The pair of a parameter, made once; one that `keeps_dtype` is frozen."""
        if parameter not in self._made and keeps_dtype:
            kept = nn.Parameter(parameter.detach().to(self._on), requires_grad=False)
            self._made[parameter] = ParameterPair(kept, kept, replicas)
        elif parameter not in self._made:
            self._made[parameter] = self._make(parameter, replicas, on_host=on_host)
        return self._made[parameter]

    def _make(self, parameter: nn.Parameter, replicas: Replicas, *, on_host: bool) -> ParameterPair:
        if not parameter.requires_grad:
            # What nothing steps needs no master.
            frozen = nn.Parameter(parameter.detach().to(self._on, self._dtype), requires_grad=False)
            if replicas.gathers:
                return self._divide(frozen, replicas, on_host=False)
            return ParameterPair(frozen, frozen, replicas)
        if not self._copies:
            parameter.data = parameter.data.to(self._dtype)
        if not on_host:
            parameter.data = parameter.data.to(self._on)
        elif self._on.type == "cuda":
            parameter.data = parameter.data.pin_memory()  # P copies at the link's pace, concurrently with compute
        if replicas.gathers:
            return self._divide(parameter, replicas, on_host=on_host)
        same = parameter.dtype == self._dtype and not on_host
        copy = parameter.detach().to(self._on, self._dtype, copy=not same)
        working = parameter if same else nn.Parameter(copy, requires_grad=parameter.requires_grad)
        if not replicas.divided:
            return ParameterPair(working, parameter, replicas)
        # Rows of a parameter that computes itself are a view of it; of another, the rest is not needed any more.
        rows = nn.Parameter(replicas.own(parameter.detach())) if same else _rows(parameter, replicas)
        return ParameterPair(working, rows, replicas)

    def _divide(self, parameter: nn.Parameter, replicas: Replicas, *, on_host: bool) -> ParameterPair:
        """The pair of a parameter that computes while it is gathered alone."""
        master = _rows(parameter, replicas)
        shard = master.detach().to(self._on, self._dtype, copy=True) if on_host else master.detach()
        working = nn.Parameter(torch.empty_like(parameter, device=self._on, dtype=self._dtype), parameter.requires_grad)
        return ParameterPair(
            working, master, replicas, DividedParameter(working, master, shard, replicas, self._ledger)
        )


def _rows(parameter: nn.Parameter, replicas: Replicas) -> nn.Parameter:
    """A copy of this replica's rows."""
    rows = replicas.own(parameter.detach()).clone()
    return nn.Parameter(rows.pin_memory() if parameter.is_pinned() else rows, parameter.requires_grad)


class StageWeights:
    """The master parameters of one stage by their Hugging Face names, and the working ones in its units.

    Args:
        units: Those of the stage; their parameters are replaced by the working ones.
        pairs: Makes working and master parameters.
        replicas: Ranks that have the same stage.
        on_host: Whether the host steps the stage.
        reduced_inside: Whether the program sums the stage's gradients (G), and not every backward where ZeRO-2 divides
            them.
        group: The ranks that divide the stage.
        divisions: Divisions of the parameters that ranks divide, by Hugging Face name.
        experts: Ranks that have the same experts, by the name of each parameter of experts that ranks divide.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        pairs: ParameterPairs,
        replicas: Replicas,
        *,
        on_host: bool,
        reduced_inside: bool = False,
        group: TensorGroup = NO_TENSOR_GROUP,
        divisions: Mapping[str, Divisions] = MappingProxyType({}),
        experts: Mapping[str, Replicas] = MappingProxyType({}),
    ) -> None:
        parameters = {name: p for unit in units for name, p in unit.hf_parameters().items()}
        quantized_shapes = shapes_of(units)
        scales = {name: tuple(scales_names(name, parameters)) for name in quantized_shapes}
        kept = {*quantized_shapes, *(name for names in scales.values() for name in names)}
        kept |= {name for unit in units for name in unit.constants}
        named = {
            n: pairs.of(p, experts.get(n, replicas), on_host=on_host, keeps_dtype=n in kept)
            for n, p in parameters.items()
        }
        working = {p: named[name].working for name, p in parameters.items()}
        for module in (module for unit in units for module in unit.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, working[parameter])
        stored = {name: divisions.get(name, ()) for name in named}
        for name, shape in quantized_shapes.items():
            of_floats = divisions.get(name, ())
            stored[name] = packed(of_floats, shape, 2)
            # What codes of quantised scales come with belongs to whole weights.
            stored[scales[name][0]] = packed(of_floats, shape, NF4_BLOCK)
        self.divisions = {
            name: ParameterDivision(
                pair,
                group,
                stored[name],
                divisions.get(name, ()),
                quantized_shapes.get(name, pair.working.shape),
                scales.get(name, ()),
            )
            for name, pair in named.items()
        }
        """Each parameter as ranks divide it, by Hugging Face name."""
        for name, pair in named.items():
            if pair.master not in pairs.optimizer_views:
                pairs.optimizer_views[pair.master] = self.divisions[name].optimizer_view()
        self.masters: Mapping[str, nn.Parameter] = {
            name: pairs.optimizer_views[pair.master] for name, pair in named.items()
        }
        """Masters as an optimizer sees them, by Hugging Face name."""
        pairs_of_stage = dict.fromkeys(named.values())
        self._gathering = [pair.gathering for pair in pairs_of_stage if pair.gathering is not None]
        self._pairs = [pair for pair in pairs_of_stage if pair.master.requires_grad]
        self._views = [pairs.optimizer_views[pair.master] for pair in self._pairs]
        self.on_host = on_host
        self._narrow = [
            (index, pair) for index, pair in enumerate(self._pairs) if pair.working.dtype != pair.master.dtype
        ]
        """The pairs whose gradients are summed in another dtype than a backward gives them in."""
        self._in_place = not (on_host or reduced_inside) and all(
            pair.working is view and pair.replicas.size == 1
            for pair, view in zip(self._pairs, self._views, strict=True)
        )
        """True if backwards give whole gradients to the masters themselves."""
        self.loss_scale = 1.0
        """Factor of the gradients that backwards give, which masters do not have."""
        self._sums: Sums = [None] * len(self._pairs)
        self._stashed: dict[Op, Sums] = {}
        self._reduced: Sums = [None] * len(self._pairs)
        for index, pair in enumerate(self._pairs):
            # Vectors take next to nothing, and a collective each would take its time.
            if pair.replicas.scatters and not reduced_inside and pair.working.dim() > 1:
                pair.working.register_post_accumulate_grad_hook(partial(self._scatter, index))

    def refresh(self) -> None:
        """Give the working parameters the masters' values; a host's wait for P."""
        if not self.on_host:
            self.load_working()

    def load_working(self) -> None:
        """P, or the refresh of copies on the device; rows that other replicas step come from them."""
        with torch.no_grad():
            for parameter in self._gathering:
                parameter.refresh()
            for working, master, replicas, gathering in self._pairs:
                if working is not master and gathering is None:
                    replicas.own(working).copy_(master, non_blocking=True)
                    replicas.gather(working)

    @property
    def shards(self) -> list[Tensor]:
        """This replica's rows of the working parameters that replicas divide."""
        return [parameter.shard for parameter in self._gathering]

    @property
    def gradients(self) -> list[Tensor]:
        """The gradients that masters do not have yet, whole or reduced."""
        aside = (gradient for sums in self._stashed.values() for gradient in sums)
        found = (*self._sums, *self._reduced, *aside, *(pair.working.grad for pair in self._pairs))
        return [gradient for gradient in found if gradient is not None]

    def gather(self) -> None:
        """UNSHARD: make the working parameters whole.  The replicas gather the same stages in the same order."""
        for parameter in self._gathering:
            parameter.gather()

    def free(self) -> None:
        """RESHARD: let go of what other replicas have of them."""
        for parameter in self._gathering:
            parameter.free()

    def forget(self) -> None:
        """Free what a step has left, whose parameters were taken back."""
        for parameter in self._gathering:
            parameter.forget()

    def whole(self, name: str) -> Tensor:
        """The master of a parameter with all ranks' parts, in floats; they all call it."""
        division = self.divisions[name]
        if not division.scales:
            return division.whole()
        scales = [self.divisions[scale].whole() for scale in division.scales]
        return dequantized(division.whole(), *scales).view(division.shape)

    def load(self, name: str, whole: Tensor) -> None:
        """Give the master of a parameter the values of a whole one, quantised if it is."""
        division = self.divisions[name]
        if not division.scales:
            division.load(whole)
            return
        own = division.own(whole).to(division.pair.master.device)
        tensors = quantized(own, double=len(division.scales) > 1)
        for kept, tensor in zip((name, *division.scales), tensors, strict=True):
            self.divisions[kept].pair.master.data.copy_(tensor)

    def collect(self) -> None:
        """Sum, after a backward, what it gave to working copies, in the masters' dtype."""
        for index, (working, master, *_) in self._narrow:
            if working.grad is not None:
                self._sums[index] = accumulate(self._sums[index], working.grad, master.dtype)
                working.grad = None

    def stash_gradients(self, op: Op) -> None:
        """Stash the gradients up to here for G or D; later backwards start from nothing."""
        self._stashed[op] = self._take_gradients()

    def reduce(self, op: Op) -> None:
        """G: sum stashed gradients over the data-parallel ranks."""
        self._reduce(self._stashed.pop(op))

    def offload_gradients(self, op: Op) -> None:
        """D: move the reduced gradients to the host's masters."""
        if op in self._stashed:
            self.reduce(op)
        self._give_gradients()

    def finish(self) -> None:
        """The step is over: the masters have the whole gradient, reduced."""
        if self._in_place and self.loss_scale == 1.0:
            return
        self._reduce(self._take_gradients())
        self._give_gradients()

    def _take_gradients(self) -> Sums:
        gradients: Sums = []
        for index, (working, master, *_) in enumerate(self._pairs):
            if working.dtype == master.dtype:
                gradients.append(working.grad)
                working.grad = None
            else:
                gradients.append(self._sums[index])
                self._sums[index] = None
        return gradients

    def _scatter(self, index: int, working: Tensor) -> None:
        """Sum over replicas what a backward has just given to a parameter, and keep this one's rows alone."""
        gradient, working.grad = working.grad, None
        if gradient is not None:  # of a table that two stages share, each has a hook
            self._reduce_one(index, gradient.to(self._pairs[index].master.dtype))

    def _reduce(self, gradients: Sums) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                gradients[index] = None
                used_here(gradient)  # backwards have made it, on the compute lane
                self._reduce_one(index, gradient)

    def _reduce_one(self, index: int, gradient: Tensor) -> None:
        reduced = self._pairs[index].replicas.reduce(gradient)
        self._reduced[index] = accumulate(self._reduced[index], reduced, reduced.dtype)

    def _give_gradients(self) -> None:
        for index, (_, master, *_) in enumerate(self._pairs):
            gradient = self._reduced[index]
            if gradient is not None:
                view = self._views[index]
                used_here(gradient)  # the lane that sums over replicas may have made it
                if self.loss_scale != 1.0:
                    gradient.mul_(1 / self.loss_scale)
                add_gradient(view, viewed_like(view, _on_device_of_master(gradient, master.device)))
                self._reduced[index] = None


def _on_device_of_master(gradient: Tensor, device: torch.device) -> Tensor:
    """The gradient where its master is; down to the host at the link's pace.  It is there when this returns."""
    if not gradient.is_cuda or device.type != "cpu":
        return gradient.to(device)
    return torch.empty_like(gradient, device=device, pin_memory=True).copy_(gradient)


def accumulate(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a gradient, in one pass, to the sum of those before it, which has that dtype; the first one begins it."""
    return gradient.to(dtype) if total is None else total.add_(gradient)
