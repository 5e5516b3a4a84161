"""The operations of a device: the effect of each instruction of a Program.

`Operations` passes messages; what computes and moves memory is for its subclasses: `TensorOperations` does it with the
tensors of stages, a rehearsal sleeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from debubble.ir import Instruction, Kind, Op, Program
from debubble.ir.schedule import share_of
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes
from debubble.runtime.execution.peer_offload import PeerOffload
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.stage import Stage, UnitDone
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
    counts_memory: bool = True
    """Whether ledgers count what forwards keep."""
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

    def __post_init__(self) -> None:
        self.peer_offload = PeerOffload(self.program, self.device, self.transport, self.rank_of, self.lanes)

    def execute(self, instruction: Instruction, state: StepState, unit_done: UnitDone | None) -> None:
        """Do what the instruction says, and return when it is done or, on a GPU, enqueued.

        With `unit_done` another instruction streams with it: it is called behind every unit.
        """
        match instruction.op.kind:
            case Kind.SEND_F | Kind.SEND_B:
                self._send(instruction, state)
            case Kind.RECV_F | Kind.RECV_B:
                self._receive(instruction, state)
            case _:
                self.perform(instruction, state, unit_done)

    @abstractmethod
    def perform(self, instruction: Instruction, state: StepState, unit_done: UnitDone | None) -> None:
        """Do what an instruction says that is no message."""

    @abstractmethod
    def set_aside(self, op: Op) -> None:
        """Keep the gradients up to here for a G or D, which begins later."""

    def forget(self) -> None:
        """Drop everything that a step has left, whose parameters were taken back."""
        self.messages.count(-self.messages.bytes)

    def take_input(self, op: Op, state: StepState) -> Tensor:
        """The tensor that is there for a forward or backward."""
        tensor = state.inputs.pop(op)
        self.messages.count(-tensor.nbytes)
        used_here(tensor)
        return tensor

    def hand_on(self, op: Op, result: Tensor, state: StepState) -> None:
        """Leave the result of a forward or backward for the next stage's, on this device or for a message."""
        stage, j = op.stage, op.micro_batch
        if op.kind is Kind.F:
            consumer, send = Op(Kind.F, stage + 1, j), Op(Kind.SEND_F, stage, j)
        else:
            consumer, send = self.program.schedule.backward_of(stage - 1, j), Op(Kind.SEND_B, stage, j)
        result = result.to(state.dtype)  # under autocast it may have another
        here = self.program.schedule.placement.device_of[consumer.stage] == self.device
        self.messages.count(result.nbytes)
        state.inputs[consumer if here else send] = result

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


@dataclass
class TensorOperations(Operations):
    """The operations of a device on the tensors of its stages."""

    stages: Mapping[int, Stage]
    weights: Mapping[int, StageWeights]
    evaluating: bool = False
    """Whether the program is forwards alone, of which nothing is kept."""

    def __post_init__(self) -> None:
        super().__post_init__()
        schedule = self.program.schedule
        moved = {stage for stage, _ in schedule.offloaded | schedule.explicit_recompute} | schedule.fused_recompute
        self.needs_ledger = not moved.isdisjoint(self.stages)
        """Whether any stage of the device recomputes or offloads what its ledger knows."""

    def perform(self, instruction: Instruction, state: StepState, unit_done: UnitDone | None) -> None:
        """Compute, move memory, sum gradients or step, as the instruction says."""
        op, stage, j = instruction.op, instruction.op.stage, instruction.op.micro_batch
        match op.kind:
            case Kind.F:
                self._forward(op, state, unit_done)
            case Kind.B | Kind.I:
                self._backward(op, state)
            case Kind.W:
                self.stages[stage].weights(j)
                self.weights[stage].collect()
            case Kind.R:
                self.stages[stage].recompute(j)
            case Kind.O:
                self._offload(op, state)
            case Kind.L:
                self._reload(op, state, unit_done)
            case Kind.G:
                self.weights[stage].reduce(op)
            case Kind.D:
                self.weights[stage].bring_down(op)
            case Kind.S:
                state.step_stage(stage)
            case Kind.P:
                self.weights[stage].load_working()
            case Kind.UNSHARD_F | Kind.UNSHARD_R | Kind.UNSHARD_B:
                self.weights[stage].gather()
            case Kind.RESHARD_F | Kind.RESHARD_R | Kind.RESHARD_B:
                self.weights[stage].free()

    def set_aside(self, op: Op) -> None:
        """Keep the gradients of the stage up to here for a G or D."""
        self.weights[op.stage].set_aside(op)

    def forget(self) -> None:
        """Drop everything that a step has left in stages and messages."""
        for stage in self.stages.values():
            stage.forget()
        for weights in self.weights.values():
            weights.forget()
        super().forget()

    def _forward(self, op: Op, state: StepState, unit_done: UnitDone | None) -> None:
        stage, j = op.stage, op.micro_batch
        x = self.take_input(op, state) if stage else state.tokens[j]
        schedule = self.program.schedule
        if self.evaluating:
            y = self.stages[stage].evaluate(x, state.micro_batches[j])
        else:
            y = self.stages[stage].forward(
                j,
                x,
                state.micro_batches[j],
                recomputing=self._recomputed_units(stage, j),
                deeper=schedule.recomputes_deeper(stage, j),
                unit_done=unit_done,
                counted=state.counts_memory or self.needs_ledger,
                split=(stage, j) in schedule.split_backward,
            )
        if stage + 1 == self.program.schedule.stages:
            state.losses[j] = y
        else:
            self.hand_on(op, y, state)

    def _recomputed_units(self, stage: int, j: int) -> int:
        """The first units of a stage that recompute for a micro-batch."""
        schedule = self.program.schedule
        if not schedule.recomputes(stage, j):
            return 0
        return round(len(self.stages[stage].units) * float(share_of(schedule.recompute_fraction, stage, j)))

    def _backward(self, op: Op, state: StepState) -> None:
        stage, j = op.stage, op.micro_batch
        last = stage + 1 == self.program.schedule.stages
        gradient = torch.ones_like(state.losses[j]) if last else self.take_input(op, state)
        gx = self.stages[stage].backward(j, gradient, split=op.kind is Kind.I)
        self.weights[stage].collect()
        if stage:
            if gx is None:  # everything before it is frozen
                gx = torch.zeros(state.boundary[j], dtype=state.dtype, device=self.lanes.device)
            self.hand_on(op, gx, state)

    def _offload(self, op: Op, state: StepState) -> None:
        share = float(share_of(self.program.schedule.offload_fraction, op.stage, op.micro_batch))
        to_peer = self.peer_offload.host is not None
        allocate = self.peer_offload.buffer if to_peer else self.lanes.host.take
        buffer = self.stages[op.stage].offload(op.micro_batch, share, allocate)
        if to_peer:
            self.peer_offload.send(op, buffer)
        else:
            state.buffers[op.stage, op.micro_batch] = buffer

    def _reload(self, op: Op, state: StepState, unit_done: UnitDone | None) -> None:
        if self.peer_offload.host is not None:
            self.stages[op.stage].reload(op.micro_batch, self.peer_offload.fetch(op))
            return
        buffer = state.buffers.pop((op.stage, op.micro_batch))
        to_recompute = op._replace(kind=Kind.R) in self.program.index
        self.stages[op.stage].reload(op.micro_batch, buffer, to_recompute=to_recompute, unit_done=unit_done)
        self.lanes.host.give_back(buffer)
