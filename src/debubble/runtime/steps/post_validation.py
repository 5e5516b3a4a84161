"""Post-validation: an update begins before the norm of all gradients is known, and is rolled back if it was wrong.

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 4; ChronosPipe, section 5.1, for steps on the
host.  A synchronous step ends when the last device does.  Here every device passes on its partial sums, steps if they
need no clipping so far, and continues with the next step's forwards; the total arrives before its first backward, which
could not begin earlier anyway.  So the step time is the longest span of a device, not the makespan.

Unlike in the sources, rollback is exact: parameters and states are copied before an early step (see
`OptimizerSnapshot`), and forwards with wrong parameters run again.  After a rollback the next step does not update
early, as clipping often lasts for many steps.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import torch

from debubble.ir import InputError
from debubble.runtime.assembly import loss_dtype
from debubble.runtime.distributed.gradient_norm import PartialSums
from debubble.runtime.execution.speculation import SpeculativeInterpreter
from debubble.runtime.parameters.tentative_update import TentativeUpdate
from debubble.runtime.steps.batch import Batch
from debubble.runtime.steps.training_step import MEETING_PHASE, StepRunner


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step whose update is validated."""

    step: int
    """Index of the step, from 0."""
    loss: float
    """Mean over all targets."""
    norm: float
    """Norm of all gradients, before clipping."""
    skipped: bool = False
    """True if a gradient had an inf or NaN, so that no parameter changed."""
    rolled_back: int = 0
    """Number of devices that rolled an early step back."""


@dataclass(frozen=True)
class _PendingUpdate:
    step: int
    update: TentativeUpdate
    total: Future[PartialSums]
    overlaps: bool
    """True if devices may have continued before the total was known."""


class PostValidatedSteps:
    """Runs a device's steps and updates, each of which is validated while the next step runs."""

    def __init__(self, runner: StepRunner) -> None:
        if runner.loss_scale is not None:
            raise InputError("fp16 skips steps: it cannot update before the norm is known, so call `step`.")
        if runner.operations.arena is not None:
            raise InputError("An arena's addresses wait for backwards: call `step`, which begins after the update.")
        self._runner, self._relay = runner, runner.ranks.open_relay()
        self._speculative = SpeculativeInterpreter(runner.operations, runner.status)
        self._pending: _PendingUpdate | None = None
        """The last update, until it is finished."""
        self._optimistic = True
        """False after a rollback."""

    def run(self, batch: Batch, *, max_norm: float) -> StepResult | None:
        """Run a step and its update; returns the result of the previous step."""
        runner = self._runner
        runner.updates.check_finished()
        runner.status.begin_step()
        with runner.status.phase(MEETING_PHASE, local=False):
            checked = runner.inputs.read(batch)
            if self._pending is not None:
                targets, runner.measured.origin = runner.batches.count(checked)
            else:
                targets, runner.measured.origin = runner.batches.agree(checked)
                runner.gradients.clear()
        if self._speculative.operations is not runner.operations:  # another plan continues the run
            self._speculative = SpeculativeInterpreter(runner.operations, runner.status)
        update = TentativeUpdate(runner.gradients.optimizers, max_norm)
        state = runner.begin(checked, targets, update.step)
        executed = self._speculative.run_ahead(state, is_valid=self._is_valid)
        result = self._finish_update()
        if executed is None:
            state = runner.begin(checked, targets, update.step)
            executed = runner.interpreter.run(state)
        runner.measured.executed = executed
        runner.finish_gradients()
        local = runner.gradients.device_sums(float(state.loss(on=runner.operations.lanes.device)))
        with runner.status.phase("updates parameters, if what is known of the norm lets it", local=False):
            self._begin_update(update, local)
        runner.taken += 1
        return result

    def finish(self) -> StepResult | None:
        """Validate the last update and correct it; None if there is none."""
        if self._pending is None:
            return None
        with self._runner.status.phase("settles the update", local=False):
            result = self._finish_update()
            self._runner.batches.check_counted()
            return result

    def _begin_update(self, update: TentativeUpdate, local: PartialSums) -> None:
        """Pass on this device's sums after the program, and step if the sums so far allow it."""
        overlaps = self._optimistic and not self._relay.has_one_rank
        ahead = overlaps and not self._relay.last
        known, total = self._relay.take_turn(
            local, steps_ahead=lambda known: update.ahead or (ahead and known.within(update.max_norm))
        )
        self._pending = _PendingUpdate(self._runner.taken, update, total, overlaps)
        if ahead:
            update.step_outside(known)
        else:
            update.finish(total.result(), update.max_norm)

    def _is_valid(self) -> bool:
        """Wait for the total, and return whether the early update is right; if so, finish it."""
        if self._pending is None or not self._pending.overlaps:
            return True
        total, update = self._pending.total.result(), self._pending.update
        if not total.within(update.max_norm):
            return False
        update.finish(total, update.max_norm)
        return True

    def _finish_update(self) -> StepResult | None:
        """Wait for the total, and correct the update.  None if there is none."""
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        total, update = pending.total.result(), pending.update
        update.finish(total, update.max_norm)
        self._optimistic = total.within(update.max_norm)
        return StepResult(
            step=pending.step,
            loss=torch.tensor(total.loss, dtype=loss_dtype(self._runner.plan)).item(),
            norm=total.norm,
            skipped=not total.finite,
            rolled_back=0 if self._optimistic else total.ahead,
        )
