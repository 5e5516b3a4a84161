"""Timing of one action: medians after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

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
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
