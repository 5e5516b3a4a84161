"""Buffers of the messages that a device receives.

A GPU's allocator has a memory pool per stream.  A message stays in a buffer until the operation that consumes it
begins, which copies it, so that saved activations are in the compute stream's pool and the buffer is reused.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from debubble.runtime.memory.activations import as_bytes
from debubble.runtime.memory.host import FreeBuffers
from debubble.runtime.memory.streams import StreamHandoff, used_here


class MessageBuffers:
    """Allocates memory for every message: for devices whose threads share one memory pool."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer for a message, on the current stream."""
        return torch.empty(shape, dtype=dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer that received no message."""

    def to_compute(self, tensor: Tensor) -> Tensor:
        """A message, or a local result, as a tensor of the compute lane's pool."""
        return tensor


class ReusedBuffers(MessageBuffers):
    """Reusable buffers, about as many as the largest number of pending messages."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = FreeBuffers[StreamHandoff]()
        self._taken: set[int] = set()
        """Addresses of the buffers in use."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer for a message; the current stream waits for the reader of the previous message."""
        size = prod(shape) * dtype.itemsize
        free = self._free.take(size)
        content = torch.empty(size, dtype=torch.uint8, device=self._device) if free is None else free.receive()
        self._taken.add(content.data_ptr())
        return content[:size].view(dtype).view(shape)

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer after the current stream's reads."""
        self._taken.discard(buffer.data_ptr())
        content = as_bytes(buffer.untyped_storage())
        self._free.put(len(content), StreamHandoff.from_current_stream(content))

    def to_compute(self, tensor: Tensor) -> Tensor:
        """A copy of a message on the current stream; other tensors are returned unchanged."""
        if tensor.data_ptr() not in self._taken:
            used_here(tensor)
            return tensor
        copy = tensor.clone()
        self.give_back(tensor)
        return copy
