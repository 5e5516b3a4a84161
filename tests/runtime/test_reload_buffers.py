"""Buffers of reloads are allocated on the compute lane, and message buffers are reused."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import Kind, Lane, Program
from debubble.ir.lowering.lower import lower
from debubble.runtime.distributed.transport import SingleProcessTransport
from debubble.runtime.execution.interpreter import Interpreter
from debubble.runtime.execution.lanes import CpuLanes
from debubble.runtime.execution.operations import Operations, StepState
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.memory.messages import MessageBuffers, ReusedBuffers
from tests.support.schedule_cases import offloading

SHAPE, DTYPE = (2, 3), torch.float32
CPU = torch.device("cpu")


@dataclass
class Noted(Operations):
    """Records the calls to a device without doing anything."""

    seen: list[str] = field(default_factory=list)

    def prepare_local(self, instruction: Any) -> Any:
        return lambda state, unit_done: self.seen.append(instruction.op.name)

    def allocate_reload(self, reload: Any) -> None:
        self.seen.append(f"buffer of {reload.name}")

    def stash_gradients(self, op: Any) -> None:
        pass


def one_device(memory_limit: float | None) -> Program:
    schedule = offloading(db.schedules["gpipe"](devices=1, micro_batches=3))
    costs = db.StageCosts.of(stages=1, offload=0.5)
    return lower(schedule, costs.replace(memory_limit=memory_limit))


def run(program: Program) -> list[str]:
    operations = Noted(program, 0, SingleProcessTransport(), {0: 0}, CpuLanes(), Ledger(CPU))
    state = StepState([], [], [SHAPE] * 3, DTYPE, lambda stage: None)
    Interpreter(operations).run(state)
    return operations.seen


@pytest.mark.parametrize("memory_limit", [None, 2, 3])
def test_the_compute_lane_allocates_before_a_reload_begins(memory_limit: float | None) -> None:
    program = one_device(memory_limit)
    reloads = [i.op.name for i in program.instructions if i.op.kind is Kind.L]
    assert reloads
    seen = run(program)
    for name in (name for name in reloads if f"buffer of {name}" in seen):
        assert seen.index(f"buffer of {name}") < seen.index(name)


def test_buffer_is_allocated_when_its_reload_may_start() -> None:
    program = one_device(None)
    [compute] = [q.instructions for q in program.queues if q.lane is Lane.COMPUTE]
    names = [program.instructions[i].op.name for i in compute]
    seen = [name for name in run(program) if name in names or name.startswith("buffer")]
    assert [name for name in seen if name in names] == names
    for reload in (i for i in program.instructions if i.op.kind is Kind.L):
        waits = [w.instruction for w in reload.waits if w.instruction in compute]
        buffer = f"buffer of {reload.op.name}"
        if buffer in seen:
            assert seen.index(buffer) < seen.index(program.instructions[max(waits)].op.name)


def test_message_buffer_is_reused_after_the_first_is_consumed() -> None:
    buffers = ReusedBuffers(CPU)
    buffer, other = buffers.take((4, 3), DTYPE), buffers.take((4, 3), DTYPE)
    assert buffer.data_ptr() != other.data_ptr()
    buffer.fill_(1)
    owned = buffers.to_compute(buffer)
    shorter = buffers.take(SHAPE, torch.float64)
    assert (shorter.data_ptr(), shorter.shape) == (buffer.data_ptr(), SHAPE)
    shorter.fill_(2)
    assert owned.eq(1).all()
    buffers.give_back(other)
    assert buffers.take((4, 3), DTYPE).data_ptr() == other.data_ptr()


@pytest.mark.parametrize("buffers", [MessageBuffers(), ReusedBuffers(CPU)], ids=["threads", "streams"])
def test_tensor_without_a_buffer_is_not_copied(buffers: MessageBuffers) -> None:
    tensor = torch.ones(SHAPE)
    assert buffers.to_compute(tensor) is tensor
