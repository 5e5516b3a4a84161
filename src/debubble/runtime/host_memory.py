"""Where offload puts what it takes off a device: the host's memory, or files where that is short."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from debubble.ir import DebubbleError
from debubble.ir.errors import readable


class HostMemory(Protocol):
    """Gives buffers of bytes, and takes them back when their content is no longer needed."""

    def take(self, size: int) -> Tensor:
        """A buffer of `size` bytes."""

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be used for something else."""


class Memory:
    """The host's memory; pinned if a GPU copies to it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned

    def take(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def give_back(self, buffer: Tensor) -> None: ...


class OffloadError(DebubbleError):
    """The folder for offloaded activations cannot hold them."""


class Files:
    """Memory-mapped files in a folder, such as one on an NVMe disk; buffers are used again.

    The files have no names from the start, so that nothing stays of them however the process ends.  The operating
    system keeps as much of them in memory as it has to spare.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self._mapped: WeakSet[mmap.mmap] = WeakSet()
        """They and their room on the disk end with the last tensor on them, as of a step that failed."""
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """On the disk."""
        with self._lock:
            return sum(map(len, self._mapped))

    def take(self, size: int) -> Tensor:
        """Raises OffloadError if the disk has no room."""
        with self._lock:
            if self._free[size]:
                return self._free[size].pop()
        try:
            return self._map(size)
        except OSError as error:
            raise OffloadError(
                f"{self._folder} cannot hold another {readable(size)} of activations beside {readable(self.bytes)}:"
                f" {error.strerror}. Offload to a larger disk, or plan with less offload."
            ) from error

    def give_back(self, buffer: Tensor) -> None:
        with self._lock:
            self._free[len(buffer)].append(buffer)

    def _map(self, size: int) -> Tensor:
        with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
            # Real blocks, not a hole: a full disk is an error here, but would kill the process later.
            os.posix_fallocate(file.fileno(), 0, max(size, 1))
            mapped = mmap.mmap(file.fileno(), max(size, 1))
        with self._lock:
            self._mapped.add(mapped)
        return torch.frombuffer(mapped, dtype=torch.uint8)[:size]
