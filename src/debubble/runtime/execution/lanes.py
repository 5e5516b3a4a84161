"""Lanes of a device: threads on the CPU; on CUDA, threads with a stream each.

On CUDA an operation returns to its host thread when it is enqueued; its `Mark` has a CUDA event, which the streams of
waiting lanes wait for.  The current device and stream are per thread, so every thread that works for a device does so
within `lane` or `service_stream`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from time import perf_counter
from typing import Any
from weakref import finalize

import torch

from debubble.ir import Lane
from debubble.runtime.memory.host import DiskMemory, HostMemory, PinnedMemory
from debubble.runtime.memory.messages import MessageBuffers, ReusedBuffers


@dataclass(frozen=True)
class Mark:
    """A point in time on a lane: seconds on the host's clock, or a CUDA event."""

    time: float
    event: Any = None


class CpuLanes:
    """Lanes on the CPU: threads whose operations are complete when they return."""

    device = torch.device("cpu")
    posts_messages = True
    """True if the compute lane may send and receive itself, as its results are complete when an operation returns."""

    def __init__(self, host: HostMemory | None = None) -> None:
        self.host = host or HostMemory()
        """Host memory for offloaded activations."""
        self.messages = MessageBuffers()
        """Buffers for received messages."""

    def start_step(self) -> None:
        """No-op: the lanes share the host's clock."""

    def end_step(self) -> None:
        """No-op: operations that have returned are complete."""

    @contextmanager
    def lane(self, lane: Lane, peer: int | None) -> Iterator[None]:
        """Context in which a thread works for the lane; no-op on the CPU."""
        yield

    @contextmanager
    def service_stream(self, work: Hashable) -> Iterator[None]:
        """Context of work that belongs to no lane; no-op on the CPU."""
        yield

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        """Context in which a lane's thread allocates memory for compute; no-op on the CPU."""
        yield

    def mark(self) -> Mark:
        """Record the current time in seconds."""
        return Mark(perf_counter())

    def wait(self, mark: Mark, *, for_memory: bool) -> None:
        """Wait for the mark."""

    def catch_up(self) -> None:
        """Wait until the current lane's work is complete."""

    def seconds(self, marks: list[Mark]) -> list[float]:
        """The marks in seconds on the host's clock, once all are reached."""
        return [mark.time for mark in marks]


class CudaLanes:
    """Lanes on a GPU: each is a stream; the compute lane is the caller's."""

    posts_messages = False

    def __init__(self, device: torch.device, host: HostMemory | None = None) -> None:
        # Every thread has its own current device, so an index is needed.
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.host = host or PinnedMemory()
        self.messages: MessageBuffers = ReusedBuffers(self.device)
        self._streams: dict[Hashable, torch.cuda.Stream] = {}
        self._compute = torch.cuda.current_stream(self.device)
        self._origin = Mark(0.0)

    def start_step(self) -> None:
        """Synchronize the caller's stream, and align the device's clock with the host's."""
        self._compute = torch.cuda.current_stream(self.device)
        event = self.mark().event
        event.synchronize()
        self._origin = Mark(perf_counter(), event)

    @contextmanager
    def lane(self, lane: Lane, peer: int | None) -> Iterator[None]:
        """Context in which a thread works for the lane: its device and stream are current."""
        with torch.cuda.device(self.device):
            if lane is Lane.COMPUTE:
                yield
                return
            with torch.cuda.stream(self._stream((lane, peer))):
                yield

    @contextmanager
    def service_stream(self, work: Hashable) -> Iterator[None]:
        """Context of work that belongs to no lane: it has a stream of its own, which no lane waits for."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(work)):
            yield

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        """Context in which a lane's thread allocates memory for compute, from the compute stream's pool.

        Earlier work of the compute lane may still use that memory until a `mark` made in the context.
        """
        with torch.cuda.stream(self._compute):
            yield

    def _stream(self, key: Hashable) -> torch.cuda.Stream:
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.device)
        return self._streams[key]

    def end_step(self) -> None:
        """Make the caller's stream wait for all lanes, such as for gradients that a lane has reduced."""
        current = torch.cuda.current_stream(self.device)
        for stream in list(self._streams.values()):
            current.wait_stream(stream)

    def mark(self) -> Mark:
        """Record an event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Mark(0.0, event)

    def wait(self, mark: Mark, *, for_memory: bool) -> None:
        """Make the current stream wait for the mark; `for_memory` makes the calling thread wait too."""
        torch.cuda.current_stream(self.device).wait_event(mark.event)
        if for_memory:
            # The block may be freed and reused only after the copy that reads it, so the host must wait, too.
            mark.event.synchronize()

    def catch_up(self) -> None:
        """Synchronize the current stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def seconds(self, marks: list[Mark]) -> list[float]:
        """Synchronize the device, then return the marks in seconds on the host's clock."""
        torch.cuda.synchronize(self.device)
        return [self._origin.time + self._origin.event.elapsed_time(mark.event) / 1e3 for mark in marks]


def lanes_of(device: torch.device, *, offload_to: Path | None = None) -> CpuLanes | CudaLanes:
    """The lanes of a device, by its type; offloads go to files in a folder, or to host memory."""
    host = None if offload_to is None else DiskMemory(offload_to)
    return CudaLanes(device, host) if device.type == "cuda" else CpuLanes(host)


_Queue = SimpleQueue[tuple[Callable[[], None], Event] | None]


class LaneThread:
    """A thread that runs tasks in order, and ends when its last reference is gone.

    It is a daemon, so waiting for a message that never arrives does not keep the process alive.
    """

    def __init__(self) -> None:
        self._queue: _Queue = SimpleQueue()
        Thread(target=_serve, args=(self._queue,), daemon=True).start()
        finalize(self, self._queue.put, None)

    def start(self, work: Callable[[], None]) -> Event:
        """Queue a task, which must not raise; the returned event is set when it is done."""
        done = Event()
        self._queue.put((work, done))
        return done


def _serve(queue: _Queue) -> None:
    while (task := queue.get()) is not None:
        work, done = task
        work()
        del task, work  # they refer to a step's tensors
        done.set()
