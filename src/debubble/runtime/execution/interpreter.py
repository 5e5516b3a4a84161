"""Interprets one device's part of a Program with tensors.

Every queue of the Program is walked by a thread that stays from step to step (the compute lane by the caller): an
instruction starts when what it waits for on this device has happened, acts, and marks its start and end.  Waits for
instructions of other devices are met by messages alone: a receive ends when the message is there; every other such wait
predicts a time and constrains nothing.  As every send and receive has a thread that does nothing else at that moment, a
Program without a cycle cannot hang.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from debubble.ir import Kind, Lane, Op, Queue
from debubble.runtime.distributed.transport import on_lane
from debubble.runtime.execution.lanes import LaneThread
from debubble.runtime.execution.operations import Operations, StepState
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import (
    ExecutedInstruction,
    StepSynchronizer,
    local_waits,
    speculative_instructions,
)
from debubble.runtime.failures import DeviceMemoryError, explained_shortage


@dataclass
class Interpreter:
    """Runs a device's part of the program that its operations are for, again every step."""

    operations: Operations
    status: RankStatus = field(default_factory=RankStatus)

    def __post_init__(self) -> None:
        self.program, self.lanes = self.operations.program, self.operations.lanes
        self._queues = self.program.queues_of[self.operations.device]
        self._completed_gradients = self._gradients_by_last_backward()
        self._speculative = speculative_instructions(self.program)
        self._local_waits = local_waits(self.program, self.operations.device)
        self._threads: list[LaneThread] = []

    def run(self, state: StepState) -> list[ExecutedInstruction]:
        """Run one step.  Returns what ran and when; raises the first error of any lane."""
        executed = self.run_ahead(state, is_valid=lambda: True)
        assert executed is not None
        return executed

    def run_ahead(self, state: StepState, *, is_valid: Callable[[], bool]) -> list[ExecutedInstruction] | None:
        """Run one step before it is known whether the last update of its parameters is taken back.

        Before the first operation that changes gradients, the compute lane asks; if they do not, the step ends there,
        nothing is left of it, and the answer is None.  All ranks must find the same.
        """
        step = StepSynchronizer(self.program, self._local_waits, self.lanes, is_valid, self.status)

        # Start all lanes but the compute lane, each on its thread
        transfers = [queue for queue in self._queues if queue.lane is not Lane.COMPUTE]
        services = enumerate(self.operations.peer_offload.service_loops())
        tasks = [partial(step.guard, partial(self._walk, queue, step, state)) for queue in transfers]
        tasks += [partial(step.guard, partial(self._serve_peer, number, loop, step)) for number, loop in services]
        # Until the step has ended well its threads belong to it: those of one that fails may wait for ever.
        threads, self._threads = self._threads or [LaneThread() for _ in tasks], []
        ends = [thread.start(task) for thread, task in zip(threads, tasks, strict=True)]

        # Compute, here
        for queue in self._queues:
            if queue.lane is Lane.COMPUTE:
                step.guard(partial(self._walk, queue, step, state))
        step.guard(step.validate)  # a program without backwards has not asked

        # Wait for the other lanes
        for end in ends:
            step.join(end)
        step.check()
        self._threads = threads
        self.lanes.end_step()
        if step.wait_validated():
            return step.executed

        # The parameters were not valid: drop what the step has left
        self.operations.forget()
        return None

    def _walk(self, queue: Queue, step: StepSynchronizer, state: StepState) -> None:
        """Run the instructions of one lane, in order."""
        with self.lanes.lane(queue.lane, queue.peer), on_lane(queue.lane):
            for index in queue.instructions:
                instruction = self.program.instructions[index]
                if index not in self._speculative:
                    if queue.lane is Lane.COMPUTE:
                        step.validate()
                    if not step.wait_validated():
                        return
                step.wait(instruction)
                start = step.begin(index)
                with explained_shortage(partial(DeviceMemoryError, instruction)):
                    self.operations.execute(instruction, state, step.unit_done(index))
                for op in self._completed_gradients.get(index, ()):
                    self.operations.set_aside(op)
                step.end(index, start)

    def _serve_peer(self, number: int, loop: Callable[[], None], step: StepSynchronizer) -> None:
        if step.wait_validated():
            with self.lanes.service_stream(number):
                loop()

    def _gradients_by_last_backward(self) -> dict[int, list[Op]]:
        """Each G and D by the instruction of the backward after which its gradients are complete."""
        completed: dict[int, list[Op]] = {}
        for instruction in self.program.instructions:
            if instruction.op.kind in (Kind.G, Kind.D) and instruction.device == self.operations.device:
                for wait in instruction.waits:
                    if self.program.instructions[wait.instruction].op.kind in (Kind.B, Kind.W):
                        completed.setdefault(wait.instruction, []).append(instruction.op)
        return completed
