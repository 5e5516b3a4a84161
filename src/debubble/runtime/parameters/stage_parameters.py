"""The parameters of one stage: working parameters, their masters, and the accumulation of gradients.

A stage computes with *working* parameters in the run's dtype.  The optimizer steps *masters*: the same tensors in fp32,
fp64 and full bf16 training; fp32 copies in bf16 and fp16 mixed precision, for which gradients are summed in fp32 after
every backward.  A host-stepped stage has its masters on the host: D moves gradients there, P parameters back.

With ZeRO a master is this replica's rows of the parameter; with ZeRO-3 a working parameter has storage only while it is
gathered.  With tensor parallelism the optimizer sees masters as DTensors (see distributed/sharding.py).
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
from debubble.runtime.parameters.zero3 import ShardedParameter

Sums = list[Tensor | None]
"""Gradients in the order of a stage's parameters; None: no gradient yet."""


class ParameterPairs:
    """Makes the working and the master parameter of each parameter; a tied table has one pair.

    Args:
        dtype: Dtype of the working parameters.
        on: torch device of the working parameters.
        ledger: Counts gathered parameters.
        copies: Whether the optimizer steps fp32 copies of 16-bit parameters.
    """

    def __init__(self, dtype: torch.dtype, on: torch.device, ledger: Ledger, *, copies: bool) -> None:
        self._dtype, self._on, self._ledger, self._copies = dtype, on, ledger, copies
        self._made: dict[nn.Parameter, ParameterPair] = {}
        self.optimizer_views: dict[nn.Parameter, nn.Parameter] = {}
        """Master -> the optimizer's view of it."""

    def pair_of(
        self, parameter: nn.Parameter, replicas: Replicas, *, on_host: bool, keeps_dtype: bool = False
    ) -> ParameterPair:
        """The pair of a parameter, made once; a parameter that `keeps_dtype` is frozen."""
        if parameter not in self._made and keeps_dtype:
            frozen = nn.Parameter(parameter.detach().to(self._on), requires_grad=False)
            self._made[parameter] = ParameterPair(frozen, frozen, replicas)
        elif parameter not in self._made:
            self._made[parameter] = self._make(parameter, replicas, on_host=on_host)
        return self._made[parameter]

    def _make(self, parameter: nn.Parameter, replicas: Replicas, *, on_host: bool) -> ParameterPair:
        if not parameter.requires_grad:
            # Frozen parameters need no master.
            frozen = nn.Parameter(parameter.detach().to(self._on, self._dtype), requires_grad=False)
            if replicas.shards_parameters:
                return self._shard(frozen, replicas, on_host=False)
            return ParameterPair(frozen, frozen, replicas)
        if not self._copies:
            parameter.data = parameter.data.to(self._dtype)
        if not on_host:
            parameter.data = parameter.data.to(self._on)
        elif self._on.type == "cuda":
            parameter.data = parameter.data.pin_memory()  # P copies at the link's pace, concurrently with compute
        if replicas.shards_parameters:
            return self._shard(parameter, replicas, on_host=on_host)
        same = parameter.dtype == self._dtype and not on_host
        copy = parameter.detach().to(self._on, self._dtype, copy=not same)
        working = parameter if same else nn.Parameter(copy, requires_grad=parameter.requires_grad)
        if not replicas.shards_states:
            return ParameterPair(working, parameter, replicas)
        # If the master is the working parameter, its rows are a view; else they are a copy, and the rest is freed.
        rows = nn.Parameter(replicas.local_rows(parameter.detach())) if same else _rows(parameter, replicas)
        return ParameterPair(working, rows, replicas)

    def _shard(self, parameter: nn.Parameter, replicas: Replicas, *, on_host: bool) -> ParameterPair:
        """The pair of a parameter that is gathered to compute (ZeRO-3)."""
        master = _rows(parameter, replicas)
        shard = master.detach().to(self._on, self._dtype, copy=True) if on_host else master.detach()
        working = nn.Parameter(torch.empty_like(parameter, device=self._on, dtype=self._dtype), parameter.requires_grad)
        return ParameterPair(
            working, master, replicas, ShardedParameter(working, master, shard, replicas, self._ledger)
        )


def _rows(parameter: nn.Parameter, replicas: Replicas) -> nn.Parameter:
    """A copy of this replica's rows."""
    rows = replicas.local_rows(parameter.detach()).clone()
    return nn.Parameter(rows.pin_memory() if parameter.is_pinned() else rows, parameter.requires_grad)


class StageWeights:
    """The master parameters of one stage by Hugging Face name, and their gradients.

    Args:
        units: Units of the stage; their parameters are replaced by working parameters.
        pairs: Makes working and master parameters.
        replicas: Ranks that have the same stage.
        on_host: Whether the host steps the stage.
        reduced_inside: Whether the program reduces the stage's gradients (G); if not, with ZeRO-2 every backward does.
        group: The tensor-parallel ranks.
        divisions: Divisions of sharded parameters, by Hugging Face name.
        experts: Ranks with the same experts, by Hugging Face name of expert-parallel parameters.
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
        fixed_dtype = {*quantized_shapes, *(name for names in scales.values() for name in names)}
        fixed_dtype |= {name for unit in units for name in unit.constants}
        named = {
            n: pairs.pair_of(p, experts.get(n, replicas), on_host=on_host, keeps_dtype=n in fixed_dtype)
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
            # The maxima and mean of quantised scales are not sharded.
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
        """The sharding of each parameter, by Hugging Face name."""
        for name, pair in named.items():
            if pair.master not in pairs.optimizer_views:
                pairs.optimizer_views[pair.master] = self.divisions[name].optimizer_view()
        self.masters: Mapping[str, nn.Parameter] = {
            name: pairs.optimizer_views[pair.master] for name, pair in named.items()
        }
        """The optimizer's views of masters, by Hugging Face name."""
        pairs_of_stage = dict.fromkeys(named.values())
        self._sharded = [pair.sharded for pair in pairs_of_stage if pair.sharded is not None]
        self._pairs = [pair for pair in pairs_of_stage if pair.master.requires_grad]
        self._views = [pairs.optimizer_views[pair.master] for pair in self._pairs]
        self.on_host = on_host
        self._narrow = [
            (index, pair) for index, pair in enumerate(self._pairs) if pair.working.dtype != pair.master.dtype
        ]
        """Pairs whose gradients are accumulated in the master's dtype."""
        self._in_place = not (on_host or reduced_inside) and all(
            pair.working is view and pair.replicas.size == 1
            for pair, view in zip(self._pairs, self._views, strict=True)
        )
        """True if backwards accumulate full gradients in the masters directly."""
        self.loss_scale = 1.0
        """Scale of the loss, by which gradients are divided when masters get them."""
        self._sums: Sums = [None] * len(self._pairs)
        self._stashed: dict[Op, Sums] = {}
        self._reduced: Sums = [None] * len(self._pairs)
        for index, pair in enumerate(self._pairs):
            # Vectors take little memory, and a collective for each would take time.
            if pair.replicas.shards_gradients and not reduced_inside and pair.working.dim() > 1:
                pair.working.register_post_accumulate_grad_hook(partial(self._scatter, index))

    def refresh(self) -> None:
        """Copy the masters to the working parameters; those of a host-stepped stage wait for P."""
        if not self.on_host:
            self.load_working()

    def load_working(self) -> None:
        """P, or the refresh on the device: copy masters to working parameters, and all-gather rows with ZeRO."""
        with torch.no_grad():
            for parameter in self._sharded:
                parameter.refresh()
            for working, master, replicas, sharded in self._pairs:
                if working is not master and sharded is None:
                    replicas.local_rows(working).copy_(master, non_blocking=True)
                    replicas.gather(working)

    @property
    def shards(self) -> list[Tensor]:
        """This replica's rows of the working parameters (ZeRO-3)."""
        return [parameter.shard for parameter in self._sharded]

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients that masters do not have yet."""
        stashed = (gradient for sums in self._stashed.values() for gradient in sums)
        gradients = (*self._sums, *self._reduced, *stashed, *(pair.working.grad for pair in self._pairs))
        return [gradient for gradient in gradients if gradient is not None]

    def unshard(self) -> None:
        """UNSHARD: gather the working parameters.  All replicas unshard the same stages in the same order."""
        for parameter in self._sharded:
            parameter.unshard()

    def reshard(self) -> None:
        """RESHARD: free the gathered parameters."""
        for parameter in self._sharded:
            parameter.reshard()

    def forget(self) -> None:
        """Free the parameters that a rolled-back step has gathered."""
        for parameter in self._sharded:
            parameter.forget()

    def full_tensor(self, name: str) -> Tensor:
        """Gather the full, dequantised master of a parameter; all ranks that shard it call it."""
        division = self.divisions[name]
        if not division.scales:
            return division.full_tensor()
        scales = [self.divisions[scale].full_tensor() for scale in division.scales]
        return dequantized(division.full_tensor(), *scales).view(division.shape)

    def load(self, name: str, full: Tensor) -> None:
        """Load the master of a parameter from a full tensor, which is quantised if the parameter is."""
        division = self.divisions[name]
        if not division.scales:
            division.load(full)
            return
        local = division.local_shard(full).to(division.pair.master.device)
        tensors = quantized(local, double=len(division.scales) > 1)
        for stored_name, tensor in zip((name, *division.scales), tensors, strict=True):
            self.divisions[stored_name].pair.master.data.copy_(tensor)

    def collect(self) -> None:
        """After a backward, accumulate the gradients of working copies in the masters' dtype."""
        for index, (working, master, *_) in self._narrow:
            if working.grad is not None:
                self._sums[index] = accumulate(self._sums[index], working.grad, master.dtype)
                working.grad = None

    def stash_gradients(self, op: Op) -> None:
        """Stash the gradients accumulated so far for G or D; later backwards start anew."""
        self._stashed[op] = self._take_gradients()

    def reduce(self, op: Op) -> None:
        """G: reduce stashed gradients over the replicas."""
        self._reduce(self._stashed.pop(op))

    def offload_gradients(self, op: Op) -> None:
        """D: move the reduced gradients to the host's masters."""
        if op in self._stashed:
            self.reduce(op)
        self._give_gradients()

    def finish(self) -> None:
        """At the end of the step, reduce the gradients and add them to the masters'."""
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
        """Reduce-scatter the gradient that a backward has just accumulated in a parameter (ZeRO-2)."""
        gradient, working.grad = working.grad, None
        if gradient is not None:  # None if the other hook of a tied table has taken it
            self._reduce_one(index, gradient.to(self._pairs[index].master.dtype))

    def _reduce(self, gradients: Sums) -> None:
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                gradients[index] = None
                used_here(gradient)  # computed on the compute lane
                self._reduce_one(index, gradient)

    def _reduce_one(self, index: int, gradient: Tensor) -> None:
        reduced = self._pairs[index].replicas.reduce(gradient)
        self._reduced[index] = accumulate(self._reduced[index], reduced, reduced.dtype)

    def _give_gradients(self) -> None:
        for index, (_, master, *_) in enumerate(self._pairs):
            gradient = self._reduced[index]
            if gradient is not None:
                view = self._views[index]
                used_here(gradient)  # may be reduced on another lane
                if self.loss_scale != 1.0:
                    gradient.mul_(1 / self.loss_scale)
                add_gradient(view, viewed_like(view, _on_device_of_master(gradient, master.device)))
                self._reduced[index] = None


def _on_device_of_master(gradient: Tensor, device: torch.device) -> Tensor:
    """The gradient on its master's device; to the host through pinned memory, synchronously."""
    if not gradient.is_cuda or device.type != "cpu":
        return gradient.to(device)
    return torch.empty_like(gradient, device=device, pin_memory=True).copy_(gradient)


def accumulate(total: Tensor | None, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Add a gradient to a sum of that dtype in one pass, or start the sum."""
    return gradient.to(dtype) if total is None else total.add_(gradient)
