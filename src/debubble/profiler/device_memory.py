"""GPU memory that no plan can use: the CUDA context and the workspaces of operations.

On the CPU nothing is measured, and a plan keeps the default reserve.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class WorkspaceMeter:
    """Measures the peak workspace of operations: bytes beyond those allocated before and those allocated after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.peak = 0

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Measure an operation; allocations happen at launch, so it may still run afterwards."""
        if self._device.type != "cuda":
            yield
            return
        before = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        yield
        after = torch.cuda.memory_allocated(self._device)
        self.peak = max(self.peak, torch.cuda.max_memory_allocated(self._device) - max(before, after))


def context_bytes(device: torch.device) -> int:
    """GPU bytes outside torch's allocator: the context, kernels and libraries' buffers."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)
