"""What the machine itself does: matrix products, memory, kernel launches, and the link to its host."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import torch

from debubble.costs import hardware
from debubble.costs.speed import Speed
from debubble.ir import Lane
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, lanes_of
from on_gpu.figures import Figures, pair
from on_gpu.settings import Settings

HARDWARE = "H200-141GB"
"""What measurements are compared with."""

Lanes = CpuLanes | CudaLanes


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    lanes = lanes_of(torch.device(settings.device))
    figures.add("machine", figures=machine(lanes.device))
    figures.measure(partial(compute, lanes, settings), "compute")
    figures.measure(partial(launch, lanes, settings), "launch")
    figures.measure(partial(host_link, lanes, settings), "host_link")


def machine(device: torch.device) -> dict[str, Any]:
    figures = {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.machine()}
    if device.type != "cuda":
        return {**figures, "device": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,temperature.gpu", "--format=csv,noheader"]
    return {
        **figures, "device": properties.name, "cuda": torch.version.cuda, "memory": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "driver_and_clocks": subprocess.run(asked, capture_output=True, text=True).stdout.strip(),
    }  # fmt: skip


def seconds_of(lanes: Lanes, work: Callable[[], object], *, repetitions: int, warm_up: int = 3) -> float:
    """Median time of some work on the device's clock, once it is warm."""
    for _ in range(warm_up):
        work()
    lanes.start_step()
    marks = []
    for _ in range(max(repetitions, 1)):
        marks.append(lanes.mark())
        work()
        marks.append(lanes.mark())
    times = lanes.seconds(marks)
    return statistics.median(end - start for start, end in zip(times[::2], times[1::2], strict=True))


def compute(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """Operations and bytes per second, beside what the costs take them to be."""
    speed = Speed(hardware[HARDWARE], 2)
    size = 128 if settings.dry else 8192
    dtype = torch.float32 if settings.dry else torch.bfloat16
    a, b = (torch.randn(size, size, device=lanes.device, dtype=dtype) for _ in range(2))
    product = seconds_of(lanes, lambda: a @ b, repetitions=10 * settings.repetitions)
    source = torch.randn(2**16 if settings.dry else 2**30, device=lanes.device)
    target = torch.empty_like(source)
    copy = seconds_of(lanes, lambda: target.copy_(source), repetitions=settings.repetitions)
    return {
        "matrix_product_seconds": pair(speed.matmul(size, size, size), product),
        "flops_per_second": 2 * size**3 / product,
        "memory_bytes_per_second": pair(speed.traffic, 2 * source.nbytes / copy),
    }  # fmt: skip


def launch(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """What a kernel costs that has nothing to do: on the host, and on the device, one after another."""
    count = 100 if settings.dry else 2000
    x = torch.zeros(1, device=lanes.device)

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    on_device = seconds_of(lanes, many, repetitions=3) / count
    lanes.start_step()
    start = time.perf_counter()
    many()
    host = (time.perf_counter() - start) / count
    lanes.catch_up()
    return {"seconds": pair(hardware[HARDWARE].efficiency.launch, on_device), "host_seconds": host}


def host_link(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """Both directions alone, both together, and each beside compute; bytes per second of each."""
    size, device = settings.copied, lanes.device
    down, up = (torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    to_host, from_host = (lanes.host.take(size) for _ in range(2))
    pageable = torch.zeros(size, dtype=torch.uint8)
    a = torch.randn(64 if settings.dry else 8192, 64 if settings.dry else 8192, device=device)

    def d2h() -> None:
        to_host.copy_(down, non_blocking=True)

    def h2d() -> None:
        up.copy_(from_host, non_blocking=True)

    def product() -> None:
        _ = a @ a

    alone = {"d2h": d2h, "h2d": h2d, "compute": product}
    seconds = {name: seconds_of(lanes, work, repetitions=settings.repetitions) for name, work in alone.items()}
    together = beside(lanes, {Lane.D2H: d2h, Lane.H2D: h2d}, settings.repetitions)
    times = max(1, round(seconds["d2h"] / seconds["compute"]))

    def products() -> None:
        for _ in range(times):
            product()

    computing = seconds_of(lanes, products, repetitions=settings.repetitions)
    under = beside(lanes, {Lane.D2H: d2h, Lane.COMPUTE: products}, settings.repetitions)
    figures = hardware[HARDWARE]
    expected = figures.host_bandwidth * figures.efficiency.host
    return {
        "bytes": size,
        "d2h_alone": pair(expected, size / seconds["d2h"]),
        "h2d_alone": pair(expected, size / seconds["h2d"]),
        "d2h_together": pair(expected, size / together[Lane.D2H]),
        "h2d_together": pair(expected, size / together[Lane.H2D]),
        "d2h_pageable": size / seconds_of(lanes, lambda: pageable.copy_(down), repetitions=3),
        "h2d_pageable": size / seconds_of(lanes, lambda: up.copy_(pageable), repetitions=3),
        "beside_compute": {
            "copy_seconds_alone": seconds["d2h"], "copy_seconds": under[Lane.D2H],
            "compute_seconds_alone": computing, "compute_seconds": under[Lane.COMPUTE],
        },
    }  # fmt: skip


def beside(lanes: Lanes, works: dict[Lane, Callable[[], None]], repetitions: int) -> dict[Lane, float]:
    """Median seconds of each when all run at the same time, each on its lane and a thread of its own."""
    found: dict[Lane, list[float]] = {lane: [] for lane in works}

    def one(lane: Lane, work: Callable[[], None]) -> None:
        with lanes.lane(lane, None):
            start = lanes.mark()
            for _ in range(repeated):
                work()
            marks[lane] = [start, lanes.mark()]

    repeated = 4
    for _ in range(repetitions + 1):
        marks: dict[Lane, list[Any]] = {}
        lanes.start_step()
        threads = [Thread(target=one, args=item) for item in works.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for lane, both in marks.items():
            start, end = lanes.seconds(both)
            found[lane].append((end - start) / repeated)
        lanes.end_step()
    return {lane: statistics.median(times[1:]) for lane, times in found.items()}
