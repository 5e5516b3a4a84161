"""The optimizers of one device, and the loss scale of fp16."""

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
    """Optimizers that the program steps inside the step, one per stage (S), and the one that steps the rest after it.

    Args:
        plan: The plan that runs.
        device_part: The stages of this device.
        make: Makes the optimizer of a list of parameters; None: the user steps the parameters.
        shares_table: Whether another rank has a copy of this rank's tied table.
        ema_decay: Decay of the averages of the parameters; None: no averages.

    Raises:
        InputError: The plan steps stages, or there are averages, but no `make`.
    """

    def __init__(
        self,
        plan: Plan,
        device_part: DevicePart,
        make: MakeOptimizer | None,
        *,
        shares_table: bool,
        ema_decay: float | None = None,
    ) -> None:
        self._device_part = device_part
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
        self.averages = None if ema_decay is None else WeightAverages(device_part.parameters(), ema_decay)
        """Averages of the parameters; None if the run has none."""
        self.on_host = plan.schedule.host_steps & set(stepped)
        """Stages, of all devices, that hosts step inside the step."""
        self.on_device = set(stepped) - self.on_host
        """Stages, of all devices, that devices step inside the step."""
        self.inside: dict[int, Optimizer] = {}
        """This device's optimizers that are stepped inside the step, by stage."""
        self.outside: list[Optimizer] = []
        if make is not None:
            self.inside = {s: make(device_part.parameters_of(s)) for s in stepped if s in device_part.stages}
            inside = {p for optimizer in self.inside.values() for p in parameters_of(optimizer)}
            rest = [p for p in dict.fromkeys(device_part.masters.values()) if p.requires_grad and p not in inside]
            self.outside = [make(rest)] if rest else []
        self._counted = self._parameters_in_norm(shares_table)

    @property
    def all(self) -> list[Optimizer]:
        """All optimizers of the device."""
        return [*self.outside, *self.inside.values()]

    def continue_with(self, before: DeviceOptimizers) -> None:
        """Rebind earlier optimizers to these parameters; their settings, and learning-rate schedulers, remain."""
        self.outside = [*map(_rebind, before.outside, self.outside)] or self.outside
        self.inside = {stage: _rebind(before.inside[stage], made) for stage, made in self.inside.items()}

    @property
    def static_bytes(self) -> int:
        """Bytes on the device of parameters, working copies, gradients, optimizer states and snapshots.

        Those of host-stepped stages count as the host's, even if both are the CPU.
        """
        return self.lasting_bytes + self.gradient_bytes

    @property
    def lasting_bytes(self) -> int:
        """Bytes that are permanent: all but gradients."""
        tensors = (*self._stepped, *self._working_tensors(), *self._optimizer_tensors())
        plain = [inner for t in map(local_tensor, tensors) for inner in (inner_tensors(t) or [t])]
        # A parameter that is not gathered has an empty storage.
        bytes_at = {t.untyped_storage().data_ptr(): t.nbytes for t in plain if t.untyped_storage().nbytes()}
        return sum(bytes_at.values()) + self._snapshot_bytes

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the current gradients."""
        gradients = [p.grad for p in self._stepped if p.grad is not None]
        gradients += [gradient for weights in self._device_part.weights.values() for gradient in weights.gradients]
        # A master may be the working parameter, and then its gradient comes twice.
        return sum(map(local_bytes, {id(gradient): gradient for gradient in gradients}.values()))

    @cached_property
    def _stepped(self) -> list[nn.Parameter]:
        """Parameters that the device steps."""
        stages = self._device_part.weights.values()
        hosted = {p for weights in stages if weights.on_host for p in weights.masters.values()}
        return [p for p in self._device_part.parameters() if p not in hosted]

    def _working_tensors(self) -> Iterator[Tensor]:
        """The working parameters, and this replica's rows of them."""
        for stage in self._device_part.stages.values():
            yield from (p for unit in stage.units for p in unit.parameters())
        for weights in self._device_part.weights.values():
            yield from weights.shards

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        """Optimizer states and averages of the parameters that the device steps."""
        states = {p: state.values() for optimizer in self.all for p, state in optimizer.state.items()}
        for parameter in self._stepped:
            average = None if self.averages is None else self.averages.get(parameter)
            yield from (t for t in (*states.get(parameter, ()), average) if isinstance(t, Tensor))

    @property
    def _snapshot_bytes(self) -> int:
        stages = self._device_part.weights.items()
        hosted = {self.inside[s] for s, weights in stages if weights.on_host and s in self.inside}
        return sum(snapshot.nbytes for optimizer, snapshot in self._snapshots.items() if optimizer not in hosted)

    def squares(self) -> float:
        """Sum of the squares of this device's gradients, in double precision."""
        return sum(map(self._squares_of, self._counted))

    def _squares_of(self, stage: int) -> float:
        return sum_of_squares(local_tensor(p.grad) for p in self._counted[stage] if p.grad is not None)

    def finish(self, stage: int) -> float:
        """Reduce a stage's gradients to its masters, and return the sum of their squares."""
        self._device_part.weights[stage].finish()
        return self._squares_of(stage)

    def step(self, stage: int) -> None:
        """S: step a stage without clipping; skip it if one of its gradients is inf or NaN."""
        if math.isfinite(self.finish(stage)):
            self.inside[stage].step()
        self.inside[stage].zero_grad()

    def snapshot_of(self, optimizer: Optimizer) -> OptimizerSnapshot:
        """The snapshot of an optimizer, made once."""
        with self._lock:
            return self._snapshots.setdefault(optimizer, OptimizerSnapshot(optimizer))

    def _parameters_in_norm(self, shares_table: bool) -> dict[int, list[nn.Parameter]]:
        """The parameters that count in the norm, by stage: a tied table counts once, in the first stage."""
        parameters: dict[int, list[nn.Parameter]] = {}
        seen: set[nn.Parameter] = set()
        for stage, weights in sorted(self._device_part.weights.items()):
            parameters[stage] = []
            for name, parameter in weights.masters.items():
                second = shares_table and name == HEAD_TABLE
                if parameter not in seen and not second and weights.divisions[name].counts_in_norm:
                    parameters[stage].append(parameter)
                    seen.add(parameter)
        return parameters


@dataclass
class LossScale:
    """The loss scale of fp16: it halves when a gradient overflows, and doubles after many steps without overflow.

    The rule is that of Micikevicius et al. (arXiv:1710.03740, section 3.2), with the numbers of torch's GradScaler.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    """Steps without overflow after which it doubles."""
    steps_since: int = 0
    """Steps since it changed."""

    def update(self, *, finite: bool) -> None:
        """Update the scale after a step; `finite`: whether all gradients were."""
        self.steps_since += 1
        if not finite:
            self.value, self.steps_since = self.value / 2, 0
        elif self.steps_since == self.growth_interval:
            self.value, self.steps_since = self.value * 2, 0


def _rebind(before: Optimizer, made: Optimizer) -> Optimizer:
    """Rebind an optimizer to the parameters of another one, with its settings and without states."""
    settings = settings_of(before)
    before.param_groups = made.param_groups
    for group, setting in zip(before.param_groups, settings, strict=False):
        group.update(setting)
    before.state.clear()
    return before
