"""A device that cannot hold what an operation needs."""

from __future__ import annotations

import torch

from debubble.ir import DebubbleError, Instruction


class DeviceMemoryError(DebubbleError):
    """torch could not allocate what an operation of the plan needs."""

    def __init__(self, instruction: Instruction, cause: BaseException) -> None:
        op = instruction.op
        self.operation, self.device = op.name, instruction.device
        asked = str(cause).strip().split("\n")[0]
        super().__init__(
            f"Device {instruction.device} ran out of memory at {op.name}, micro-batch {op.micro_batch}: {asked}"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch's allocator for the GPU or for the CPU raised this."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
