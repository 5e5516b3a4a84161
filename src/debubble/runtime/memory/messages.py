"""Buffers of the messages that a device receives.

A GPU's allocator has a pool per stream, and gives a tensor's memory back to the stream that made it.  A message lies in
a buffer of its own until the operation that needs it begins: that makes its own copy, so that what it keeps for the
backward is memory of the compute lane, and the buffer takes the next message.
"""

from __future__ import annotations

import threading
from collections import defaultdict

import torch
from torch import Tensor

from debubble.runtime.streams import StreamHandoff, used_here


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
    """Buffers that take one message after another, as many as there ever are messages at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._free: defaultdict[tuple[tuple[int, ...], torch.dtype], list[StreamHandoff]] = defaultdict(list)
        self._taken: set[int] = set()

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A buffer for a message; the current stream waits for what read the one before it."""
        with self._lock:
            free = self._free[shape, dtype]
            ready = free.pop() if free else None
        buffer = torch.empty(shape, dtype=dtype, device=self._device) if ready is None else ready.receive()
        self._taken.add(buffer.data_ptr())
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        """The current stream was given the last that reads the buffer."""
        self._taken.discard(buffer.data_ptr())
        with self._lock:
            self._free[tuple(buffer.shape), buffer.dtype].append(StreamHandoff.of(buffer))

    def own(self, message: Tensor) -> Tensor:
        """A copy of the message in the current stream; what came without a buffer is the tensor itself."""
        if message.data_ptr() not in self._taken:
            used_here(message)
            return message
        copy = message.clone()
        self.give_back(message)
        return copy
