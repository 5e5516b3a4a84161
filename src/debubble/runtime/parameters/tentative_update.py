"""An update that begins before the norm of all gradients is known, and is made right when it is."""

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
        self._try(self._optimizers.inside[stage], PartialSums(self._optimizers.finish(stage)))

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
