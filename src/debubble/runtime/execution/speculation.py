"""Steps that begin before the last parameter update is validated (post-validation of the optimizer step).

Instructions that no backward precedes may run speculatively: the forwards of the warm-up with their messages, transfers
and recomputations.  They change no parameter or gradient, so they can run again.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from debubble.ir import Kind, Lane, Op, Program, Queue
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes
from debubble.runtime.execution.operations import StepState
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import (
    ExecutedInstruction,
    InstructionEvent,
    LaneInstruction,
    StepSynchronizer,
)


class SpeculativeInterpreter(Interpreter):
    """An interpreter whose steps may begin before their parameters are validated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._speculative = speculative_instructions(self.program)

    def posted_sends(self, queues: Sequence[Queue]) -> Mapping[int, Sequence[int]]:
        """Post no sends on the compute lane: sends may have to wait for validation while it continues."""
        return {}

    def compute(self, step: StepSynchronizer, state: StepState) -> None:
        """Run the compute lane, and validate at the end at the latest."""
        assert isinstance(step, SpeculativeStep)
        super().compute(step, state)
        step.validate()

    def serve_peer(self, number: int, loop: Callable[[], None], step: StepSynchronizer) -> None:
        """Serve a device that offloads here, once the parameters are validated."""
        assert isinstance(step, SpeculativeStep)
        if step.wait_validated():
            super().serve_peer(number, loop, step)

    def run_ahead(self, state: StepState, *, is_valid: Callable[[], bool]) -> list[ExecutedInstruction] | None:
        """Run one step before it is known whether the last parameter update is rolled back.

        The compute lane calls `is_valid` before the first operation that changes gradients.  If the parameters are
        invalid, the step ends there, its tensors are dropped, and the result is None.  `is_valid` must agree on all
        ranks.
        """
        step = SpeculativeStep(self.events, self.lanes, self.status, self._speculative, is_valid)
        self.run_lanes(step, state)
        if step.wait_validated():
            return step.executed
        # The parameters are invalid: drop the step's tensors
        self.operations.forget()
        return None


class SpeculativeStep(StepSynchronizer):
    """The synchronization of a step whose parameters may turn out to be invalid.

    Args:
        events: The events that instructions of this device wait for.
        lanes: The lanes of this device.
        status: Records what the lanes do.
        speculative: Indices of the instructions that may run before validation.
        is_valid: Whether the step's parameters are valid; called before the first change of a gradient.
    """

    def __init__(
        self,
        events: Collection[InstructionEvent],
        lanes: CpuLanes | CudaLanes,
        status: RankStatus,
        speculative: Collection[int],
        is_valid: Callable[[], bool],
    ) -> None:
        super().__init__(events, lanes, status)
        self._speculative, self._is_valid = speculative, is_valid
        self._validated, self._valid = threading.Event(), False

    def wait(self, item: LaneInstruction) -> None:
        """Return when an instruction may run: the compute lane validates, the other lanes wait for it."""
        if item.number not in self._speculative:
            if item.instruction.lane is Lane.COMPUTE:
                self.validate()
            if not self.wait_validated():
                raise _InvalidParametersError
        super().wait(item)

    def guard(self, task: Callable[[], None]) -> None:
        """Run the task of a lane, which ends if the parameters turn out to be invalid."""

        def until_invalid() -> None:
            with suppress(_InvalidParametersError):
                task()

        super().guard(until_invalid)

    def wait_validated(self) -> bool:
        """Wait for the validation, and return whether the parameters are valid."""
        self._validated.wait()
        self.check()
        return self._valid

    def fail(self, error: BaseException) -> None:
        """End the step with this error, on all lanes."""
        super().fail(error)
        self._validated.set()

    def validate(self) -> None:
        """Validate the parameters, once."""
        if not self._validated.is_set():
            self._valid = self._is_valid()
            self._validated.set()


class _InvalidParametersError(Exception):
    """The last parameter update is rolled back, so the step ends."""


UPDATING_KINDS = (Kind.B, Kind.I, Kind.W, Kind.G, Kind.D, Kind.S)
"""Operation kinds that change gradients or parameters."""


def speculative_instructions(program: Program) -> frozenset[int]:
    """Indices of instructions that depend on no gradient change of any rank; sends only with their receives."""
    followers: list[list[int]] = [[] for _ in program.instructions]
    pending: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for wait in instruction.waits:
            followers[wait.instruction].append(index)
        kind, stage, j = instruction.op
        if kind in UPDATING_KINDS or (kind in (Kind.O, Kind.L) and instruction.peer is not None):
            pending.append(index)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            # A message is sent only if it is received, as the sender would wait otherwise.
            send = Op(Kind.SEND_F, stage - 1, j) if kind is Kind.RECV_F else Op(Kind.SEND_B, stage + 1, j)
            followers[index].append(program.index[send])
    for queue in program.queues:
        for earlier, later in itertools.pairwise(queue.instructions):
            followers[earlier].append(later)
    binding = set(pending)
    for index in pending:
        for follower in followers[index]:
            if follower not in binding:
                binding.add(follower)
                pending.append(follower)
    return frozenset(range(len(program.instructions))) - binding
