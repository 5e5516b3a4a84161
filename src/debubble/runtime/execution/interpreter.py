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
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import (
    ExecutedInstruction,
    StepSynchronizer,
    local_waits,
    speculative_instructions,
)
from debubble.runtime.failures import DeviceMemoryError, is_out_of_memory
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.peer import PeerOffload
from debubble.runtime.models.units import MicroBatch
from debubble.runtime.parameters.stage_parameters import StageWeights
from debubble.runtime.streams import used_here


@dataclass
class StepState:
    """The tensors of one step in flight: inputs, gradients, messages, offloaded buffers."""

    tokens: list[Tensor]
    """Input of the first stage per micro-batch, [rows, length]."""
    micro_batches: list[MicroBatch]
    boundary: list[tuple[int, ...]]
    """Shape of what stages hand on, per micro-batch."""
    dtype: torch.dtype
    step_stage: Callable[[int], None]
    """S: steps the optimizer of a stage."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[Op, Tensor] = field(default_factory=dict)
    """Tensors that are there for an operation to consume: an F, a backward, a send."""
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Offloaded bytes by stage and micro-batch."""

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
    messages: Ledger
    """Counts what was received and not yet used, or computed and not yet sent."""
    weights: Mapping[int, StageWeights]
    status: RankStatus = field(default_factory=RankStatus)
    evaluating: bool = False
    """Whether the program is forwards alone, of which nothing is kept."""

    def __post_init__(self) -> None:
        self._queues = self.program.queues_of[self.device]
        self._peer_offload = PeerOffload(self.program, self.device, self.transport, self.rank_of, self.lanes)
        self._completed_gradients = self._gradients_by_last_backward()
        self._speculative = speculative_instructions(self.program)
        self._local_waits = local_waits(self.program, self.device)
        self._threads: list[LaneThread] = []
        schedule = self.program.schedule
        self._recomputed_units = {
            s: round(len(stage.units) * float(schedule.recompute_fraction.get(s, 1)))
            for s, stage in self.stages.items()
        }

    def run(self, state: StepState) -> list[ExecutedInstruction]:
        """Run one step.  Returns what ran and when; raises the first error of any lane."""
        executed = self.run_ahead(state, stands=lambda: True)
        assert executed is not None
        return executed

    def run_ahead(self, state: StepState, *, stands: Callable[[], bool]) -> list[ExecutedInstruction] | None:
        """Run one step on parameters of which it is not known whether they stand.

        Before the first operation that changes gradients, the compute lane asks; if they do not, the step ends there,
        nothing is left of it, and the answer is None.  All ranks must find the same.
        """
        step = StepSynchronizer(self.program, self._local_waits, self.lanes, stands, self.status)

        # Start all lanes but the compute lane, each on its thread
        transfers = [queue for queue in self._queues if queue.lane is not Lane.COMPUTE]
        services = enumerate(self._peer_offload.service_loops())
        tasks = [partial(step.guard, partial(self._walk, queue, step, state)) for queue in transfers]
        tasks += [partial(step.guard, partial(self._serve_peer, number, loop, step)) for number, loop in services]
        # Until the step has ended well its threads belong to it: those of one that fails may wait for ever.
        threads, self._threads = self._threads or [LaneThread() for _ in tasks], []
        ends = [thread.start(task) for thread, task in zip(threads, tasks, strict=True)]

        # Compute, here
        for queue in self._queues:
            if queue.lane is Lane.COMPUTE:
                step.guard(partial(self._walk, queue, step, state))
        step.guard(step.ask)  # a program without backwards has not asked

        # Wait for the other lanes
        for end in ends:
            step.join(end)
        step.check()
        self._threads = threads
        self.lanes.end_step()
        if step.goes_on():
            return step.executed

        # The parameters did not stand: drop what the step has left
        for stage in self.stages.values():
            stage.forget()
        self.messages.count(-self.messages.bytes)
        return None

    def _walk(self, queue: Queue, step: StepSynchronizer, state: StepState) -> None:
        """Run the instructions of one lane, in order."""
        with self.lanes.lane(queue.lane, queue.peer):
            for index in queue.instructions:
                instruction = self.program.instructions[index]
                if index not in self._speculative:
                    if queue.lane is Lane.COMPUTE:
                        step.ask()
                    if not step.goes_on():
                        return
                step.wait(instruction)
                start = step.begin(index)
                self._execute_or_explain(instruction, state)
                for op in self._completed_gradients.get(index, ()):
                    self.weights[op.stage].set_aside(op)
                step.end(index, start)

    def _serve_peer(self, number: int, loop: Callable[[], None], step: StepSynchronizer) -> None:
        if step.goes_on():
            with self.lanes.beside(number):
                loop()

    def _execute_or_explain(self, instruction: Instruction, state: StepState) -> None:
        try:
            self._execute(instruction, state)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise DeviceMemoryError(instruction, error) from error
            raise

    def _execute(self, instruction: Instruction, state: StepState) -> None:
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
                state.step_stage(stage)
            case Kind.P:
                self.weights[stage].load_working()

    def _forward(self, op: Op, state: StepState) -> None:
        stage, j = op.stage, op.micro_batch
        x = self._take_input(op, state) if stage else state.tokens[j]
        recomputing = self._recomputed_units[stage] if self.program.schedule.recomputes(stage, j) else 0
        if self.evaluating:
            y = self.stages[stage].evaluate(x, state.micro_batches[j])
        else:
            y = self.stages[stage].forward(j, x, state.micro_batches[j], recomputing=recomputing)
        if stage + 1 == self.program.schedule.stages:
            state.losses[j] = y
        else:
            self._hand_on(Op(Kind.F, stage + 1, j), Op(Kind.SEND_F, stage, j), y, state)

    def _backward(self, op: Op, state: StepState) -> None:
        schedule, stage, j = self.program.schedule, op.stage, op.micro_batch
        last = stage + 1 == schedule.stages
        gradient = torch.ones_like(state.losses[j]) if last else self._take_input(op, state)
        gx = self.stages[stage].backward(j, gradient, split=op.kind is Kind.I)
        self.weights[stage].collect()
        if stage:
            if gx is None:  # everything before it is frozen
                gx = torch.zeros(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
            self._hand_on(schedule.backward_of(stage - 1, j), Op(Kind.SEND_B, stage, j), gx, state)

    def _hand_on(self, consumer: Op, send: Op, tensor: Tensor, state: StepState) -> None:
        """Leave a result for the consumer on this device, or for the send to another one."""
        tensor = tensor.to(state.dtype)  # under autocast it may have another
        here = self.program.schedule.placement.device_of[consumer.stage] == self.device
        self.messages.count(tensor.nbytes)
        state.inputs[consumer if here else send] = tensor

    def _take_input(self, op: Op, state: StepState) -> Tensor:
        tensor = state.inputs.pop(op)
        self.messages.count(-tensor.nbytes)
        used_here(tensor)
        return tensor

    def _send(self, instruction: Instruction, state: StepState) -> None:
        assert instruction.peer is not None
        tensor = state.inputs[instruction.op]
        used_here(tensor)
        self.transport.send(tensor, self.rank_of[instruction.peer], Channel.MESSAGE)
        del state.inputs[instruction.op]
        self.messages.count(-tensor.nbytes)

    def _receive(self, instruction: Instruction, state: StepState) -> None:
        assert instruction.peer is not None
        kind, stage, j = instruction.op
        # On a device that enqueues them, all receives of a step would have their buffers at once.
        self.lanes.catch_up()
        buffer = torch.empty(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
        tensor = self.transport.receive(buffer, self.rank_of[instruction.peer], Channel.MESSAGE)
        self.messages.count(tensor.nbytes)
        forward = kind is Kind.RECV_F
        consumer = Op(Kind.F, stage, j) if forward else self.program.schedule.backward_of(stage, j)
        state.inputs[consumer] = tensor

    def _offload(self, op: Op, state: StepState) -> None:
        share = float(self.program.schedule.offload_fraction.get(op.stage, 1))
        to_peer = self._peer_offload.host is not None
        allocate = self._peer_offload.buffer if to_peer else self.lanes.host.take
        buffer = self.stages[op.stage].offload(op.micro_batch, share, allocate)
        if to_peer:
            self._peer_offload.send(op, buffer)
        else:
            state.buffers[op.stage, op.micro_batch] = buffer

    def _reload(self, op: Op, state: StepState) -> None:
        if self._peer_offload.host is not None:
            self.stages[op.stage].reload(op.micro_batch, self._peer_offload.fetch(op))
            return
        buffer = state.buffers.pop((op.stage, op.micro_batch))
        self.stages[op.stage].reload(op.micro_batch, buffer)
        self.lanes.host.give_back(buffer)

    def _gradients_by_last_backward(self) -> dict[int, list[Op]]:
        """Each G and D by the instruction of the backward after which its gradients are complete."""
        completed: dict[int, list[Op]] = {}
        for instruction in self.program.instructions:
            if instruction.op.kind in (Kind.G, Kind.D) and instruction.device == self.device:
                for wait in instruction.waits:
                    if self.program.instructions[wait.instruction].op.kind in (Kind.B, Kind.W):
                        completed.setdefault(wait.instruction, []).append(instruction.op)
        return completed
