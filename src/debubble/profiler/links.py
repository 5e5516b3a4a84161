"""How fast tensors move: between two ranks, and between a device and its host."""

from __future__ import annotations

import torch
import torch.distributed as dist

from debubble.profiler.clock import median_time
from debubble.runtime.memory.host import HostMemory


def message_time(tensor: torch.Tensor, *, repetitions: int) -> float:
    """Seconds from one rank to another for a message of this size: half a round trip between even and odd ranks.

    Every rank of an even number calls this.
    """
    rank = dist.get_rank()
    peer = rank ^ 1

    def round_trip() -> None:
        first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
        first(tensor, peer)
        second(tensor, peer)

    return median_time(round_trip, repetitions=repetitions, device=tensor.device) / 2


def host_bandwidth(device: torch.device, *, host: HostMemory, size: int = 2**24, repetitions: int) -> float:
    """Bytes per second between the device and its host's memory, the slower direction."""
    on_device = torch.zeros(size, dtype=torch.uint8, device=device)
    on_host = host.take(size)
    down = median_time(lambda: on_host.copy_(on_device, non_blocking=True), repetitions=repetitions, device=device)
    up = median_time(lambda: on_device.copy_(on_host, non_blocking=True), repetitions=repetitions, device=device)
    return size / max(down, up)
