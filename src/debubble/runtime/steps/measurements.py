"""Measurements of the last step: bytes by the ledgers, and times of instructions and units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from debubble.ir import Kind
from debubble.ir.trace import MemorySample, Trace, TracePhase, TraceStep, UnitTime
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, Mark
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.execution.synchronization import ExecutedInstruction, trace_events
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.stage import Stage
from debubble.runtime.parameters.optimizers import DeviceOptimizers
from debubble.runtime.topology import Ranks


class AllocatorPeaks(NamedTuple):
    """Peak bytes that torch's allocator has allocated, and reserved on the device."""

    allocated: int
    reserved: int


_Units = tuple[str, int, int, int]
"""Operation kind, stage, index of the first unit, and number of units, as in UnitTime."""
_NOT_MEASURED = nullcontext()


class UnitTimes:
    """Measures units while `enabled`: forwards by unit, backwards by segment."""

    def __init__(self, lanes: CpuLanes | CudaLanes) -> None:
        self.enabled = False
        self._lanes = lanes
        self._marks: list[tuple[_Units, Mark, Mark]] = []

    def start_step(self) -> None:
        """Discard the previous step's times."""
        self._marks.clear()

    def observe(self, number: int, stage: Stage) -> None:
        """Measure the units of this stage."""
        stage.timed = partial(self._timed, number)

    def medians(self) -> tuple[UnitTime, ...]:
        """The times of the last step, as medians over its micro-batches."""
        seconds = self._lanes.seconds([mark for _, *marks in self._marks for mark in marks])
        times_of: defaultdict[_Units, list[float]] = defaultdict(list)
        for (units, _, _), start, end in zip(self._marks, seconds[::2], seconds[1::2], strict=True):
            times_of[units].append(end - start)
        return tuple(UnitTime(*units, seconds=median(times)) for units, times in times_of.items())

    def _timed(self, stage: int, kind: Kind, first: int, count: int) -> AbstractContextManager[None]:
        return self._between_marks((kind.value, stage, first, count)) if self.enabled else _NOT_MEASURED

    @contextmanager
    def _between_marks(self, units: _Units) -> Iterator[None]:
        start = self._lanes.mark()
        yield
        self._marks.append((units, start, self._lanes.mark()))


class Measurements:
    """Memory, in bytes, and times of this rank's last step.

    Args:
        ranks: The ranks of the run.
        lanes: The lanes of this device.
        status: Records the phases of a step.
        devices: The plan's number of pipeline devices.
    """

    def __init__(self, ranks: Ranks, lanes: CpuLanes | CudaLanes, status: RankStatus, *, devices: int) -> None:
        self._ranks, self._lanes, self._status, self._devices = ranks, lanes, status, devices
        self.activations, self.messages = Ledger(lanes.device), Ledger(lanes.device)
        self.unit_times = UnitTimes(lanes)
        """Times of units, if they are enabled."""
        self.optimizers: DeviceOptimizers
        """Optimizers of the device's parameters."""
        self.every_step = False
        """True if every step counts saved bytes.

        The first step of new shapes always counts them, as do all steps of a device that recomputes or offloads; peaks
        are those of the last step that counted.  Counting has overhead, which matters for small tensors.
        """
        self.counts_memory = False
        """True if the last step counts saved bytes."""
        self.executed: Sequence[ExecutedInstruction] = []
        """Instructions of the last step."""
        self.origin = 0.0
        """Start of the last step, in seconds on the host's clock."""
        self.step = -1
        """The number of the last step, from 0."""
        self.rolled_back = 0
        """Number of devices whose hosts rolled back their steps in the last `optimizer_step`."""
        self._counted_shapes: tuple[tuple[int, ...], ...] = ()
        self._gradient_bytes = 0

    def begin_step(self, shapes: tuple[tuple[int, ...], ...], *, needs_ledger: bool) -> None:
        """Begin to measure a step with micro-batches of these shapes."""
        self.counts_memory = self.every_step or needs_ledger or shapes != self._counted_shapes
        if self.counts_memory:
            self._counted_shapes, self._gradient_bytes = shapes, 0
            self.activations.start_step()
        self.messages.start_step()
        self.unit_times.start_step()
        self._lanes.start_step()

    def count_gradients(self) -> None:
        """Record the bytes of gradients, if the step counts memory, before they are cleared."""
        if self.counts_memory:
            self._gradient_bytes = max(self._gradient_bytes, self.optimizers.gradient_bytes)

    def count_next_step(self) -> None:
        """Make the next step count memory, whatever its shapes."""
        self._counted_shapes = ()

    @property
    def peak_activation(self) -> int:
        """Peak bytes of saved activations, including what deferred Ws need, in the last step that counted."""
        return self.activations.peak

    @property
    def peak_messages(self) -> int:
        """Peak bytes received and not yet used, or computed and not yet sent, in the last step."""
        return self.messages.peak

    @property
    def peak_offloaded(self) -> int:
        """Peak offloaded bytes in the last step that counted."""
        return self.activations.offloaded_peak

    @property
    def peak_memory(self) -> int:
        """Peak bytes on the device: static, saved activations and gathered parameters."""
        return self._static + self.activations.peak_with_gathered

    @property
    def current_memory(self) -> int:
        """Current bytes on the device of parameters, states and saved activations."""
        return self.static_bytes + self.activations.bytes

    def gather_allocator_peaks(self) -> list[AllocatorPeaks] | None:
        """Peaks of torch's allocator on every device since the process started; None on CPUs.  All ranks call it."""
        device = self._lanes.device
        if device.type != "cuda":
            return None
        peaks = AllocatorPeaks(torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device))
        return self._ranks.first_per_device(self._ranks.transport.gather(peaks))

    @property
    def in_flight_bytes(self) -> int:
        """Current bytes of activations, including offloaded ones, and of messages; 0 between steps."""
        return self.activations.bytes + self.activations.offloaded + self.messages.bytes

    @property
    def static_bytes(self) -> int:
        """Bytes on the device of parameters, working copies, gradients and optimizer states (see DeviceOptimizers)."""
        return self.optimizers.static_bytes

    @property
    def _static(self) -> int:
        return self.optimizers.lasting_bytes + self._gradient_bytes

    def trace(self) -> Trace:
        """This rank's events, memory and phases of the last step; `Trace.join` joins the traces of all ranks.

        Memory is included if the step counted it (see `every_step`).
        """
        device, origin, static = self._ranks.device, self.origin, self._static
        samples = self.activations.samples if self.counts_memory else ()
        step = TraceStep(
            step=self.step,
            events=trace_events(self.executed, self._lanes, device=device, origin=origin),
            memory=tuple(MemorySample(device, time - origin, static + size) for time, size in samples),
            phases=tuple(TracePhase(p.name, device, p.start - origin, p.end - origin) for p in self._status.phases),
            units=self.unit_times.medians(),
        )
        return Trace(devices=self._devices, steps=(step,))

    def gather_trace(self) -> Trace:
        """The joined trace of replica 0's ranks for the last step, on every rank.  All ranks call it."""
        self.origin = self._ranks.earliest(self.origin)
        traces = self._ranks.first_per_device(self._ranks.transport.gather(self.trace().to_json()))
        return Trace.join([Trace.from_json(trace) for trace in traces])
