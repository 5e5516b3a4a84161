"""Bytes of a GPU that no plan can use: of the CUDA context, and for operations while they run.

On the CPU there is nothing to measure, and a plan leaves the usual reserve.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WorkspaceMeter:
    """The most bytes that an operation has for itself: beyond what was there before it and what is there after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.most = 0

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Measure an operation; its allocations are counted when it is launched."""
        if self._device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        after = torch.cuda.memory_allocated(self._device)
        self.most = max(self.most, torch.cuda.max_memory_allocated(self._device) - max(before, after))


def context_bytes(device: torch.device) -> int:
    """Bytes of a GPU that are taken without torch's allocator: the context, kernels, and buffers of libraries."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
