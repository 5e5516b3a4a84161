"""The operations of a device: the effect of each instruction of a Program.

`Operations` passes messages; what computes and moves memory is for its subclasses: `TensorOperations` does it with the
tensors of stages, a rehearsal sleeps.
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
"""Bytes of a message, and what waits until it is through: Gloo does not tell otherwise."""

MAX_POSTED_SENDS = 4
"""Messages to one device that the compute lane may have begun to send: their tensors are kept."""


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
    counts_memory: bool = True
    """True if ledgers count the tensors that forwards save."""
    losses: dict[int, Tensor] = field(default_factory=dict)
    inputs: dict[Op, Tensor] = field(default_factory=dict)
    """Tensors that are there for an operation to consume: an F, a backward, a send."""
    buffers: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Offloaded bytes by stage and micro-batch."""
    arriving: dict[Op, Callable[[], Tensor]] = field(default_factory=dict)
    """Messages that the compute lane receives: each waits for its tensor."""
    sends: defaultdict[int, deque[PostedSend]] = field(default_factory=lambda: defaultdict(deque))
    """The messages that are on their way to each device, if the compute lane has sent them."""

    def loss(self, *, on: torch.device) -> Tensor:
        """Sum of the losses that this device has, in double precision."""
        total = torch.zeros((), dtype=torch.float64, device=on)
        for loss in self.losses.values():
            total += loss.double()
        return total


Execute = Callable[[StepState, UnitDone | None], None]
"""Executes an instruction in a step.  With a `UnitDone` another one streams with it: it is called after every unit."""


@dataclass
class Operations(ABC):
    """The operations of one device: messages here, all others by `perform`."""

    program: Program
    device: int
    transport: Transport
    rank_of: Mapping[int, int]
    """Pipeline device -> rank."""
    lanes: CpuLanes | CudaLanes
    messages: Ledger
    """Counts what was received and not yet used, or computed and not yet sent."""
    arena: Arena | None = field(default=None, kw_only=True)
    """The arena by whose address plan the operations start; None: they start as the program says."""

    def __post_init__(self) -> None:
        self.peer_offload = PeerOffload(self.program, self.device, self.transport, self.rank_of, self.lanes)
        self.link_orders = LinkOrders(self.program, self.device, self.transport, self.rank_of, self.lanes)

    def prepare(self, instruction: Instruction) -> Execute:
        """The function that executes the instruction in a step; it returns when that is done or, on a GPU, enqueued."""
        match instruction.op.kind:
            case Kind.SEND_F | Kind.SEND_B:
                return self._send(instruction)
            case Kind.RECV_F | Kind.RECV_B:
                return self._receive(instruction)
            case _:
                return self.prepare_local(instruction)

    @abstractmethod
    def prepare_local(self, instruction: Instruction) -> Execute:
        """The function of an instruction that is no message."""

    @abstractmethod
    def allocate_reload(self, reload: Op) -> None:
        """Allocate what a reload will fill, on the compute lane."""

    @abstractmethod
    def stash_gradients(self, op: Op) -> None:
        """Stash the gradients up to here for a G or D, which begins later."""

    def forget(self) -> None:
        """Drop everything that a step has left, whose parameters were taken back."""
        self.messages.count(-self.messages.bytes)

    def take_input(self, op: Op, state: StepState) -> Tensor:
        """The tensor that is there for a forward or backward."""
        tensor = state.inputs.pop(op)
        self.messages.count(-tensor.nbytes)
        return self.lanes.messages.own(tensor)

    def recipient(self, op: Op) -> Op:
        """The operation that takes the result of a forward or backward: the next stage's, or a send."""
        stage, j = op.stage, op.micro_batch
        if op.kind is Kind.F:
            consumer, send = Op(Kind.F, stage + 1, j), Op(Kind.SEND_F, stage, j)
        else:
            consumer, send = self.program.schedule.backward_of(stage - 1, j), Op(Kind.SEND_B, stage, j)
        return consumer if self.program.schedule.placement.device_of[consumer.stage] == self.device else send

    def hand_on(self, recipient: Op, result: Tensor, state: StepState) -> None:
        """Leave the result of a forward or backward for the operation that takes it."""
        result = result.to(state.dtype)  # under autocast it may have another
        self.messages.count(result.nbytes)
        state.inputs[recipient] = result

    def post(self, instruction: Instruction, state: StepState) -> None:
        """Begin to send a message; wait for an earlier one to the same device where too many are on their way."""
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
        """Wait until all messages that were posted are through."""
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
            # The compute lane has made the tensor, and uses its memory again once it is gone.
            self.lanes.catch_up()
            del state.inputs[op]
            self.messages.count(-tensor.nbytes)

        return send

    def _receive(self, instruction: Instruction) -> Execute:
        assert instruction.peer is not None
        (_, _, j), source = instruction.op, self.rank_of[instruction.peer]

        def receive(state: StepState, unit_done: UnitDone | None) -> None:
            # On a device that enqueues them, all receives of a step would have their buffers at once.
            self.lanes.catch_up()
            buffer = self.lanes.messages.take(state.boundary[j], state.dtype)
            tensor = self.transport.receive(buffer, source, Channel.MESSAGE)
            if tensor is not buffer:
                self.lanes.messages.give_back(buffer)
            self._arrived(instruction.op, tensor, state)

        return receive

    def post_receive(self, instruction: Instruction, state: StepState) -> None:
        """Begin to receive a message.  Its memory is touched when it arrives, and counted when it is waited for."""
        assert instruction.peer is not None
        buffer = self.lanes.messages.take(state.boundary[instruction.op.micro_batch], state.dtype)
        source = self.rank_of[instruction.peer]
        state.arriving[instruction.op] = self.transport.begin_receive(buffer, source, Channel.MESSAGE)

    def finish_receive(self, instruction: Instruction, state: StepState) -> None:
        """Wait for a message that `post_receive` has begun to receive."""
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
    """True if the program is forwards alone, of which nothing is saved."""
    observe: Callable[[int, Stage], None] | None = None
    """Called with each stage that the operations are of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = self.program.schedule
        moved = {stage for stage, _ in schedule.offloaded | schedule.explicit_recompute} | schedule.fused_recompute
        self.needs_ledger = self.arena is not None or not moved.isdisjoint(self.stages)
        """True if a stage of the device recomputes or offloads what its ledger knows, or an arena has to."""
        if self.observe is not None:
            for number, stage in self.stages.items():
                self.observe(number, stage)

    def prepare_local(self, instruction: Instruction) -> Execute:
        """The function that computes, moves memory, sums gradients or steps, as the instruction says."""
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
                return lambda state, unit_done: self.weights[stage].gather()
            case Kind.RESHARD_F | Kind.RESHARD_R | Kind.RESHARD_B:
                return lambda state, unit_done: self.weights[stage].free()
            case _:
                raise AssertionError(f"{op.name} is a message")

    def stash_gradients(self, op: Op) -> None:
        """Stash the gradients of the stage up to here for a G or D."""
        self.weights[op.stage].stash_gradients(op)

    def forget(self) -> None:
        """Drop everything that a step has left in stages and messages."""
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
                keeping = counted if state.counts_memory else uncounted
                y = stage.forward(j, x, state.micro_batches[j], keeping, unit_done)
            if last:
                state.losses[j] = y
            else:
                self.hand_on(recipient, y, state)

        return forward

    def _recomputed_units(self, stage: int, j: int) -> int:
        """The first units of a stage that recompute for a micro-batch."""
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
                if gx is None:  # everything before it is frozen
                    gx = torch.zeros(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
                self.hand_on(recipient, gx, state)

        return backward

    def _weight_gradients(self, stage: int, j: int) -> None:
        self.stages[stage].weights(j)
        self.weights[stage].collect()

    def _offload(self, op: Op, state: StepState) -> None:
        share = float(share_of(self.program.schedule.offload_fraction, op.stage, op.micro_batch))
        to_peer = self.peer_offload.host is not None
        allocate = self.peer_offload.buffer if to_peer else self.lanes.host.take
        buffer = self.stages[op.stage].offload(op.micro_batch, share, allocate)
        # The compute lane has made the storages, and uses their memory again once they are gone.
        self.lanes.catch_up()
        with self.lanes.compute_stream():
            self.stages[op.stage].release(op.micro_batch)
        if to_peer:
            self.peer_offload.send(op, buffer)
        else:
            state.buffers[op.stage, op.micro_batch] = buffer

    def allocate_reload(self, reload: Op) -> None:
        """Allocate what a reload will fill, on the compute lane."""
        place = None if self.arena is None else self.arena.placing(reload)
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
