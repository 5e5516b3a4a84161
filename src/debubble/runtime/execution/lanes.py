"""Lanes of a device: threads on the CPU; on CUDA, threads that each enqueue on a stream of their own.

On CUDA an operation is over for its host thread when it is enqueued; a `Mark` carries the device event that says when
it really is, and whoever waits makes its own stream wait for it.  Threads have a current device and a current stream
each, so every thread that works for a device does it in `lane` or `service_stream`.
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
    """A moment of a lane: seconds on the host's clock, or a CUDA event."""

    time: float
    event: Any = None


class CpuLanes:
    """Lanes on the CPU: each is a thread, and what it has done is done."""

    device = torch.device("cpu")
    posts_messages = True
    """True if the compute lane may send and receive itself: what it sends is there when it has returned."""

    def __init__(self, host: HostMemory | None = None) -> None:
        self.host = host or HostMemory()
        """The memory that takes offloaded activations."""
        self.messages = MessageBuffers()
        """The memory that takes messages."""

    def start_step(self) -> None:
        """Do nothing: the lanes share the host's clock."""

    def end_step(self) -> None:
        """Do nothing: operations that have returned are done."""

    @contextmanager
    def lane(self, lane: Lane, peer: int | None) -> Iterator[None]:
        """Enter the context in which a thread works for the lane, which changes nothing on the CPU."""
        yield

    @contextmanager
    def service_stream(self, work: Hashable) -> Iterator[None]:
        """Enter the context of work that belongs to no lane, which changes nothing on the CPU."""
        yield

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        """Enter the context in which a lane's thread allocates what compute uses, which changes nothing on the CPU."""
        yield

    def mark(self) -> Mark:
        """Note the present moment in seconds."""
        return Mark(perf_counter())

    def wait(self, mark: Mark, *, for_memory: bool) -> None:
        """Wait for the mark."""

    def catch_up(self) -> None:
        """Wait until all that the current lane was given is done."""

    def seconds(self, marks: list[Mark]) -> list[float]:
        """The marks on the host's clock, once the device has reached them all."""
        return [mark.time for mark in marks]


class CudaLanes:
    """Lanes on a GPU: each is a stream; the compute lane is the caller's."""

    posts_messages = False

    def __init__(self, device: torch.device, host: HostMemory | None = None) -> None:
        # A device without an index is the current one, of which every thread has its own.
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        self.host = host or PinnedMemory()
        self.messages: MessageBuffers = ReusedBuffers(self.device)
        self._streams: dict[Hashable, torch.cuda.Stream] = {}
        self._compute = torch.cuda.current_stream(self.device)
        self._origin = Mark(0.0)

    def start_step(self) -> None:
        """Tie the device's clock to the host's; what the caller's stream was given is done, for every lane."""
        self._compute = torch.cuda.current_stream(self.device)
        event = self.mark().event
        event.synchronize()
        self._origin = Mark(perf_counter(), event)

    @contextmanager
    def lane(self, lane: Lane, peer: int | None) -> Iterator[None]:
        """Enter the context in which a thread works for the lane: the device, and the lane's stream."""
        with torch.cuda.device(self.device):
            if lane is Lane.COMPUTE:
                yield
                return
            with torch.cuda.stream(self._stream((lane, peer))):
                yield

    @contextmanager
    def service_stream(self, work: Hashable) -> Iterator[None]:
        """Enter the context of work that belongs to no lane: it gets a stream of its own, which no lane waits for."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(work)):
            yield

    @contextmanager
    def compute_stream(self) -> Iterator[None]:
        """Enter the context in which a lane's thread allocates what compute uses, in the compute lane's pool.

        What the compute lane was given before may still use that memory: `mark` here says until when.
        """
        with torch.cuda.stream(self._compute):
            yield

    def _stream(self, key: Hashable) -> torch.cuda.Stream:
        if key not in self._streams:
            self._streams[key] = torch.cuda.Stream(self.device)
        return self._streams[key]

    def end_step(self) -> None:
        """Let the caller's stream continue only after what all lanes were given: gradients that a lane has summed."""
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
            # The allocator hands a block on only when the copy that reads it is over: a wait of the host's.
            mark.event.synchronize()

    def catch_up(self) -> None:
        """Wait until the current stream has done all that it was given."""
        torch.cuda.current_stream(self.device).synchronize()

    def seconds(self, marks: list[Mark]) -> list[float]:
        """Wait until the device is idle, then return the marks in seconds on the host's clock."""
        torch.cuda.synchronize(self.device)
        return [self._origin.time + self._origin.event.elapsed_time(mark.event) / 1e3 for mark in marks]


def lanes_of(device: torch.device, *, offload_to: Path | None = None) -> CpuLanes | CudaLanes:
    """The lanes of a device, by its type; offload goes to files in a folder, or to the host's memory."""
    host = None if offload_to is None else DiskMemory(offload_to)
    return CudaLanes(device, host) if device.type == "cuda" else CpuLanes(host)


_Queue = SimpleQueue[tuple[Callable[[], None], Event] | None]


class LaneThread:
    """A thread that runs one task after another, and ends when nobody refers to it any more.

    It is a daemon: one that waits for a message that never comes does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._queue: _Queue = SimpleQueue()
        Thread(target=_serve, args=(self._queue,), daemon=True).start()
        finalize(self, self._queue.put, None)

    def start(self, work: Callable[[], None]) -> Event:
        """Do the work, which raises nothing; the event is set when it is done."""
        done = Event()
        self._queue.put((work, done))
        return done


def _serve(queue: _Queue) -> None:
    while (task := queue.get()) is not None:
        work, done = task
        work()
        del task, work  # what it refers to is a step's
        done.set()
