"""Post-validation: an update begins before the norm of all gradients is known, and is taken back if it was wrong.

Source: Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), section 4; ChronosPipe, section 5.1, for steps on the
host.  A synchronous step waits at the end for the last device, so that the makespan counts.  Here every device hands
on what is known of the norm, steps if that much lets it, and continues with the next step's forwards; the whole comes
back before its first backward, which no device could begin earlier anyway.  So the span per device counts.

Unlike there, taking back is exact: parameters and states are copied before a step ahead (see `OptimizerSnapshot`), and
the forwards that the wrong parameters have gone through run again.  After a step that had to be taken back, the next is
not taken ahead: where gradients are clipped, they often are for many steps.
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
    """A step whose update is right."""

    step: int
    """Counted from 0."""
    loss: float
    """Mean over all targets."""
    norm: float
    """Norm of all gradients, before clipping."""
    skipped: bool = False
    """True if there was an inf or NaN in a gradient, so that no parameter was changed."""
    rolled_back: int = 0
    """Devices that had stepped and took it back."""


@dataclass(frozen=True)
class _PendingUpdate:
    step: int
    update: TentativeUpdate
    total: Future[PartialSums]
    overlaps: bool
    """True if devices may have gone on before all was known."""


class PostValidatedSteps:
    """Steps and updates of a device, each validated while the next one runs."""

    def __init__(self, runner: StepRunner) -> None:
        if runner.loss_scale is not None:
            raise InputError("fp16 skips steps: it cannot update before the norm is known, so call `step`.")
        if runner.operations.arena is not None:
            raise InputError("An arena's addresses wait for backwards: call `step`, which begins after the update.")
        self._runner, self._relay = runner, runner.ranks.open_relay()
        self._speculative = SpeculativeInterpreter(runner.operations, runner.status)
        self._pending: _PendingUpdate | None = None
        """The last update, while it is not finished."""
        self._optimistic = True
        """False after an update that was wrong."""

    def run(self, batch: Batch, *, max_norm: float) -> StepResult | None:
        """Step and update; the result of the step before this one."""
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
        own = runner.gradients.own_sums(float(state.loss(on=runner.operations.lanes.device)))
        with runner.status.phase("updates parameters, if what is known of the norm lets it", local=False):
            self._begin_update(update, own)
        runner.taken += 1
        return result

    def finish(self) -> StepResult | None:
        """Validate the last update and make it right; None if there is none."""
        if self._pending is None:
            return None
        with self._runner.status.phase("settles the update", local=False):
            result = self._finish_update()
            self._runner.batches.check_counted()
            return result

    def _begin_update(self, update: TentativeUpdate, own: PartialSums) -> None:
        """Hand on this device's sums after the program, and step if what is known lets it."""
        overlaps = self._optimistic and not self._relay.alone
        ahead = overlaps and not self._relay.last
        known, total = self._relay.take_turn(
            own, steps_ahead=lambda known: update.ahead or (ahead and known.within(update.max_norm))
        )
        self._pending = _PendingUpdate(self._runner.taken, update, total, overlaps)
        if ahead:
            update.step_outside(known)
        else:
            update.finish(total.result(), update.max_norm)

    def _is_valid(self) -> bool:
        """Wait until all is known: whether what was computed since may be kept.  If so, its gradients are cleared."""
        if self._pending is None or not self._pending.overlaps:
            return True
        total, update = self._pending.total.result(), self._pending.update
        if not total.within(update.max_norm):
            return False
        update.finish(total, update.max_norm)
        return True

    def _finish_update(self) -> StepResult | None:
        """Wait until all is known, and make the update right.  None if there is none."""
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
