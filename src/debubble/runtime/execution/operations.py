"""The operations of a device: the effect of each instruction of a Program.

`Operations` implements messages; subclasses implement compute and memory transfers: `TensorOperations` on the tensors
of stages, a rehearsal by sleeping.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from debubble.ir import Instruction, Kind, Op, Program
from debubble.ir.schedule import share_of
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes
from debubble.runtime.execution.link_orders import LinkOrders
from debubble.runtime.execution.peer_offload import PeerOffload
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.arena import Arena
from debubble.runtime.models.stage import SavePolicy, Stage, UnitDone
from debubble.runtime.models.units import MicroBatch
from debubble.runtime.parameters.stage_parameters import StageWeights

PostedSend = tuple[int, Callable[[], None]]
"""Bytes of a message, and a function that waits until it is sent: Gloo has no other way to find out."""

MAX_POSTED_SENDS = 4
"""Maximum number of incomplete sends of the compute lane to one device, whose tensors stay allocated."""


@dataclass
class StepState:
    """The tensors of one step: inputs, gradients, messages, offloaded buffers."""

    tokens: list[Tensor]
    """Inputs of the first stage per micro-batch, [rows, length]."""
    micro_batches: list[MicroBatch]
    boundary: list[tuple[int, ...]]
    """Shape of the activations between stages, per micro-batch."""
    dtype: torch.dtype
    step_stage: Callable[[int], None]
    """S: steps the optimizer of a stage."""
    counts_memory: bool = True
    """True if ledgers count the tensors that forwards save."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[Op, Tensor] = field(default_factory=dict)
    """Tensors by the operation that will consume them: an F, a backward, a send."""
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Offloaded bytes by stage and micro-batch."""
    arriving: dict[Op, Callable[[], Tensor]] = field(default_factory=dict)
    """Messages that the compute lane receives: functions that wait for the tensor and return it."""
    sends: defaultdict[int, deque[PostedSend]] = field(default_factory=lambda: defaultdict(deque))
    """The compute lane's incomplete sends to each device."""

    def loss(self, *, on: torch.device) -> Tensor:
        """Sum of the losses that this device has, in double precision."""
        total = torch.zeros((), dtype=torch.float64, device=on)
        for loss in self.losses.values():
            total += loss.double()
        return total


Execute = Callable[[StepState, UnitDone | None], None]
"""Executes an instruction; calls the `UnitDone`, if there is one, after every unit, for streaming transfers."""


@dataclass
class Operations(ABC):
    """The operations of one device: messages here, all others by `prepare_local`."""

    program: Program
    device: int
    transport: Transport
    rank_of: Mapping[int, int]
    """Pipeline device -> rank."""
    lanes: CpuLanes | CudaLanes
    messages: Ledger
    """Counts bytes that are received and not yet used, or computed and not yet sent."""
    arena: Arena | None = field(default=None, kw_only=True)
    """The arena whose free addresses operations wait for; None: operations wait for program events only."""

    def __post_init__(self) -> None:
        self.peer_offload = PeerOffload(self.program, self.device, self.transport, self.rank_of, self.lanes)
        self.link_orders = LinkOrders(self.program, self.device, self.transport, self.rank_of, self.lanes)

    def prepare(self, instruction: Instruction) -> Execute:
        """Make the function that executes the instruction; on a GPU it returns once the work is enqueued."""
        match instruction.op.kind:
            case Kind.SEND_F | Kind.SEND_B:
                return self._send(instruction)
            case Kind.RECV_F | Kind.RECV_B:
                return self._receive(instruction)
            case _:
                return self.prepare_local(instruction)

    @abstractmethod
    def prepare_local(self, instruction: Instruction) -> Execute:
        """Make the function that executes an instruction other than a message."""

    @abstractmethod
    def allocate_reload(self, reload: Op) -> None:
        """Allocate the buffer of a reload, on the compute lane."""

    @abstractmethod
    def stash_gradients(self, op: Op) -> None:
        """Stash the gradients accumulated so far for a G or D, which starts later."""

    def forget(self) -> None:
        """Drop the tensors of a step whose parameter update was rolled back."""
        self.messages.count(-self.messages.bytes)

    def take_input(self, op: Op, state: StepState) -> Tensor:
        """Take the input of a forward or backward."""
        tensor = state.inputs.pop(op)
        self.messages.count(-tensor.nbytes)
        return self.lanes.messages.to_compute(tensor)

    def recipient(self, op: Op) -> Op:
        """The operation that consumes the result of a forward or backward: the next stage's, or a send."""
        stage, j = op.stage, op.micro_batch
        if op.kind is Kind.F:
            consumer, send = Op(Kind.F, stage + 1, j), Op(Kind.SEND_F, stage, j)
        else:
            consumer, send = self.program.schedule.backward_of(stage - 1, j), Op(Kind.SEND_B, stage, j)
        return consumer if self.program.schedule.placement.device_of[consumer.stage] == self.device else send

    def pass_on(self, recipient: Op, result: Tensor, state: StepState) -> None:
        """Store the result of a forward or backward for the operation that consumes it."""
        result = result.to(state.dtype)  # differs under autocast
        self.messages.count(result.nbytes)
        state.inputs[recipient] = result

    def post(self, instruction: Instruction, state: StepState) -> None:
        """Begin to send a message; first wait for the oldest to that device if too many are incomplete."""
        assert instruction.peer is not None
        sends = state.sends[instruction.peer]
        if len(sends) == MAX_POSTED_SENDS:
            self._finish_send(sends)
        tensor = state.inputs.pop(instruction.op)
        wait = self.transport.begin_send(tensor, self.rank_of[instruction.peer], Channel.MESSAGE)
        if wait is None:
            self.messages.count(-tensor.nbytes)
        else:
            sends.append((tensor.nbytes, wait))

    def finish_sends(self, state: StepState) -> None:
        """Wait until all posted sends are complete."""
        for sends in state.sends.values():
            while sends:
                self._finish_send(sends)

    def _finish_send(self, sends: deque[PostedSend]) -> None:
        size, wait = sends.popleft()
        wait()
        self.messages.count(-size)

    def _send(self, instruction: Instruction) -> Execute:
        assert instruction.peer is not None
        op, to = instruction.op, self.rank_of[instruction.peer]

        def send(state: StepState, unit_done: UnitDone | None) -> None:
            tensor = state.inputs[op]
            self.transport.send(tensor, to, Channel.MESSAGE)
            # The tensor is from the compute lane's pool, which may reuse its memory once it is freed.
            self.lanes.catch_up()
            del state.inputs[op]
            self.messages.count(-tensor.nbytes)

        return send

    def _receive(self, instruction: Instruction) -> Execute:
        assert instruction.peer is not None
        (_, _, j), source = instruction.op, self.rank_of[instruction.peer]

        def receive(state: StepState, unit_done: UnitDone | None) -> None:
            # Without this, a GPU lane would enqueue all receives of a step and allocate all their buffers at once.
            self.lanes.catch_up()
            buffer = self.lanes.messages.take(state.boundary[j], state.dtype)
            tensor = self.transport.receive(buffer, source, Channel.MESSAGE)
            if tensor is not buffer:
                self.lanes.messages.give_back(buffer)
            self._arrived(instruction.op, tensor, state)

        return receive

    def post_receive(self, instruction: Instruction, state: StepState) -> None:
        """Begin to receive a message, whose bytes are counted when it has arrived."""
        assert instruction.peer is not None
        buffer = self.lanes.messages.take(state.boundary[instruction.op.micro_batch], state.dtype)
        source = self.rank_of[instruction.peer]
        state.arriving[instruction.op] = self.transport.begin_receive(buffer, source, Channel.MESSAGE)

    def finish_receive(self, instruction: Instruction, state: StepState) -> None:
        """Wait for a message of `post_receive`."""
        self._arrived(instruction.op, state.arriving.pop(instruction.op)(), state)

    def _arrived(self, op: Op, tensor: Tensor, state: StepState) -> None:
        kind, stage, j = op
        self.messages.count(tensor.nbytes)
        state.inputs[Op(Kind.F, stage, j) if kind is Kind.RECV_F else self.program.schedule.backward_of(stage, j)] = (
            tensor
        )


@dataclass
class TensorOperations(Operations):
    """The operations of a device on the tensors of its stages."""

    stages: Mapping[int, Stage]
    weights: Mapping[int, StageWeights]
    evaluating: bool = False
    """True if the program has forwards only, which save nothing."""
    observe: Callable[[int, Stage], None] | None = None
    """Called with the number of each stage and the stage."""

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = self.program.schedule
        moved = {stage for stage, _ in schedule.offloaded | schedule.explicit_recompute} | schedule.fused_recompute
        self.needs_ledger = self.arena is not None or not moved.isdisjoint(self.stages)
        """True if a stage of the device recomputes or offloads, or there is an arena: both need the ledger."""
        if self.observe is not None:
            for number, stage in self.stages.items():
                self.observe(number, stage)

    def prepare_local(self, instruction: Instruction) -> Execute:
        """Make the function that computes, transfers memory, reduces gradients or steps an optimizer."""
        op, stage, j = instruction.op, instruction.op.stage, instruction.op.micro_batch
        match op.kind:
            case Kind.F:
                return self._forward(op)
            case Kind.B | Kind.I:
                return self._backward(op)
            case Kind.W:
                return lambda state, unit_done: self._weight_gradients(stage, j)
            case Kind.R:
                return lambda state, unit_done: self.stages[stage].recompute(j)
            case Kind.O:
                return lambda state, unit_done: self._offload(op, state)
            case Kind.L:
                return lambda state, unit_done: self._reload(op, state, unit_done)
            case Kind.G:
                return lambda state, unit_done: self.weights[stage].reduce(op)
            case Kind.D:
                return lambda state, unit_done: self.weights[stage].offload_gradients(op)
            case Kind.S:
                return lambda state, unit_done: state.step_stage(stage)
            case Kind.P:
                return lambda state, unit_done: self.weights[stage].load_working()
            case Kind.UNSHARD_F | Kind.UNSHARD_R | Kind.UNSHARD_B:
                return lambda state, unit_done: self.weights[stage].unshard()
            case Kind.RESHARD_F | Kind.RESHARD_R | Kind.RESHARD_B:
                return lambda state, unit_done: self.weights[stage].reshard()
            case _:
                raise AssertionError(f"{op.name} is a message")

    def stash_gradients(self, op: Op) -> None:
        """Stash the stage's gradients accumulated so far for a G or D."""
        self.weights[op.stage].stash_gradients(op)

    def forget(self) -> None:
        """Drop the tensors of a step in stages and messages."""
        for stage in self.stages.values():
            stage.forget()
        for weights in self.weights.values():
            weights.forget()
        super().forget()

    def _forward(self, op: Op) -> Execute:
        _, number, j = op
        schedule, stage, last = self.program.schedule, self.stages[number], number + 1 == self.program.schedule.stages
        counted = SavePolicy(
            recomputing=self._recomputed_units(number, j),
            deeper=schedule.recomputes_deeper(number, j),
            split=(number, j) in schedule.split_backward,
        )
        uncounted = counted if self.needs_ledger else replace(counted, counted=False)
        recipient = op if last else self.recipient(op)

        def forward(state: StepState, unit_done: UnitDone | None) -> None:
            x = self.take_input(op, state) if number else state.tokens[j]
            if self.evaluating:
                y = stage.evaluate(x, state.micro_batches[j])
            else:
                policy = counted if state.counts_memory else uncounted
                y = stage.forward(j, x, state.micro_batches[j], policy, unit_done)
            if last:
                state.losses[j] = y
            else:
                self.pass_on(recipient, y, state)

        return forward

    def _recomputed_units(self, stage: int, j: int) -> int:
        """The number of leading units of a stage that recompute for a micro-batch."""
        schedule = self.program.schedule
        if not schedule.recomputes(stage, j):
            return 0
        return round(len(self.stages[stage].units) * float(share_of(schedule.recompute_fraction, stage, j)))

    def _backward(self, op: Op) -> Execute:
        kind, number, j = op
        stage, weights, split = self.stages[number], self.weights[number], kind is Kind.I
        last = number + 1 == self.program.schedule.stages
        recipient = self.recipient(op) if number else op

        def backward(state: StepState, unit_done: UnitDone | None) -> None:
            gradient = torch.ones_like(state.losses[j]) if last else self.take_input(op, state)
            gx = stage.backward(j, gradient, split=split)
            weights.collect()
            if number:
                if gx is None:  # all earlier units are frozen
                    gx = torch.zeros(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
                self.pass_on(recipient, gx, state)

        return backward

    def _weight_gradients(self, stage: int, j: int) -> None:
        self.stages[stage].backward_weight(j)
        self.weights[stage].collect()

    def _offload(self, op: Op, state: StepState) -> None:
        share = float(share_of(self.program.schedule.offload_fraction, op.stage, op.micro_batch))
        to_peer = self.peer_offload.host is not None
        allocate = self.peer_offload.buffer if to_peer else self.lanes.host.take
        buffer = self.stages[op.stage].offload(op.micro_batch, share, allocate)
        # The storages are from the compute lane's pool, which may reuse their memory once they are freed.
        self.lanes.catch_up()
        with self.lanes.compute_stream():
            self.stages[op.stage].release(op.micro_batch)
        if to_peer:
            self.peer_offload.send(op, buffer)
        else:
            state.buffers[op.stage, op.micro_batch] = buffer

    def allocate_reload(self, reload: Op) -> None:
        """Allocate the buffer of a reload, on the compute lane."""
        place = None if self.arena is None else self.arena.placer(reload)
        self.stages[reload.stage].allocate_reload(reload.micro_batch, place)

    def _reload(self, op: Op, state: StepState, unit_done: UnitDone | None) -> None:
        if not self.stages[op.stage].has_reload_buffer(op.micro_batch):
            with self.lanes.compute_stream():
                self.allocate_reload(op)
                mark = self.lanes.mark()
            self.lanes.wait(mark, for_memory=False)
        if self.peer_offload.host is not None:
            self.stages[op.stage].reload(op.micro_batch, self.peer_offload.fetch(op))
            return
        buffer = state.buffers.pop((op.stage, op.micro_batch))
        to_recompute = op._replace(kind=Kind.R) in self.program.index
        self.stages[op.stage].reload(op.micro_batch, buffer, to_recompute=to_recompute, unit_done=unit_done)
        self.lanes.host.give_back(buffer)
