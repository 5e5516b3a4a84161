"""What a rank measures of a step: bytes that stay, and when what ran."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from debubble.ir.trace import MemorySample, TraceEvent, TracePhase, TraceStep
from debubble.runtime.activity import Phase
from debubble.runtime.assembly import DevicePart
from debubble.runtime.dtensors import local
from debubble.runtime.lanes import CpuLanes, CudaLanes
from debubble.runtime.memory import Ledger
from debubble.runtime.moments import Ran
from debubble.runtime.updates import Updates


def static_bytes(part: DevicePart, updates: Updates) -> int:
    """Bytes on the device of parameters, working copies, gradients, optimizer states and what takes steps back.

    What the plan leaves to the host is the host's, also where both are the CPU.
    """
    working = [p for stage in part.stages.values() for unit in stage.units for p in unit.parameters()]
    states = {p: state.values() for o in updates.optimizers for p, state in o.state.items()}
    hosted = {p for weights in part.weights.values() if weights.on_host for p in weights.masters.values()}
    stepped = [p for p in part.masters.values() if p.requires_grad and p not in hosted]
    tensors = [*stepped, *working, *(t for p in stepped for t in (p.grad, *states.get(p, ())))]
    own = [local(t) for t in tensors if isinstance(t, Tensor)]
    held = {t.untyped_storage().data_ptr(): t.nbytes for t in own}
    return sum(held.values()) + updates.undo_bytes


def step_of_trace(
    ran: Sequence[Ran],
    phases: Sequence[Phase],
    saved: Ledger,
    lanes: CpuLanes | CudaLanes,
    *,
    device: int,
    step: int,
    origin: float,
    static: int,
) -> TraceStep:
    """One device's part of a step, in seconds since the origin on the host's clock."""
    marks = lanes.seconds([mark for each in ran for mark in (each.start, each.end)])
    events = tuple(
        TraceEvent(each.instruction.op.name, device, each.instruction.lane, start - origin, end - origin)
        for each, start, end in zip(ran, marks[::2], marks[1::2], strict=True)
    )
    memory = tuple(MemorySample(device, at - origin, static + held) for at, held in saved.samples)
    around = tuple(TracePhase(each.what, device, each.start - origin, each.end - origin) for each in phases)
    return TraceStep(step=step, events=events, memory=memory, phases=around)
