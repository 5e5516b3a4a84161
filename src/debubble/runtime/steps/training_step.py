"""One training step on one device: batch, forward and backward, gradients, loss."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from debubble.ir import Program
from debubble.plans import Plan
from debubble.runtime.assembly import loss_dtype
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.execution.operations import StepState, TensorOperations
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.memory.arena import Arena
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.parameters.optimizers import LossScale
from debubble.runtime.steps.batch import Batch, StepBatch
from debubble.runtime.steps.batch_agreement import BatchAgreement
from debubble.runtime.steps.measurements import Measurements
from debubble.runtime.steps.step_inputs import StepInputs
from debubble.runtime.steps.updates import DeviceGradients, ParameterUpdates
from debubble.runtime.topology import Ranks

MEETING_PHASE = "meets the other ranks"
"""The phase of a step in which ranks check that they have the same batch."""


@dataclass
class StepRunner:
    """Runs training steps on the stages of one device.

    `gradients` and `updates` are replaced when units move between devices.
    """

    plan: Plan
    seed: int
    ranks: Ranks
    inputs: StepInputs
    batches: BatchAgreement
    status: RankStatus
    measured: Measurements
    loss_scale: LossScale | None
    operations: TensorOperations
    gradients: DeviceGradients
    updates: ParameterUpdates
    taken: int = 0
    """Steps so far, which determine dropout masks."""

    def __post_init__(self) -> None:
        self.interpreter = Interpreter(self.operations, self.status)

    def run(self, batch: Batch) -> Tensor:
        """Run forward and backward of one batch; returns the mean loss over the targets of all replicas."""
        self.updates.check_finished()
        self.status.begin_step()
        with self.status.phase(MEETING_PHASE, local=False):
            checked = self.inputs.read(batch)
            targets, self.measured.origin = self.batches.agree(checked)
        with self.gradients.accumulated():
            state = self.begin(checked, targets, self.updates.step_stage)
            self.measured.executed = self.interpreter.run(state)
            self.updates.end_program()
            self.finish_gradients()
        self.taken += 1
        return self._mean_loss(state)

    def switch_plan(self, plan: Plan, program: Program, device_part: DevicePart) -> None:
        """Continue with another plan of the same model and its program, on these stages."""
        self.plan = plan
        arena = self.operations.arena
        if arena is not None:
            arena = Arena.from_plan(plan, self.ranks.device, on=self.operations.lanes.device)
        self.measured.activations.arena = arena
        self.operations = replace(
            self.operations,
            program=program,
            stages=device_part.stages,
            weights=device_part.weights,
            arena=arena,
        )
        self.interpreter = Interpreter(self.operations, self.status)
        self.measured.count_next_step()

    def begin(self, batch: StepBatch, targets: int, step_stage: Callable[[int], None]) -> StepState:
        """Refresh working parameters, begin to measure, and return the initial state of a step."""
        with self.status.phase("readies parameters", local=False):
            for weights in self.operations.weights.values():
                weights.loss_scale = self._scale
                weights.refresh()
        self.measured.step = self.taken
        self.measured.begin_step(batch.shapes, needs_ledger=self.operations.needs_ledger)
        return self.inputs.state(
            batch,
            targets,
            seed=zlib.crc32(f"{self.seed} {self.taken} {self.ranks.replica}".encode()),
            scale=self._scale,
            step_stage=step_stage,
            counts_memory=self.measured.counts_memory,
            slices=self.plan.slice_tokens,
        )

    def finish_gradients(self) -> None:
        """Reduce the gradients."""
        if self.ranks.replica_group.shards_states:
            # With ZeRO, gradients take more memory before they are reduced than afterwards.
            self.measured.count_gradients()
        self.gradients.finish()
        self.measured.count_gradients()

    def _mean_loss(self, state: StepState) -> Tensor:
        with self.status.phase("sums the loss", local=False):
            total = state.loss(on=self.operations.lanes.device) / self._scale
            self.ranks.sum_over_replicas(total)
            self.ranks.sum_over_pipeline(total)
            return total.to(loss_dtype(self.plan))

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value
