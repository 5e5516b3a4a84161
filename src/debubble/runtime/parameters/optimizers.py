"""Optimizers of one device: steps when the gradient norm is known, steps before it, and the scale of an fp16 loss.

An AdamW step cannot be inverted exactly in floating point.  So a step that may have to be taken back copies what it
changes first: for AdamW 12 bytes per fp32 parameter (the parameter and two moments), where the parameter is: on the
host for a stage that the host steps, divided over the replicas with ZeRO.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, Kind
from debubble.models.runtime_limits import check_averages
from debubble.plans import Plan
from debubble.runtime.distributed.gradient_norm import PartialSums, sum_of_squares
from debubble.runtime.distributed.sharding import inner_tensors, local_bytes, local_tensor
from debubble.runtime.models.hf.names import HEAD_TABLE
from debubble.runtime.parameters.averages import WeightAverages
from debubble.runtime.parameters.device_part import DevicePart

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


class DeviceOptimizers:
    """Optimizers that the program steps, one per stage (S), and those that step the rest after it.

    Args:
        plan: What runs.
        part: The stages of this device.
        make: Makes the optimizer of a list of parameters; None: the user steps them.
        shares_table: Whether another rank has a copy of this one's tied table.
        ema_decay: Of the averages of the parameters; None: there are none.

    Raises:
        InputError: The plan steps stages, or averages are wanted, and there is no `make`.
    """

    def __init__(
        self,
        plan: Plan,
        part: DevicePart,
        make: MakeOptimizer | None,
        *,
        shares_table: bool,
        ema_decay: float | None = None,
    ) -> None:
        self._part = part
        self._snapshots: dict[Optimizer, OptimizerSnapshot] = {}
        self._lock = threading.Lock()
        stepped = sorted({op.stage for op in plan.schedule.operations if op.kind is Kind.S})
        if stepped and make is None:
            raise InputError("The plan steps stages inside the step: give Pipeline an `optimizer`.")
        if ema_decay is not None and make is None:
            raise InputError(
                "Averages of the weights follow `optimizer_step` and `post_validated_step`: give Pipeline an"
                " `optimizer`."
            )
        if ema_decay is not None:
            check_averages(plan.options)
        self.averages = None if ema_decay is None else WeightAverages(part.parameters(), ema_decay)
        """The averages of the parameters, if the run has some."""
        self.on_host = plan.schedule.host_steps & set(stepped)
        """The stages of all devices that their hosts step inside the step."""
        self.on_device = set(stepped) - self.on_host
        """The stages that their devices step inside the step."""
        self.inside: dict[int, Optimizer] = {}
        """The optimizers of this device's stages that are stepped inside the step."""
        self.outside: list[Optimizer] = []
        if make is not None:
            self.inside = {s: make(part.parameters_of(s)) for s in stepped if s in part.stages}
            inside = {p for optimizer in self.inside.values() for p in parameters_of(optimizer)}
            rest = [p for p in dict.fromkeys(part.masters.values()) if p.requires_grad and p not in inside]
            self.outside = [make(rest)] if rest else []
        self._counted = self._parameters_in_norm(shares_table)

    @property
    def all(self) -> list[Optimizer]:
        """Every optimizer of the device."""
        return [*self.outside, *self.inside.values()]

    def continue_with(self, before: DeviceOptimizers) -> None:
        """Let the earlier optimizers step these parameters; their settings stay, as do schedules that change them."""
        self.outside = [*map(_rebound, before.outside, self.outside)] or self.outside
        self.inside = {stage: _rebound(before.inside[stage], made) for stage, made in self.inside.items()}

    @property
    def static_bytes(self) -> int:
        """Bytes on the device of parameters, working copies, gradients, optimizer states and snapshots.

        What the plan leaves to the host is the host's, also where both are the CPU.
        """
        return self.lasting_bytes + self.gradient_bytes

    @property
    def lasting_bytes(self) -> int:
        """The bytes that stay from step to step: all but gradients."""
        tensors = (*self._stepped, *self._computing_tensors(), *self._optimizer_tensors())
        own = [part for t in map(local_tensor, tensors) for part in (inner_tensors(t) or [t])]
        # A parameter that is not gathered has an empty storage.
        bytes_at = {t.untyped_storage().data_ptr(): t.nbytes for t in own if t.untyped_storage().nbytes()}
        return sum(bytes_at.values()) + self._snapshot_bytes

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradients that are there now, counted in every step: some hundred numbers are added up."""
        own = [p.grad for p in self._stepped if p.grad is not None]
        own += [gradient for weights in self._part.weights.values() for gradient in weights.gradients]
        # A master may be the parameter that computes, and then its gradient comes twice.
        return sum(map(local_bytes, {id(gradient): gradient for gradient in own}.values()))

    @cached_property
    def _stepped(self) -> list[nn.Parameter]:
        """The parameters whose optimizers are the device's."""
        hosted = {p for weights in self._part.weights.values() if weights.on_host for p in weights.masters.values()}
        return [p for p in self._part.parameters() if p not in hosted]

    def _computing_tensors(self) -> Iterator[Tensor]:
        """The parameters that compute, and this replica's rows of them."""
        for stage in self._part.stages.values():
            yield from (p for unit in stage.units for p in unit.parameters())
        for weights in self._part.weights.values():
            yield from weights.shards

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """The optimizer states and averages of the parameters whose optimizers are the device's."""
        states = {p: state.values() for optimizer in self.all for p, state in optimizer.state.items()}
        for parameter in self._stepped:
            average = None if self.averages is None else self.averages.of(parameter)
            yield from (t for t in (*states.get(parameter, ()), average) if isinstance(t, Tensor))

    @property
    def _snapshot_bytes(self) -> int:
        hosted = {self.inside[s] for s, weights in self._part.weights.items() if weights.on_host and s in self.inside}
        return sum(snapshot.nbytes for optimizer, snapshot in self._snapshots.items() if optimizer not in hosted)

    def squares(self, stages: Sequence[int] | None = None) -> float:
        """Sum of the squares of the gradients of some stages (None: of all) of this device, in double precision."""
        return sum(
            sum_of_squares(local_tensor(p.grad) for p in self._counted[stage] if p.grad is not None)
            for stage in (self._counted if stages is None else stages)
        )

    def step(self, stage: int) -> None:
        """S, as the plan says: with the stage's gradients as they are; not at all if one of them is inf or NaN."""
        self._part.weights[stage].finish()
        if math.isfinite(self.squares([stage])):
            self.inside[stage].step()
        self.inside[stage].zero_grad()

    def snapshot_of(self, optimizer: Optimizer) -> OptimizerSnapshot:
        """The copies that take this optimizer's steps back."""
        with self._lock:
            return self._snapshots.setdefault(optimizer, OptimizerSnapshot(optimizer))

    def finish(self, stage: int) -> None:
        """Let the masters of a stage have their whole gradients."""
        self._part.weights[stage].finish()

    def _parameters_in_norm(self, shares_table: bool) -> dict[int, list[nn.Parameter]]:
        """The parameters of each stage that count in the norm: a tied table does once, in the first stage."""
        parameters: dict[int, list[nn.Parameter]] = {}
        seen: set[nn.Parameter] = set()
        for stage, weights in sorted(self._part.weights.items()):
            parameters[stage] = []
            for name, parameter in weights.masters.items():
                second = shares_table and name == HEAD_TABLE
                if parameter not in seen and not second and weights.divisions[name].counts_in_norm:
                    parameters[stage].append(parameter)
                    seen.add(parameter)
        return parameters


class TentativeUpdate:
    """The update of one step: an optimizer steps if what is known by then lets it, and else waits.

    Gradients are kept until all is known.

    Args:
        optimizers: All of the device.
        max_norm: The clip, as far as it is known when the step begins: `finish` has the last word.
        optimistic: Whether any optimizer may step before the norm of all gradients is known.
    """

    def __init__(self, optimizers: DeviceOptimizers, max_norm: float = math.inf, *, optimistic: bool = True) -> None:
        self._optimizers, self._optimistic = optimizers, optimistic
        self.max_norm = max_norm
        self._steps: list[_TentativeStep] = []
        self._finished = False

    @property
    def ahead(self) -> bool:
        """True if any optimizer has stepped."""
        return any(step.snapshot is not None for step in self._steps)

    def step(self, stage: int) -> None:
        """S: all that is known are the gradients of the stage itself."""
        self._optimizers.finish(stage)
        self._try(self._optimizers.inside[stage], PartialSums(self._optimizers.squares([stage])))

    def step_outside(self, known: PartialSums) -> None:
        """Step the rest, after the program."""
        for optimizer in self._optimizers.outside:
            self._try(optimizer, known)

    def finish(self, total: PartialSums, max_norm: float) -> None:
        """Correct wrong steps, step what has waited, and clear the gradients; further calls do nothing."""
        if self._finished:
            return
        for step in self._steps:
            if step.snapshot is None or not total.within(max_norm):
                step.correct(total, max_norm)
            step.optimizer.zero_grad()
        tried = [step.optimizer for step in self._steps]
        for optimizer in (optimizer for optimizer in self._optimizers.outside if optimizer not in tried):
            if total.finite:
                scale_gradients(parameters_of(optimizer), total.scale(max_norm))
                optimizer.step()
            optimizer.zero_grad()
        if self._optimizers.averages is not None and total.finite:
            self._optimizers.averages.update()
        self._finished = True

    def _try(self, optimizer: Optimizer, known: PartialSums) -> None:
        steps_now = self._optimistic and known.within(self.max_norm)
        snapshot = self._optimizers.snapshot_of(optimizer) if steps_now else None
        self._steps.append(_TentativeStep(optimizer, settings_of(optimizer), snapshot))
        if snapshot is not None:
            snapshot.save()
            optimizer.step()
            snapshot.end_step()


@dataclass(frozen=True)
class _TentativeStep:
    """An optimizer's part of a tentative update."""

    optimizer: Optimizer
    settings: list[dict[str, Any]]
    """The learning rate and the like: by the time it is stepped again, they may be the next step's."""
    snapshot: OptimizerSnapshot | None
    """The copies that take its step back; None: it waits."""

    def correct(self, total: PartialSums, max_norm: float) -> None:
        """Take the step back, and take it as is right now that all is known."""
        if self.snapshot is not None:
            self.snapshot.restore()
        if total.finite:
            scale_gradients(parameters_of(self.optimizer), total.scale(max_norm))
            later = settings_of(self.optimizer)
            change_settings(self.optimizer, self.settings)
            self.optimizer.step()
            change_settings(self.optimizer, later)


class OptimizerSnapshot:
    """Copies that take the last step of one optimizer back, to the bit.  Their buffers stay, for the next step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._copies: dict[Tensor, Tensor] = {}
        self._groups: list[dict[str, Any]] = []
        """Entries of each parameter group: all of them before the step, former values of the changed ones after it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def save(self) -> None:
        """Copy, before a step, every parameter that has a gradient, and its states."""
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
        """Forget the entries of groups that the step has left: learning rates may change before it is taken back."""
        self._groups = [
            {name: value for name, value in before.items() if not _equal(value, group[name])}
            for before, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]

    def restore(self) -> None:
        """Take the step back: everything is as it was before."""
        for tensor, copy in self._copies.items():
            tensor.copy_(copy)
        for parameter, state in self._states.items():
            self._optimizer.state[parameter] = state
        change_settings(self._optimizer, self._groups)


def copied(value: Any) -> Any:
    """A copy of a tensor; anything else, which is replaced rather than changed, as it is."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


@dataclass
class LossScale:
    """A factor of the loss that halves when a gradient overflows, and doubles after many steps in which none did.

    The rule is Micikevicius et al.'s (arXiv:1710.03740, section 3.2), the numbers are those of torch's GradScaler.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    """Steps without overflow after which it doubles."""
    steps_since: int = 0
    """Steps since it changed."""

    def update(self, *, finite: bool) -> None:
        """Change the scale after a step, in which all gradients were finite or not."""
        self.steps_since += 1
        if not finite:
            self.value, self.steps_since = self.value / 2, 0
        elif self.steps_since == self.growth_interval:
            self.value, self.steps_since = self.value * 2, 0


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Every parameter that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def scale_gradients(parameters: Iterable[Tensor], scale: float) -> None:
    """Multiply the gradients of these, in place."""
    for parameter in parameters:
        if parameter.grad is not None and scale != 1.0:
            local_tensor(parameter.grad).mul_(scale)


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Each group's learning rate and the like."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _rebound(before: Optimizer, made: Optimizer) -> Optimizer:
    """The optimizer of before with its settings, on the parameters of another and without states."""
    settings = settings_of(before)
    before.param_groups = made.param_groups
    for group, setting in zip(before.param_groups, settings, strict=False):
        group.update(setting)
    before.state.clear()
    return before


def change_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Give each group of parameters its learning rate and the like."""
    for group, setting in zip(optimizer.param_groups, settings, strict=True):
        group.update(setting)
