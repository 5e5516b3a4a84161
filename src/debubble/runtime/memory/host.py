"""Buffers for offloaded activations: in the host's memory, pinned for GPUs, or in files where memory is short."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Generic, TypeVar
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from debubble.errors import readable
from debubble.ir import DebubbleError
from debubble.runtime.memory.activations import as_bytes
from debubble.runtime.memory.streams import StreamHandoff

Buffer = TypeVar("Buffer")


class HostMemory:
    """Gives buffers of bytes, of the host's memory, and takes them back when their content is no longer needed."""

    def take(self, size: int) -> Tensor:
        """Allocate a buffer of `size` bytes."""
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """The content is no longer needed; here the buffer is freed with its last reference."""


class FreeBuffers(Generic[Buffer]):
    """Buffers that can be used again.

    Most steps offload as many bytes as the one before, but batches of other lengths and uneven routing of experts
    change them.
    """

    def __init__(self) -> None:
        self._of_size: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int) -> Buffer | None:
        """The smallest that has that many bytes, if one has."""
        with self._lock:
            large_enough = [s for s, free in self._of_size.items() if s >= size and free]
            return self._of_size[min(large_enough)].pop() if large_enough else None

    def put(self, size: int, buffer: Buffer) -> None:
        """Take a buffer of that many bytes back."""
        with self._lock:
            self._of_size[size].append(buffer)


class PinnedMemory(HostMemory):
    """The host's memory, pinned, so that a GPU copies to and from it while it computes; buffers are used again.

    torch's own pinned memory rounds every size up to a power of two, nearly twice what is needed at worst.  Here each
    buffer has the size for which it was made.  Only copies of streams touch a buffer, and a stream that is given one
    waits for what the stream before it did with it.
    """

    def __init__(self) -> None:
        self._free = FreeBuffers[StreamHandoff]()
        self._made: list[tuple[int, Tensor]] = []
        self._lock = threading.Lock()
        finalize(self, _unpin, self._made).atexit = False  # the process's end unpins what is left

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, used or free."""
        with self._lock:
            return sum(len(buffer) for _, buffer in self._made)

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes, for copies of the current stream."""
        found = self._free.take(size)
        return self._pin(size) if found is None else found.receive()[:size]

    def give_back(self, buffer: Tensor) -> None:
        """The current stream was given the last copies that need the buffer."""
        whole = as_bytes(buffer.untyped_storage())
        self._free.put(len(whole), StreamHandoff(whole, torch.cuda.current_stream().record_event()))

    def _pin(self, size: int) -> Tensor:
        # Whole pages of its own: two buffers that share one cannot both be pinned.
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
        at, buffer = whole.data_ptr(), whole[:size]
        error = torch.cuda.cudart().cudaHostRegister(at, len(whole), 0)
        if int(error):
            raise OffloadError(
                f"The host cannot pin another {readable(size)} for activations next to {readable(self.bytes)}"
                f" (CUDA error {int(error)}). Plan with less offload, or offload to a folder."
            )
        with self._lock:
            self._made.append((at, buffer))
        return buffer


def _unpin(made: list[tuple[int, Tensor]]) -> None:
    """Unpin the buffers, once the device has done all that it was given."""
    if made:
        torch.cuda.synchronize()
    for at, _ in made:
        torch.cuda.cudart().cudaHostUnregister(at)
    made.clear()


class OffloadError(DebubbleError):
    """The host's memory, or the folder for offloaded activations, cannot hold them."""


class DiskMemory(HostMemory):
    """Memory-mapped files in a folder, such as one on an NVMe disk; buffers are used again.

    The files have no names from the start, so that nothing stays of them however the process ends.  The operating
    system keeps as much of them in memory as it has to spare.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = FreeBuffers[Tensor]()
        self._mapped: WeakSet[mmap.mmap] = WeakSet()
        """A mapping and its room on the disk end with the last tensor on it, as after a step that failed."""
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes on the disk."""
        with self._lock:
            return sum(map(len, self._mapped))

    def take(self, size: int) -> Tensor:
        """Raises OffloadError if the disk has no room."""
        found = self._free.take(size)
        if found is not None:
            return found[:size]
        try:
            return self._map(size)
        except OSError as error:
            raise OffloadError(
                f"{self._folder} cannot hold another {readable(size)} of activations next to {readable(self.bytes)}:"
                f" {error.strerror}. Offload to a larger disk, or plan with less offload."
            ) from error

    def give_back(self, buffer: Tensor) -> None:
        """Keep the buffer for a `take` that it is large enough for."""
        whole = as_bytes(buffer.untyped_storage())
        self._free.put(len(whole), whole)

    def _map(self, size: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            # Real blocks, not a hole: a full disk is an error here, but would kill the process later.
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
            mapped = mmap.mmap(file.fileno(), max(size, 1))
        with self._lock:
            self._mapped.add(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)[:size]
