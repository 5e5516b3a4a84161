"""What a rank measures of a step: bytes that stay, and when what ran."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence

from torch import Tensor

from debubble.ir import Plan
from debubble.ir.trace import MemorySample, Trace, TraceEvent, TracePhase, TraceStep
from debubble.runtime.assembly import DevicePart
from debubble.runtime.distributed.sharding import local
from debubble.runtime.distributed.topology import Ranks
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes
from debubble.runtime.execution.status import Activity, Phase
from debubble.runtime.execution.synchronization import Ran
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.parameters.optimizers import Updates


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


class Measured(ABC):
    """What `Pipeline` says of its last step."""

    plan: Plan
    ranks: Ranks
    device: int
    steps: int
    activity: Activity
    _part: DevicePart
    _updates: Updates
    _lanes: CpuLanes | CudaLanes
    _saved: Ledger
    _mail: Ledger
    _ran: Sequence[Ran]
    _origin: float
    """When the step began, on the host's clock."""
    _static: int
    """Static bytes when its program had run: gradients may be gone since."""

    @property
    def peak_activation(self) -> int:
        """Most bytes of saved activations, and of what a deferred W needs, at any moment of the last step."""
        return self._saved.peak

    @property
    def held(self) -> int:
        """Bytes of parameters, states and saved activations that are on the device now."""
        return self.static_bytes + self._saved.bytes

    @property
    def peak_memory(self) -> int:
        """Most bytes on the device at any moment of the last step, of static memory and saved activations."""
        return self._static + self._saved.peak

    @property
    def peak_messages(self) -> int:
        """Most bytes received and not yet used, or computed and not yet sent, in the last step."""
        return self._mail.peak

    @property
    def peak_offloaded(self) -> int:
        """Most bytes that offload held elsewhere in the last step."""
        return self._saved.elsewhere_peak

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, working copies, gradients and the states of `optimizers` on the device.

        What the plan leaves to the host is the host's, also where both are the CPU.
        """
        return static_bytes(self._part, self._updates)

    def trace(self) -> Trace:
        """What this rank measured in the last step; `Trace.joined` of all ranks' is the whole."""
        step = step_of_trace(
            self._ran, self.activity.phases, self._saved, self._lanes,
            device=self.device, step=self.steps - 1, origin=self._origin, static=self._static,
        )  # fmt: skip
        return Trace(devices=self.plan.devices, steps=(step,))

    def gather_trace(self) -> Trace:
        """The whole trace of the last step, on every rank (of replica 0's ranks).  All ranks call it."""
        self._origin = self.ranks.earliest(self._origin)
        parts = self.ranks.of_devices(self.ranks.transport.gather(self.trace().to_json()))
        return Trace.joined([Trace.from_json(part) for part in parts])
