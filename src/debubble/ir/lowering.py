"""Lowering: Schedule + costs -> Program.

Adds the messages between devices, gives every operation its lane, time and memory effect, and turns everything
that an operation must wait for into an explicit wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from debubble.ir.admission import Admission
from debubble.ir.contention import Messages, blocking_positions, blocks, share_links
from debubble.ir.costs import Number, StageCosts
from debubble.ir.effects import duration, effects, guests
from debubble.ir.errors import InputError
from debubble.ir.ops import BACKWARDS, Kind, Lane, Op
from debubble.ir.program import Effect, Instruction, Moment, Program, Queue, Wait
from debubble.ir.schedule import Schedule, check

_LANES = {
    Kind.F: Lane.COMPUTE, Kind.B: Lane.COMPUTE, Kind.I: Lane.COMPUTE, Kind.W: Lane.COMPUTE, Kind.R: Lane.COMPUTE,
    Kind.S: Lane.COMPUTE, Kind.O: Lane.D2H, Kind.D: Lane.D2H, Kind.L: Lane.H2D, Kind.P: Lane.H2D,
    Kind.G: Lane.REDUCE, Kind.SEND_F: Lane.SEND, Kind.SEND_B: Lane.SEND, Kind.RECV_F: Lane.RECV,
    Kind.RECV_B: Lane.RECV,
}  # fmt: skip


def lower(schedule: Schedule, costs: StageCosts) -> Program:
    """Make everything implicit in a schedule explicit.

    Raises ScheduleError if the schedule is no correct step, OutOfMemoryError if an operation can never start under
    `costs.memory_limit`, InputError if schedule and costs do not belong together, DeadlockError if `blocking`
    messages cannot be ordered.
    """
    check(schedule)
    _check_costs(schedule, costs)
    return _Lowering(schedule, costs).run()


@dataclass
class _Lowering:
    schedule: Schedule
    costs: StageCosts
    instructions: list[Instruction] = field(default_factory=list)
    waits: list[list[Wait]] = field(default_factory=list)
    index: dict[Op, int] = field(default_factory=dict)
    queues: dict[tuple[int, Lane, int | None], list[int]] = field(default_factory=dict)

    def run(self) -> Program:
        for device, order in enumerate(self.schedule.orders):
            for op in order:
                self._add(op, device)
        self._add_messages()
        for device in range(self.schedule.devices):
            self._wait_for_data(device)
            self._wait_for_memory(device)
        if self.costs.host_link == "half-duplex":
            self._take_turns()
        program = self._program()
        if self.costs.link_groups:
            program = share_links(program)
        return program

    def _add(self, op: Op, device: int, peer: int | None = None) -> None:
        lane = Lane.HOST if op.kind is Kind.S and op.stage in self.schedule.host_steps else _LANES[op.kind]
        if op.kind in (Kind.O, Kind.L):
            peer = self.schedule.peers.get(device)
        changes = () if op.kind in _MESSAGES else tuple(Effect(*e) for e in effects(self.schedule, self.costs, op))
        index = self.index[op] = len(self.instructions)
        time = duration(self.schedule, self.costs, op, lane)
        self.instructions.append(Instruction(op, device, lane, time, (), changes, peer))
        self.waits.append([])
        if op.kind not in _MESSAGES:
            self.queues.setdefault((device, lane, None), []).append(index)

    def _add_messages(self) -> None:
        """A message follows each F and backward whose consumer is on another device, in the producers' order."""
        messages: Messages = {}
        for device, order in enumerate(self.schedule.orders):
            for op in order:
                for send, receive in _messages(self.schedule, op):
                    peer = self.schedule.placement.device_of[receive.stage]
                    self._add(send, device, peer)
                    self._add(receive, peer, device)
                    self._wait(send, op)
                    messages[op] = (send, receive)
        blocking = {op: pair for op, pair in messages.items() if blocks(self.schedule, self.costs, pair[0])}
        if blocking:
            self._place_blocking(messages, blocking)
        for producer, (send, receive) in messages.items():
            if producer in blocking:
                continue
            for op in (send, receive):
                at = self.instructions[self.index[op]]
                self.queues.setdefault((at.device, at.lane, at.peer), []).append(self.index[op])
            self._wait(receive, send)

    def _place_blocking(self, messages: Messages, blocking: Messages) -> None:
        """A blocking message takes the compute lanes of both ends, at the same time."""
        for device, placed in enumerate(blocking_positions(self.schedule, self.costs, messages)):
            self.queues[device, Lane.COMPUTE, None] = [self.index[op] for op in placed]
        before = {
            i: queue[at - 1]
            for (_, lane, _), queue in self.queues.items()
            if lane is Lane.COMPUTE
            for at, i in enumerate(queue)
            if at
        }
        for send, receive in blocking.values():
            for op in (send, receive):
                at = self.index[op]
                self.instructions[at] = self.instructions[at]._replace(
                    lane=Lane.COMPUTE, duration=self._message_time(send)
                )
            self._wait(receive, send, Moment.START)
            if self.index[receive] in before:
                self.waits[self.index[send]].append(Wait(before[self.index[receive]]))

    def _message_time(self, send: Op) -> Number:
        return duration(self.schedule, self.costs, send, Lane.SEND)

    def _wait_for_data(self, device: int) -> None:
        last_gradient: dict[int, Op] = {}
        compute: Op | None = None
        for op in self.schedule.orders[device]:
            kind, stage, _j = op
            for other in _inputs(self.schedule, op):
                self._wait(op, self._arrival(other, op))
            if kind in (Kind.G, Kind.D, Kind.S) and stage in last_gradient:
                self._wait(op, last_gradient[stage])
            if kind in (Kind.B, Kind.W, Kind.G, Kind.D):
                last_gradient[stage] = op
            if kind is Kind.L and compute is not None:
                self._wait(op, compute, Moment.START)
            if kind is Kind.P:
                self._parameters_for(op)
            if self.schedule.computes(op):
                compute = op

    def _parameters_for(self, load: Op) -> None:
        """The first forward from `load.micro_batch` on uses the loaded parameters; FIFO covers those after it."""
        for op in self.schedule.orders[self.schedule.placement.device_of[load.stage]]:
            if op.kind is Kind.F and op.stage == load.stage and op.micro_batch >= load.micro_batch:
                self._wait(op, load)
                return

    def _arrival(self, producer: Op, consumer: Op) -> Op:
        """What tells the consumer that the producer's output is there: its message, or the producer itself."""
        device_of = self.schedule.placement.device_of
        if device_of[producer.stage] == device_of[consumer.stage]:
            return producer
        return Op(Kind.RECV_F if producer.kind is Kind.F else Kind.RECV_B, consumer.stage, consumer.micro_batch)

    def _wait_for_memory(self, device: int) -> None:
        guest = guests(self.schedule, self.costs).get(device, 0) if self.schedule.peers else 0
        static = self.costs.static_of(device) + guest
        admission = Admission(self.schedule, self.costs, device, static, self.costs.limit_of(device))
        for op in self.schedule.orders[device]:
            for other in admission.admit(op):
                self._wait(op, other)
        if device in self.schedule.peers:
            self._wait_for_room_at_peer(device)

    def _wait_for_room_at_peer(self, device: int) -> None:
        """What goes to a peer waits for the reloads before it in the list: `guests` counts on the room they make."""
        reload: Op | None = None
        for op in self.schedule.orders[device]:
            if op.kind is Kind.L:
                reload = op
            elif op.kind is Kind.O and reload is not None:
                self._wait(op, reload)

    def _take_turns(self) -> None:
        """Half duplex: a device's transfers go one at a time, in the order of its list."""
        for order in self.schedule.orders:
            transfers = [op for op in order if _LANES[op.kind] in (Lane.D2H, Lane.H2D)]
            for before, after in itertools.pairwise(transfers):
                self._wait(after, before)

    def _wait(self, op: Op, other: Op, moment: Moment = Moment.END) -> None:
        wait = Wait(self.index[other], moment)
        waits = self.waits[self.index[op]]
        if wait not in waits:
            waits.append(wait)

    def _program(self) -> Program:
        asynchronous = self.costs.communication_model == "latency"
        return Program(
            schedule=self.schedule,
            costs=self.costs,
            instructions=tuple(
                instruction._replace(waits=tuple(waits)) if waits else instruction
                for instruction, waits in zip(self.instructions, self.waits, strict=True)
            ),
            queues=tuple(
                Queue(device, lane, peer, not (asynchronous and lane in (Lane.SEND, Lane.RECV)), tuple(indices))
                for (device, lane, peer), indices in self.queues.items()
            ),
        )


_MESSAGES = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)


def _check_costs(schedule: Schedule, costs: StageCosts) -> None:
    if costs.stages != schedule.stages:
        raise InputError(f"The costs are for {costs.stages} stages, but the schedule has {schedule.stages}.")
    costs.check_for(devices=schedule.devices, micro_batches=schedule.micro_batches)
    if schedule.offloaded and costs.offload is None:
        raise InputError(f"The schedule '{schedule.name}' offloads, but the costs have no 'offload' time.")


def _messages(schedule: Schedule, op: Op) -> Iterator[tuple[Op, Op]]:
    """The (send, receive) pair that carries an operation's output to another device, if any."""
    device_of = schedule.placement.device_of
    kind, stage, j = op
    if kind is Kind.F and stage + 1 < schedule.stages and device_of[stage + 1] != device_of[stage]:
        yield Op(Kind.SEND_F, stage, j), Op(Kind.RECV_F, stage + 1, j)
    if kind in BACKWARDS and stage > 0 and device_of[stage - 1] != device_of[stage]:
        yield Op(Kind.SEND_B, stage, j), Op(Kind.RECV_B, stage - 1, j)


def _inputs(schedule: Schedule, op: Op) -> Iterator[Op]:
    """The operations whose results an operation uses, other than its stage's own earlier gradients."""
    kind, stage, j = op
    match kind:
        case Kind.F:
            if stage > 0:
                yield Op(Kind.F, stage - 1, j)
        case Kind.B | Kind.I:
            if stage + 1 < schedule.stages:
                yield schedule.backward_of(stage + 1, j)
            if (stage, j) in schedule.offloaded:
                yield Op(Kind.L, stage, j)
        case Kind.R:
            if (stage, j) in schedule.offloaded:
                yield Op(Kind.L, stage, j)
        case Kind.O:
            yield Op(Kind.F, stage, j)
        case Kind.L:
            yield Op(Kind.O, stage, j)
