"""Hand-over of tensors between CUDA streams; on the CPU there is nothing to do.

The allocator knows the stream that a tensor was made on, and hands its memory on in that stream's order: a free on the
host says nothing of what other streams still do with it.  Every lane's thread works on a stream of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def used_here(tensor: Tensor) -> None:
    """Let the allocator reuse the tensor's memory only after what the current stream does with it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@dataclass(frozen=True)
class StreamHandoff:
    """A tensor for a thread that works on another stream than the one that makes it."""

    tensor: Tensor
    ready: Any
    """CUDA event: that stream is done with it.  None on the CPU."""

    @staticmethod
    def of(tensor: Tensor) -> StreamHandoff:
        """A tensor that the current stream has made, or will have made."""
        return StreamHandoff(
            tensor, torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None
        )

    def receive(self) -> Tensor:
        """The tensor, for the current stream, which waits for it."""
        if self.ready is not None:
            torch.cuda.current_stream().wait_event(self.ready)
            used_here(self.tensor)
        return self.tensor
