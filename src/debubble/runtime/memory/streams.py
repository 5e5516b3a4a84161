"""Handoff of tensors between CUDA streams; no-op on the CPU.

The allocator reuses a tensor's memory in the order of the stream that it was allocated on; freeing it on the host does
not wait for other streams that still use it.  Every lane's thread has a stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def used_here(tensor: Tensor) -> None:
    """Make the allocator reuse the tensor's memory only after the current stream's work."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclass(frozen=True)
class StreamHandoff:
    """A tensor that passes to a thread with another stream."""

    tensor: Tensor
    ready: Any
    """CUDA event: the first stream has computed the tensor.  None on the CPU."""

    @staticmethod
    def from_current_stream(tensor: Tensor) -> StreamHandoff:
        """A tensor of the current stream, ready after its work so far."""
        return StreamHandoff(
            tensor, torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        )

    def receive(self) -> Tensor:
        """The tensor; the current stream waits for it."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            used_here(self.tensor)
        return self.tensor
