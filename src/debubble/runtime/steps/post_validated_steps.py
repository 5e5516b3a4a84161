"""Steps whose update begins before the norm of all gradients is known (see parameters/post_validation.py)."""

from __future__ import annotations

from debubble.ir import InputError
from debubble.runtime.assembly import loss_dtype
from debubble.runtime.execution.speculation import SpeculativeInterpreter
from debubble.runtime.parameters.post_validation import PostValidation, StepResult
from debubble.runtime.steps.batch import Batch
from debubble.runtime.steps.training_step import MEETING_PHASE, StepRunner


class PostValidatedSteps:
    """Steps and updates of a device, each validated while the next one runs."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        if runner.loss_scale is not None:
            raise InputError("fp16 skips steps: it cannot update before the norm is known, so call `step`.")
        if runner.operations.arena is not None:
            raise InputError("An arena's addresses wait for backwards: call `step`, which begins after the update.")
        self._validation = PostValidation(runner.ranks.open_relay(), loss_dtype=loss_dtype(runner.plan))
        self._speculative = SpeculativeInterpreter(runner.operations, runner.status)

    def run(self, batch: Batch, *, max_norm: float) -> StepResult | None:
        """Step and update; the result of the step before this one."""
        runner, validation = self._runner, self._validation
        runner.updates.check_finished()
        runner.status.begin_step()
        with runner.status.phase(MEETING_PHASE, local=False):
            checked = runner.inputs.read(batch)
            if validation.pending:
                targets, runner.measured.origin = runner.batches.count(checked)
            else:
                targets, runner.measured.origin = runner.batches.agree(checked)
                runner.gradients.clear()
        if self._speculative.operations is not runner.operations:  # another plan continues the run
            self._speculative = SpeculativeInterpreter(runner.operations, runner.status)
        update = runner.gradients.optimizers.tentative_update(max_norm)
        state = runner.begin(checked, targets, update.step)
        executed = self._speculative.run_ahead(state, is_valid=validation.is_valid)
        result = validation.finish()
        if executed is None:
            state = runner.begin(checked, targets, update.step)
            executed = runner.interpreter.run(state)
        runner.measured.executed = executed
        runner.finish_gradients()
        own = runner.gradients.own_sums(float(state.loss(on=runner.operations.lanes.device)))
        with runner.status.phase("updates parameters, if what is known of the norm lets it", local=False):
            validation.begin(runner.taken, update, own)
        runner.taken += 1
        return result

    def finish(self) -> StepResult | None:
        """Validate the last update and make it right; None if there is none."""
        if not self._validation.pending:
            return None
        with self._runner.status.phase("settles the update", local=False):
            result = self._validation.finish()
            self._runner.batches.check_counted()
            return result
