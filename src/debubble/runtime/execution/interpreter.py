"""Interprets one device's part of a Program with tensors.

Every queue of the Program is walked by a thread that stays from step to step (the compute lane by the caller): an
instruction starts when what it waits for on this device has happened, acts, and marks its start and end.  Waits for
instructions of other devices are met by messages alone: a receive ends when the message is there; every other such wait
predicts a time and constrains nothing.  As every send and receive has a thread that does nothing else at that moment, a
Program without a cycle cannot hang.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from debubble.ir import Kind, Lane, Op, Queue
from debubble.runtime.distributed.transport import on_lane
from debubble.runtime.execution.lanes import LaneThread
from debubble.runtime.execution.operations import Operations, StepState
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import (
    ExecutedInstruction,
    LaneInstruction,
    StepSynchronizer,
    local_waits,
)
from debubble.runtime.failures import DeviceMemoryError, is_out_of_memory


@dataclass
class Interpreter:
    """Runs a device's part of the program that its operations are for, again every step."""

    operations: Operations
    status: RankStatus = field(default_factory=RankStatus)

    def __post_init__(self) -> None:
        self.program, self.lanes = self.operations.program, self.operations.lanes
        self.events = local_waits(self.program, self.operations.device)
        """What instructions of this device wait for on it."""
        completed = self._gradients_by_last_backward()
        self._queues = [
            (queue, [self._lane_instruction(index, completed.get(index, ())) for index in queue.instructions])
            for queue in self.program.queues_of[self.operations.device]
        ]
        self._threads: list[LaneThread] = []

    def run(self, state: StepState) -> list[ExecutedInstruction]:
        """Run one step.  Returns what ran and when; raises the first error of any lane."""
        step = StepSynchronizer(self.events, self.lanes, self.status)
        self.run_lanes(step, state)
        return step.executed

    def run_lanes(self, step: StepSynchronizer, state: StepState) -> None:
        """Run the instructions of all lanes, each as soon as the step lets it.  Raises the first error of any lane."""
        # Start all lanes but the compute lane, each on its thread
        transfers = [queue for queue in self._queues if queue[0].lane is not Lane.COMPUTE]
        services = enumerate(self.operations.peer_offload.service_loops())
        tasks = [partial(step.guard, partial(self._walk, *queue, step, state)) for queue in transfers]
        tasks += [partial(step.guard, partial(self._serve_peer, number, loop, step)) for number, loop in services]
        # Until the step has ended well its threads belong to it: those of one that fails may wait for ever.
        threads, self._threads = self._threads or [LaneThread() for _ in tasks], []
        ends = [thread.start(task) for thread, task in zip(threads, tasks, strict=True)]

        # Compute, here
        for queue in self._queues:
            if queue[0].lane is Lane.COMPUTE:
                step.guard(partial(self._walk, *queue, step, state))
        step.guard(step.end_compute)

        # Wait for the other lanes
        for end in ends:
            step.join(end)
        step.check()
        self._threads = threads
        self.lanes.end_step()

    def _walk(
        self, queue: Queue, instructions: Sequence[LaneInstruction], step: StepSynchronizer, state: StepState
    ) -> None:
        """Run the instructions of one lane, in order."""
        with self.lanes.lane(queue.lane, queue.peer), on_lane(queue.lane):
            for item in instructions:
                if not step.admits(item):
                    return
                step.wait(item)
                start = step.begin(item)
                try:
                    self.operations.execute(item.instruction, state, step.unit_done(item))
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise DeviceMemoryError(item.instruction, error) from error
                    raise
                for op in item.completes:
                    self.operations.set_aside(op)
                step.end(item, start)

    def _serve_peer(self, number: int, loop: Callable[[], None], step: StepSynchronizer) -> None:
        if step.wait_validated():
            with self.lanes.service_stream(number):
                loop()

    def _lane_instruction(self, index: int, completes: Sequence[Op]) -> LaneInstruction:
        instruction = self.program.instructions[index]
        waits = [(wait.instruction, wait.moment) for wait in instruction.waits]
        return LaneInstruction(
            index,
            instruction,
            tuple((event, self.program.instructions[event[0]]) for event in waits if event in self.events),
            tuple(completes),
        )

    def _gradients_by_last_backward(self) -> dict[int, list[Op]]:
        """Each G and D by the instruction of the backward after which its gradients are complete."""
        completed: dict[int, list[Op]] = {}
        for instruction in self.program.instructions:
            if instruction.op.kind in (Kind.G, Kind.D) and instruction.device == self.operations.device:
                for wait in instruction.waits:
                    if self.program.instructions[wait.instruction].op.kind in (Kind.B, Kind.W):
                        completed.setdefault(wait.instruction, []).append(instruction.op)
        return completed
