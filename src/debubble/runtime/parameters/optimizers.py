"""Optimizers of one device: those of stages that are stepped inside the step, that of the rest; the scale of fp16."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn
from torch.optim import Optimizer

from debubble.ir import InputError, Kind
from debubble.models.runtime_limits import check_averages
from debubble.plans import Plan
from debubble.runtime.distributed.gradient_norm import sum_of_squares
from debubble.runtime.distributed.sharding import inner_tensors, local_bytes, local_tensor
from debubble.runtime.models.hf.names import HEAD_TABLE
from debubble.runtime.parameters.averages import WeightAverages
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.parameters.optimizer_states import OptimizerSnapshot, parameters_of, settings_of

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

    def squares(self) -> float:
        """Sum of the squares of the gradients of this device, in double precision."""
        return sum(map(self._squares_of, self._counted))

    def _squares_of(self, stage: int) -> float:
        return sum_of_squares(local_tensor(p.grad) for p in self._counted[stage] if p.grad is not None)

    def finish(self, stage: int) -> float:
        """Let the masters of a stage have their whole gradients.  Returns the sum of their squares."""
        self._part.weights[stage].finish()
        return self._squares_of(stage)

    def step(self, stage: int) -> None:
        """S, as the plan says: with the stage's gradients as they are; not at all if one of them is inf or NaN."""
        if math.isfinite(self.finish(stage)):
            self.inside[stage].step()
        self.inside[stage].zero_grad()

    def snapshot_of(self, optimizer: Optimizer) -> OptimizerSnapshot:
        """The copies that take this optimizer's steps back."""
        with self._lock:
            return self._snapshots.setdefault(optimizer, OptimizerSnapshot(optimizer))

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


def _rebound(before: Optimizer, made: Optimizer) -> Optimizer:
    """The optimizer of before with its settings, on the parameters of another and without states."""
    settings = settings_of(before)
    before.param_groups = made.param_groups
    for group, setting in zip(before.param_groups, settings, strict=False):
        group.update(setting)
    before.state.clear()
    return before
