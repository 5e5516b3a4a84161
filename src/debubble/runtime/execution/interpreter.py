"""Interprets one device's part of a Program with tensors.

Every queue of the Program is walked by a thread that stays from step to step (the compute lane by the caller): an
instruction starts when what it waits for on this device has happened, acts, and marks its start and end.  Waits for
instructions of other devices are met by messages alone: a receive ends when the message is there; every other such wait
predicts a time and constrains nothing.  As every send and receive has a thread that does nothing else at that moment, a
Program without a cycle cannot hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from debubble.ir import Instruction, Kind, Lane, Op, Program, Queue
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, LaneThread
from debubble.runtime.execution.stage import Stage
from debubble.runtime.execution.status import Activity
from debubble.runtime.execution.synchronization import Moments, Ran, ahead_of_gradients, awaited_on
from debubble.runtime.failures import DeviceMemoryError, is_out_of_memory
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.peer import Guests
from debubble.runtime.models.units import MicroBatch
from debubble.runtime.parameters.stage_parameters import StageWeights
from debubble.runtime.streams import used_here


@dataclass
class StepState:
    """The tensors of one step that are on their way: inputs, gradients, messages, offloaded buffers."""

    tokens: list[Tensor]
    micro_batches: list[MicroBatch]
    boundary: list[tuple[int, ...]]
    """Shape of what stages hand on, per micro-batch."""
    dtype: torch.dtype
    update: Callable[[int], None]
    """S: what steps a stage."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    tensors: dict[Op, Tensor] = field(default_factory=dict)
    """What is there for an operation to consume, by the consumer: an F, a backward, a send."""
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def loss(self, *, on: torch.device) -> Tensor:
        """Sum of the losses that this device has, in double precision."""
        total = torch.zeros((), dtype=torch.float64, device=on)
        for loss in self.losses.values():
            total += loss.double()
        return total


@dataclass
class Interpreter:
    """Runs the program of `device`, again every step."""

    program: Program
    device: int
    stages: Mapping[int, Stage]
    transport: Transport
    rank_of: Mapping[int, int]
    """Pipeline device -> rank."""
    lanes: CpuLanes | CudaLanes
    mail: Ledger
    """Counts what was received and not yet used, or computed and not yet sent."""
    weights: Mapping[int, StageWeights]
    activity: Activity = field(default_factory=Activity)

    def __post_init__(self) -> None:
        self._queues = self.program.queues_of[self.device]
        self._guests = Guests(self.program, self.device, self.transport, self.rank_of, self.lanes)
        self._complete = self._gradients_complete_after()
        self._ahead = ahead_of_gradients(self.program)
        self._awaited = awaited_on(self.program, self.device)
        self._threads: list[LaneThread] = []
        schedule = self.program.schedule
        self._recomputing = {
            s: round(len(stage.units) * float(schedule.recompute_fraction.get(s, 1)))
            for s, stage in self.stages.items()
        }

    def run(self, state: StepState) -> list[Ran]:
        """One step.  Returns what ran and when; raises the first error of any lane."""
        ran = self.run_ahead(state, stands=lambda: True)
        assert ran is not None
        return ran

    def run_ahead(self, state: StepState, *, stands: Callable[[], bool]) -> list[Ran] | None:
        """One step on parameters of which it is not known whether they stand.

        Before the first operation that changes gradients, the compute lane asks; if they do not, the step ends there,
        nothing is left of it, and the answer is None.  All ranks must find the same.
        """
        step = Moments(self.program, self._awaited, self.lanes, stands, self.activity)
        works = [partial(self._help, queue, step, state) for queue in self._queues if queue.lane is not Lane.COMPUTE]
        works += [
            partial(step.guarded, partial(self._serve, number, work, step))
            for number, work in enumerate(self._guests.works())
        ]
        # Until the step has ended well they belong to it: those of one that fails may wait for ever.
        threads, self._threads = self._threads or [LaneThread() for _ in works], []
        lanes = [thread.start(work) for thread, work in zip(threads, works, strict=True)]
        for queue in self._queues:
            if queue.lane is Lane.COMPUTE:
                self._help(queue, step, state)
        for done in lanes:
            step.join(done)
        step.check()
        self._threads = threads
        self.lanes.end_step()
        if step.goes_on():
            return step.events
        for stage in self.stages.values():
            stage.forget()
        self.mail.count(-self.mail.bytes)
        return None

    def _serve(self, number: int, work: Callable[[], None], step: Moments) -> None:
        if step.goes_on():
            with self.lanes.beside(number):
                work()

    def _help(self, queue: Queue, step: Moments, state: StepState) -> None:
        def walk() -> None:
            with self.lanes.lane(queue.lane, queue.peer):
                for index in queue.instructions:
                    instruction = self.program.instructions[index]
                    if index not in self._ahead:
                        if queue.lane is Lane.COMPUTE:
                            step.ask()
                        if not step.goes_on():
                            return
                    step.wait(instruction)
                    start = step.begin(index)
                    self._try(instruction, state)
                    for op in self._complete.get(index, ()):
                        self.weights[op.stage].set_aside(op)
                    step.end(index, start)

        step.guarded(walk)

    def _try(self, instruction: Instruction, state: StepState) -> None:
        try:
            self._act(instruction, state)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise DeviceMemoryError(instruction, error) from error
            raise

    def _act(self, instruction: Instruction, state: StepState) -> None:
        op, stage, j = instruction.op, instruction.op.stage, instruction.op.micro_batch
        match op.kind:
            case Kind.F:
                self._forward(op, state)
            case Kind.B | Kind.I:
                self._backward(op, state)
            case Kind.W:
                self.stages[stage].weights(j)
                self.weights[stage].collect()
            case Kind.R:
                self.stages[stage].recompute(j)
            case Kind.SEND_F | Kind.SEND_B:
                self._send(instruction, state)
            case Kind.RECV_F | Kind.RECV_B:
                self._receive(instruction, state)
            case Kind.O:
                self._offload(op, state)
            case Kind.L:
                self._reload(op, state)
            case Kind.G:
                self.weights[stage].reduce(op)
            case Kind.D:
                self.weights[stage].bring_down(op)
            case Kind.S:
                state.update(stage)
            case Kind.P:
                self.weights[stage].load()

    def _forward(self, op: Op, state: StepState) -> None:
        stage, j = op.stage, op.micro_batch
        x = self._take(op, state) if stage else state.tokens[j]
        recomputing = self._recomputing[stage] if self.program.schedule.recomputes(stage, j) else 0
        y = self.stages[stage].forward(j, x, state.micro_batches[j], recomputing=recomputing)
        if stage + 1 == self.program.schedule.stages:
            state.losses[j] = y
        else:
            self._hand_on(Op(Kind.F, stage + 1, j), Op(Kind.SEND_F, stage, j), y, state)

    def _backward(self, op: Op, state: StepState) -> None:
        schedule, stage, j = self.program.schedule, op.stage, op.micro_batch
        last = stage + 1 == schedule.stages
        gradient = torch.ones_like(state.losses[j]) if last else self._take(op, state)
        gx = self.stages[stage].backward(j, gradient, split=op.kind is Kind.I)
        self.weights[stage].collect()
        if stage:
            if gx is None:  # everything before it is frozen
                gx = torch.zeros(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
            self._hand_on(schedule.backward_of(stage - 1, j), Op(Kind.SEND_B, stage, j), gx, state)

    def _hand_on(self, consumer: Op, send: Op, tensor: Tensor, state: StepState) -> None:
        here = self.program.schedule.placement.device_of[consumer.stage] == self.device
        self.mail.count(tensor.nbytes)
        state.tensors[consumer if here else send] = tensor

    def _take(self, op: Op, state: StepState) -> Tensor:
        tensor = state.tensors.pop(op)
        self.mail.count(-tensor.nbytes)
        used_here(tensor)
        return tensor

    def _send(self, instruction: Instruction, state: StepState) -> None:
        assert instruction.peer is not None
        tensor = state.tensors[instruction.op]
        used_here(tensor)
        self.transport.send(tensor, self.rank_of[instruction.peer], Channel.MESSAGE)
        del state.tensors[instruction.op]
        self.mail.count(-tensor.nbytes)

    def _receive(self, instruction: Instruction, state: StepState) -> None:
        assert instruction.peer is not None
        kind, stage, j = instruction.op
        # On a device that enqueues them, all receives of a step would have their buffers at once.
        self.lanes.catch_up()
        buffer = torch.empty(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
        tensor = self.transport.receive(buffer, self.rank_of[instruction.peer], Channel.MESSAGE)
        self.mail.count(tensor.nbytes)
        forward = kind is Kind.RECV_F
        consumer = Op(Kind.F, stage, j) if forward else self.program.schedule.backward_of(stage, j)
        state.tensors[consumer] = tensor

    def _offload(self, op: Op, state: StepState) -> None:
        share = float(self.program.schedule.offload_fraction.get(op.stage, 1))
        host = self._guests.host
        allocate = self.lanes.host.take if host is None else self._guests.buffer
        buffer = self.stages[op.stage].offload(op.micro_batch, share, allocate)
        if host is None:
            state.buffers[op.stage, op.micro_batch] = buffer
        else:
            self._guests.send(op, buffer)

    def _reload(self, op: Op, state: StepState) -> None:
        here = self._guests.host is None
        buffer = state.buffers.pop((op.stage, op.micro_batch)) if here else self._guests.fetch(op)
        self.stages[op.stage].reload(op.micro_batch, buffer)
        if here:
            self.lanes.host.give_back(buffer)

    def _gradients_complete_after(self) -> dict[int, list[Op]]:
        """Backwards (their instructions) after which the gradients of a G or D are complete."""
        found: dict[int, list[Op]] = {}
        for instruction in self.program.instructions:
            if instruction.op.kind in (Kind.G, Kind.D) and instruction.device == self.device:
                for wait in instruction.waits:
                    if self.program.instructions[wait.instruction].op.kind in (Kind.B, Kind.W):
                        found.setdefault(wait.instruction, []).append(instruction.op)
        return found
