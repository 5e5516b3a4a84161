"""Buffers of the messages that a device receives.

A GPU's allocator has a pool per stream, and gives a tensor's memory back to the stream that made it.  A message lies in
a buffer of its own until the operation that needs it begins: that makes its own copy, so that what it keeps for the
backward is memory of the compute lane, and the buffer takes the next message.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from debubble.runtime.memory.activations import as_bytes
from debubble.runtime.memory.host import FreeBuffers
from debubble.runtime.memory.streams import StreamHandoff, used_here


class MessageBuffers:
    """Gives every message memory of its own, as suits a device whose threads share one pool."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer for a message, in the current stream."""
        return torch.empty(shape, dtype=dtype)

    def give_back(self, buffer: Tensor) -> None:
        """No message came into the buffer."""

    def own(self, message: Tensor) -> Tensor:
        """The message, or what the compute lane has made, as a tensor of the compute lane."""
        return message


class ReusedBuffers(MessageBuffers):
    """Buffers that take one message after another, about as many as there ever are messages at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free = FreeBuffers[StreamHandoff]()
        self._taken: set[int] = set()
        """Addresses of the buffers that have a message, or wait for one."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer for a message; the current stream waits for what read the one before it."""
        size = prod(shape) * dtype.itemsize
        free = self._free.take(size)
        content = torch.empty(size, dtype=torch.uint8, device=self._device) if free is None else free.receive()
        self._taken.add(content.data_ptr())
        return content[:size].view(dtype).view(shape)

    def give_back(self, buffer: Tensor) -> None:
        """The current stream was given the last that reads the buffer."""
        self._taken.discard(buffer.data_ptr())
        content = as_bytes(buffer.untyped_storage())
        self._free.put(len(content), StreamHandoff.of(content))

    def own(self, message: Tensor) -> Tensor:
        """A copy of the message in the current stream; what came without a buffer is the tensor itself."""
        if message.data_ptr() not in self._taken:
            used_here(message)
            return message
        copy = message.clone()
        self.give_back(message)
        return copy
