"""An update that begins before the norm of all gradients is known, and is corrected afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from debubble.runtime.distributed.gradient_norm import PartialSums
from debubble.runtime.parameters.optimizer_states import (
    OptimizerSnapshot,
    change_settings,
    parameters_of,
    scale_gradients,
    settings_of,
)
from debubble.runtime.parameters.optimizers import DeviceOptimizers


class TentativeUpdate:
    """The update of one step: optimizers step early if the sums known so far allow it, else in `finish`.

    Gradients are kept until `finish`.

    Args:
        optimizers: The device's optimizers.
        max_norm: The expected clipping norm; that of `finish` decides.
        optimistic: Whether optimizers may step before the norm of all gradients is known.
    """

    def __init__(self, optimizers: DeviceOptimizers, max_norm: float = math.inf, *, optimistic: bool = True) -> None:
        self._optimizers, self._optimistic = optimizers, optimistic
        self.max_norm = max_norm
        self._steps: list[_TentativeStep] = []
        self._finished = False

    @property
    def ahead(self) -> bool:
        """True if any optimizer has stepped early."""
        return any(step.snapshot is not None for step in self._steps)

    def step(self, stage: int) -> None:
        """S: only the stage's own gradients are known."""
        self._try(self._optimizers.inside[stage], PartialSums(self._optimizers.finish(stage)))

    def step_outside(self, known: PartialSums) -> None:
        """Step the other optimizers, after the program."""
        for optimizer in self._optimizers.outside:
            self._try(optimizer, known)

    def finish(self, total: PartialSums, max_norm: float) -> None:
        """Correct wrong steps, step optimizers that have not stepped, and clear the gradients; once."""
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
    """Settings of the step, such as the learning rate: at its correction the optimizer may have the next step's."""
    snapshot: OptimizerSnapshot | None
    """The snapshot before its early step; None: it has not stepped."""

    def correct(self, total: PartialSums, max_norm: float) -> None:
        """Roll the step back, if it was taken, and step with the right clipping, or not at all."""
        if self.snapshot is not None:
            self.snapshot.restore()
        if total.finite:
            scale_gradients(parameters_of(self.optimizer), total.scale(max_norm))
            later = settings_of(self.optimizer)
            change_settings(self.optimizer, self.settings)
            self.optimizer.step()
            change_settings(self.optimizer, later)
