"""Times of messages, of copies between a device and its host, and of the host's step: medians after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from debubble.costs.step import step_traffic
from debubble.ir import RunOptions
from debubble.runtime.memory.host import HostMemory

WARM_UP = 3


def median_time(action: Callable[[], object], *, repetitions: int, device: torch.device) -> float:
    """Seconds that the action takes on the device."""
    times: list[float] = []
    for _ in range(WARM_UP + repetitions):
        wait(device)
        start = time.perf_counter()
        action()
        wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def wait(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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


def host_step_bandwidth(options: RunOptions, *, parameters: int = 2**22, repetitions: int) -> float:
    """Bytes per second that an AdamW step on the host moves in its memory, with the copies that take it back.

    Args:
        options: The run, whose bytes per parameter are counted as the cost model counts them.
        parameters: Parameters that are stepped.
        repetitions: Steps that are timed.
    """
    weight = torch.zeros(parameters, requires_grad=True)
    weight.grad = torch.ones(parameters)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.step()
    kept = [weight.detach(), *(s for s in optimizer.state[weight].values() if s.numel() == parameters)]
    copies = [torch.empty_like(tensor) for tensor in kept]

    def step() -> None:
        for copy, tensor in zip(copies, kept, strict=True):
            copy.copy_(tensor)
        optimizer.step()

    seconds = median_time(step, repetitions=repetitions, device=torch.device("cpu"))
    run = replace(options, dtype="fp32", optimizer="adamw", post_validation=True)
    return parameters * step_traffic(run, gradient_bytes=4) / seconds
