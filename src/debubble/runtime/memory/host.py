"""Buffers for offloaded activations: in host memory, pinned for GPUs, or in files if memory is short."""

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
    """An allocator of buffers in host memory."""

    def take(self, size: int) -> Tensor:
        """Allocate a buffer of `size` bytes."""
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer; here it is freed with its last reference."""


class FreeBuffers(Generic[Buffer]):
    """A pool of reusable buffers, by size.

    Most steps offload the same sizes, but other sequence lengths and uneven expert routing change them.
    """

    def __init__(self) -> None:
        self._by_size: defaultdict[int, list[Buffer]] = defaultdict(list)
        self._lock = threading.Lock()

    def take(self, size: int) -> Buffer | None:
        """Take the smallest buffer of at least `size` bytes; None if there is none."""
        with self._lock:
            sizes = [s for s, free in self._by_size.items() if s >= size and free]
            return self._by_size[min(sizes)].pop() if sizes else None

    def put(self, size: int, buffer: Buffer) -> None:
        """Return a buffer of `size` bytes to the pool."""
        with self._lock:
            self._by_size[size].append(buffer)


class PinnedMemory(HostMemory):
    """Reusable buffers in pinned host memory, so that copies to and from a GPU run concurrently with compute.

    torch's pinned allocator rounds sizes up to powers of two; these buffers have exact sizes.  Only streams' copies
    access a buffer, and a stream that takes one waits for the copies of its previous user.
    """

    def __init__(self) -> None:
        self._free = FreeBuffers[StreamHandoff]()
        self._made: list[tuple[int, Tensor]] = []
        self._lock = threading.Lock()
        finalize(self, _unpin, self._made).atexit = False  # the end of the process unpins them

    @property
    def bytes(self) -> int:
        """Bytes of all buffers, used or free."""
        with self._lock:
            return sum(len(buffer) for _, buffer in self._made)

    def take(self, size: int) -> Tensor:
        """Take a buffer of `size` bytes, for copies of the current stream."""
        free = self._free.take(size)
        return self._pin(size) if free is None else free.receive()[:size]

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer after the current stream's copies."""
        storage = as_bytes(buffer.untyped_storage())
        self._free.put(len(storage), StreamHandoff(storage, torch.cuda.current_stream().record_event()))

    def _pin(self, size: int) -> Tensor:
        # Own pages: two buffers that share a page cannot both be pinned.
        pages = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        storage = torch.frombuffer(pages, dtype=torch.uint8)
        data_ptr, buffer = storage.data_ptr(), storage[:size]
        error = torch.cuda.cudart().cudaHostRegister(data_ptr, len(storage), 0)
        if int(error):
            raise OffloadError(
                f"The host cannot pin another {readable(size)} for activations next to {readable(self.bytes)}"
                f" (CUDA error {int(error)}). Plan with less offload, or offload to a folder."
            )
        with self._lock:
            self._made.append((data_ptr, buffer))
        return buffer


def _unpin(made: list[tuple[int, Tensor]]) -> None:
    """Synchronize the device, then unpin the buffers."""
    if made:
        torch.cuda.synchronize()
    for data_ptr, _ in made:
        torch.cuda.cudart().cudaHostUnregister(data_ptr)
    made.clear()


class OffloadError(DebubbleError):
    """Host memory, or the folder for offloaded activations, is full."""


class DiskMemory(HostMemory):
    """Reusable buffers in memory-mapped files in a folder, such as one on an NVMe disk.

    The files have no names, so nothing remains of them however the process ends.  The operating system caches them in
    free memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = FreeBuffers[Tensor]()
        self._mapped: WeakSet[mmap.mmap] = WeakSet()
        """The mappings that are alive: one ends, and frees its disk space, with the last tensor on it."""
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """Bytes on the disk."""
        with self._lock:
            return sum(map(len, self._mapped))

    def take(self, size: int) -> Tensor:
        """Take a buffer of `size` bytes.  Raises OffloadError if the disk is full."""
        free = self._free.take(size)
        if free is not None:
            return free[:size]
        try:
            return self._map(size)
        except OSError as error:
            raise OffloadError(
                f"{self._folder} cannot hold another {readable(size)} of activations next to {readable(self.bytes)}:"
                f" {error.strerror}. Offload to a larger disk, or plan with less offload."
            ) from error

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        storage = as_bytes(buffer.untyped_storage())
        self._free.put(len(storage), storage)

    def _map(self, size: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            # Allocate real blocks: a full disk is an error here, but would kill the process later.
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
            mapped = mmap.mmap(file.fileno(), max(size, 1))
        with self._lock:
            self._mapped.add(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)[:size]
