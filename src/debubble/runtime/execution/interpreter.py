"""Interprets one device's instructions of a Program with tensors.

Every queue of the Program has a thread that lives across steps (the compute lane has the caller's): an instruction
starts when the local events that it waits for have happened, executes, and marks its start and end.  Waits for other
devices are satisfied by messages only: a receive ends when the message has arrived.  All other such waits predict times
and constrain nothing, except the order of transfers on a shared link, which tokens enforce (link_orders.py).

A Program without a cycle cannot deadlock: every receive has an idle thread or, on the CPU, is posted when the step
begins, and every send has an idle thread or waits for nothing but the receive of an earlier message.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from debubble.ir import Instruction, Kind, Lane, Moment, Op, Queue
from debubble.runtime.distributed.transport import on_lane
from debubble.runtime.execution.lanes import LaneThread
from debubble.runtime.execution.operations import Operations, StepState
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import (
    ExecutedInstruction,
    InstructionEvent,
    LaneInstruction,
    ReloadAllocation,
    StepSynchronizer,
)
from debubble.runtime.launch.failures import DeviceMemoryError, is_out_of_memory
from debubble.runtime.models.stage import UnitDone


@dataclass
class Interpreter:
    """Runs a device's instructions of a program, once per step."""

    operations: Operations
    status: RankStatus = field(default_factory=RankStatus)

    def __post_init__(self) -> None:
        self.program, self.lanes = self.operations.program, self.operations.lanes
        self._arena = self.operations.arena
        self._address_waits = {} if self._arena is None else self._arena.plan.waits()
        queues: Sequence[Queue] = self.program.queues_of[self.operations.device]
        posts = self.posted_sends(queues) if self.lanes.posts_messages else {}
        posted = {send for sends in posts.values() for send in sends}
        queues = [queue for queue in queues if posted.isdisjoint(queue.instructions)]
        receives = self._received_by_compute(queues) if self.lanes.posts_messages else {}
        self._posted_receives = [self.program.instructions[i] for receive in receives.values() for i in receive]
        if receives:
            queues = [queue for queue in queues if queue.lane is Lane.COMPUTE]
        self._queues = [(queue, self._lane_instructions(queue, posts, receives)) for queue in queues]
        items = [item for _, items in self._queues for item in items]
        self._hosted = {} if self._arena is None else self._hosted_instructions()
        self.events = {event for item in (*items, *self._hosted.values()) for event, _ in item.waits}
        """Events that instructions of this device wait for on its other lanes."""
        self._threads: list[LaneThread] = []

    def run(self, state: StepState) -> list[ExecutedInstruction]:
        """Run one step, and return the executed instructions with their times.  Raises the first error of any lane."""
        step = StepSynchronizer(self.events, self.lanes, self.status)
        self.run_lanes(step, state)
        return step.executed

    def run_lanes(self, step: StepSynchronizer, state: StepState) -> None:
        """Run the instructions of all lanes, each after the events that it waits for.  Raises the first error."""
        if self._arena is not None:
            self._arena.start_step()
        # Start all lanes but the compute lane, each on its thread
        transfers = [queue for queue in self._queues if queue[0].lane is not Lane.COMPUTE]
        hosting = partial(self._begin_hosting, step), partial(self._end_hosting, step)
        services = enumerate(self.operations.peer_offload.service_loops(*hosting))
        tasks = [partial(step.guard, partial(self._run_queue, *queue, step, state)) for queue in transfers]
        tasks += [partial(step.guard, partial(self.serve_peer, number, loop, step)) for number, loop in services]
        # Reused only if the step succeeds: the threads of a failed step may wait forever.
        threads, self._threads = self._threads or [LaneThread() for _ in tasks], []
        ends = [thread.start(task) for thread, task in zip(threads, tasks, strict=True)]

        step.guard(partial(self.compute, step, state))

        # Wait for the other lanes
        for end in ends:
            step.join(end)
        step.check()
        self.operations.link_orders.finish_sends()
        self._threads = threads
        self.lanes.end_step()

    def compute(self, step: StepSynchronizer, state: StepState) -> None:
        """Run the instructions of the compute lane, and wait until its sends are complete."""
        for receive in self._posted_receives:
            self.operations.post_receive(receive, state)
        for queue in self._queues:
            if queue[0].lane is Lane.COMPUTE:
                self._run_queue(*queue, step, state)
        self.operations.finish_sends(state)

    def serve_peer(self, number: int, loop: Callable[[], None], step: StepSynchronizer) -> None:
        """Receive and return the buffers of a device that offloads here."""
        with self.lanes.service_stream(number):
            loop()

    def _run_queue(
        self, queue: Queue, instructions: Sequence[LaneInstruction], step: StepSynchronizer, state: StepState
    ) -> None:
        """Run the instructions of one lane, in order."""
        links = self.operations.link_orders
        with self.lanes.lane(queue.lane, queue.peer), on_lane(queue.lane):
            for item in instructions:
                step.wait(item)
                if item.previous_on_link is not None:
                    self.status.waits(item.instruction, item.previous_on_link)
                    links.take_token(item.instruction.op, item.previous_on_link)
                for message in item.receives:
                    with step.receiving(message, item):
                        self.operations.finish_receive(message, state)
                self._allocate_reloads(item, Moment.START, step)
                if self._arena is not None:
                    self._arena.begin(item.instruction.op)
                start = step.begin(item)
                try:
                    item.execute(state, step.unit_done(item))
                except RuntimeError as error:
                    if is_out_of_memory(error):
                        raise DeviceMemoryError(item.instruction, error) from error
                    raise
                for op in item.completes:
                    self.operations.stash_gradients(op)
                self._allocate_reloads(item, Moment.END, step)
                if self._arena is not None:
                    self._arena.end(item.instruction.op)
                step.end(item, start)
                links.pass_token(item.instruction.op)
                for send in item.posts:
                    start = self.lanes.mark()
                    self.operations.post(send, state)
                    step.posted(send, start)

    def _allocate_reloads(self, item: LaneInstruction, moment: Moment, step: StepSynchronizer) -> None:
        """Allocate the buffers of reloads that wait for this moment, before it is marked."""
        for allocation in item.reloads:
            if allocation.moment is moment and all(map(step.has_happened, allocation.offloads)):
                self.operations.allocate_reload(allocation.reload)

    def _begin_hosting(self, step: StepSynchronizer, offload: Op, size: int) -> None:
        """Reserve arena addresses for a peer's offload to this device, when they are free."""
        if self._arena is not None:
            step.wait(self._hosted[offload])
            self._arena.begin(offload)
            self._arena.count(self._arena.owner_of(offload), size)

    def _end_hosting(self, step: StepSynchronizer, reload: Op, size: int) -> None:
        """Free the arena addresses of what a peer has reloaded."""
        if self._arena is not None:
            self._arena.count(self._arena.owner_of(reload), -size)
            self._arena.end(reload)
            step.happens((self.program.index[reload], Moment.END), self.lanes.mark())

    def _hosted_instructions(self) -> dict[Op, LaneInstruction]:
        """The offloads of peers to this device, with the local events that free their addresses."""
        instructions = [i for i in self.program.instructions if i.op.kind is Kind.O]
        owners = self.operations.peer_offload.owners
        return {
            i.op: LaneInstruction(self.program.index[i.op], i, _no_op, self._waits_for_addresses(i.op, ()), (), ())
            for i in instructions
            if i.device in owners
        }

    def _waits_for_addresses(
        self, op: Op, same_lane: Collection[int]
    ) -> tuple[tuple[InstructionEvent, Instruction], ...]:
        """The events on other lanes that free the addresses that an operation allocates."""
        indices = sorted(self.program.index[freed_by] for freed_by in self._address_waits.get(op, ()))
        return tuple(((i, Moment.END), self.program.instructions[i]) for i in indices if i not in same_lane)

    def _lane_instructions(
        self, queue: Queue, posts: Mapping[int, Sequence[int]], receives: Mapping[int, Sequence[int]]
    ) -> list[LaneInstruction]:
        instructions, completed = self.program.instructions, self._gradients_by_last_backward()
        reloads = self._reload_allocations() if queue.lane is Lane.COMPUTE else {}
        items, same_lane = [], {*queue.instructions, *(i for receive in receives.values() for i in receive)}
        for index in queue.instructions:
            waits = [
                ((wait.instruction, wait.moment), instructions[wait.instruction])
                for wait in instructions[index].waits
                if self._is_here(wait.instruction) and wait.instruction not in same_lane
            ]
            items.append(
                LaneInstruction(
                    index,
                    instructions[index],
                    self.operations.prepare(instructions[index]),
                    (*waits, *self._waits_for_addresses(instructions[index].op, same_lane)),
                    tuple(completed.get(index, ())),
                    tuple(instructions[send] for send in posts.get(index, ())),
                    tuple(instructions[receive] for receive in receives.get(index, ())),
                    reloads.get(index, ()),
                    self.operations.link_orders.previous(instructions[index].op),
                )
            )
        return items

    def _reload_allocations(self) -> Mapping[int, tuple[ReloadAllocation, ...]]:
        """The reloads of this device by the last compute instruction that they wait for."""
        instructions = self.program.instructions
        allocations: defaultdict[int, tuple[ReloadAllocation, ...]] = defaultdict(tuple)
        for reload in instructions:
            if reload.op.kind is Kind.L and reload.device == self.operations.device:
                computes = [w for w in reload.waits if instructions[w.instruction].lane is Lane.COMPUTE]
                here = [w for w in reload.waits if self._is_here(w.instruction)]
                offloads = [w for w in here if instructions[w.instruction].lane is Lane.D2H]
                index, moment = max(computes, key=lambda w: (w.instruction, w.moment is Moment.END))
                allocations[index] += (ReloadAllocation(reload.op, moment, tuple(offloads)),)
        return allocations

    def _is_here(self, index: int) -> bool:
        return self.program.instructions[index].device == self.operations.device

    def posted_sends(self, queues: Sequence[Queue]) -> Mapping[int, Sequence[int]]:
        """The sends that the compute lane posts after each of its instructions.

        A send queue needs its own thread if its sends wait for anything but the results that they send, if their order
        differs from that of the results, or if an instruction waits for a send.
        """
        instructions = self.program.instructions
        [order] = [queue.instructions for queue in queues if queue.lane is Lane.COMPUTE]
        position = {index: number for number, index in enumerate(order)}
        awaited = {wait.instruction for queue in queues for i in queue.instructions for wait in instructions[i].waits}
        posts: defaultdict[int, list[int]] = defaultdict(list)
        for queue in (queue for queue in queues if queue.lane is Lane.SEND and awaited.isdisjoint(queue.instructions)):
            waits = [[w for w in instructions[i].waits if self._is_here(w.instruction)] for i in queue.instructions]
            producers = [ws[0].instruction for ws in waits if len(ws) == 1 and ws[0].moment is Moment.END]
            positions = [position[producer] for producer in producers if producer in position]
            if len(positions) == len(waits) and positions == sorted(positions):
                for send, producer in zip(queue.instructions, producers, strict=True):
                    posts[producer].append(send)
        return posts

    def _received_by_compute(self, queues: Sequence[Queue]) -> Mapping[int, Sequence[int]]:
        """The messages that the compute lane receives before each of its instructions: all of the device's, or none.

        The compute lane takes the messages of a source in order, and no failure of another lane can wake it while it
        waits.  So it receives only if it consumes messages in that order and all other queues are receives.
        """
        instructions = self.program.instructions
        [order] = [queue.instructions for queue in queues if queue.lane is Lane.COMPUTE]
        inboxes = [queue.instructions for queue in queues if queue.lane is Lane.RECV]
        if len(inboxes) + 1 != len(queues) or self.operations.peer_offload.owners:
            return {}
        consumer = {wait.instruction: index for index in reversed(order) for wait in instructions[index].waits}
        position = {index: number for number, index in enumerate(order)}
        receives: defaultdict[int, list[int]] = defaultdict(list)
        for inbox in inboxes:
            if any(self._is_here(wait.instruction) for i in inbox for wait in instructions[i].waits):
                return {}
            positions = [position[consumer[i]] for i in inbox]
            if positions != sorted(positions):
                return {}
            for i in inbox:
                receives[consumer[i]].append(i)
        return receives

    def _gradients_by_last_backward(self) -> dict[int, list[Op]]:
        """The G and D operations by the backward instruction after which their gradients are complete."""
        completed: dict[int, list[Op]] = {}
        for instruction in self.program.instructions:
            if instruction.op.kind in (Kind.G, Kind.D) and instruction.device == self.operations.device:
                for wait in instruction.waits:
                    if self.program.instructions[wait.instruction].op.kind in (Kind.B, Kind.W):
                        completed.setdefault(wait.instruction, []).append(instruction.op)
        return completed


def _no_op(state: StepState, unit_done: UnitDone | None) -> None:
    """Do nothing: the threads that serve a peer execute the instruction."""
