"""Performance of the machine: matrix products, memory, kernel launches, and the host link."""

from __future__ import annotations

import platform
import statistics
import subprocess
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as functional

from debubble.costs import hardware
from debubble.costs.devices.known_hardware import Hardware
from debubble.costs.devices.speed import Speed
from debubble.ir import Lane
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes, lanes_of
from on_gpu.figures import Figures, pair
from on_gpu.settings import Settings

SIDES = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Smallest side of the matrix products; the other sides have 8192."""
ATTENTION_TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
"""Lengths of the sequences whose attention cores are timed, with 32 heads of 128 numbers."""

Lanes = CpuLanes | CudaLanes


def run(settings: Settings, figures: Figures, known: dict[str, Any]) -> None:
    lanes = lanes_of(torch.device(settings.device))
    figures.add("machine", figures=machine(lanes.device))
    for work in (compute, products, attention, launch, host_link):
        figures.measure(partial(work, lanes, settings), work.__name__)


def compared_hardware(settings: Settings) -> Hardware:
    """The costs' entry for this device; a dry run accepts any."""
    names = {"H100": "H100-80GB", "H200": "H200-141GB"}
    device = "H100" if settings.dry else torch.cuda.get_device_name()
    return hardware[next(name for fragment, name in names.items() if fragment in device)]


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
    """Median time of some work on the device's clock after warm-up."""
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
    """Operations and bytes per second, compared with the costs."""
    speed = Speed(compared_hardware(settings), 2)
    size = 128 if settings.dry else 8192
    dtype = torch.float32 if settings.dry else torch.bfloat16
    a, b = (torch.randn(size, size, device=lanes.device, dtype=dtype) for _ in range(2))
    product = seconds_of(lanes, lambda: a @ b, repetitions=10 * settings.repetitions)
    source = torch.randn(2**16 if settings.dry else 2**30, device=lanes.device)
    target = torch.empty_like(source)
    copy = seconds_of(lanes, lambda: target.copy_(source), repetitions=settings.repetitions)
    return {
        "matrix_product_seconds": pair(speed.matmul(size, size, size), product),
        "memory_bytes_per_second": pair(speed.traffic, 2 * source.nbytes / copy),
    }  # fmt: skip


def products(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """Seconds of products by their smallest side, which is rows (few tokens) or the summed side (few weights)."""
    speed, large = Speed(compared_hardware(settings), 2), 128 if settings.dry else 8192
    dtype = torch.float32 if settings.dry else torch.bfloat16
    results: dict[str, Any] = {}
    for side in SIDES[:1] if settings.dry else SIDES:
        for name, (m, k) in {"rows": (side, large), "inner": (large, side)}.items():
            a, b = (torch.randn(*shape, device=lanes.device, dtype=dtype) for shape in ((m, k), (k, large)))
            seconds = seconds_of(lanes, partial(repeated_product, a, b), repetitions=settings.repetitions) / REPEATED
            results[f"{side} {name}"] = pair(speed.matmul(m, k, large), seconds)
    return results


REPEATED = 10
"""Products between two marks, which makes the time of the marks negligible for the smallest."""


def repeated_product(a: torch.Tensor, b: torch.Tensor) -> None:
    for _ in range(REPEATED):
        _ = a @ b


def attention(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """Seconds of a causal attention core, forward and backward, by the length of the one sequence."""
    speed, heads, width = Speed(compared_hardware(settings), 2), 4 if settings.dry else 32, 128
    dtype = torch.float32 if settings.dry else torch.bfloat16
    results: dict[str, Any] = {}
    for length in (64,) if settings.dry else ATTENTION_TOKENS:
        q, k, v = (
            torch.randn(1, heads, length, width, device=lanes.device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        core = partial(functional.scaled_dot_product_attention, q, k, v, is_causal=True)
        forward = seconds_of(lanes, core, repetitions=settings.repetitions)
        result = core()
        gradient = torch.randn_like(result)
        backward = seconds_of(
            lanes, partial(torch.autograd.grad, result, (q, k, v), gradient, retain_graph=True),
            repetitions=settings.repetitions,
        )  # fmt: skip
        flops = 2 * heads * length * length * width  # two products, half of each
        results[f"{length}"] = {
            "forward": pair(speed.attention(flops, rows=length * heads), forward),
            "backward": pair(speed.attention(2.5 * flops, rows=length * heads, backward=True), backward),
        }
    return results


def launch(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """Seconds per empty kernel, one after another."""
    count = 100 if settings.dry else 2000
    x = torch.zeros(1, device=lanes.device)

    def many() -> None:
        for _ in range(count):
            x.add_(1)

    on_device = seconds_of(lanes, many, repetitions=3) / count
    return {"seconds": pair(compared_hardware(settings).efficiency.launch, on_device)}


def host_link(lanes: Lanes, settings: Settings) -> dict[str, Any]:
    """Bytes per second in both directions, separate and concurrent."""
    size, device = settings.copied, lanes.device
    down, up = (torch.randint(0, 256, (size,), dtype=torch.uint8, device=device) for _ in range(2))
    to_host, from_host = (lanes.host.take(size) for _ in range(2))

    def d2h() -> None:
        to_host.copy_(down, non_blocking=True)

    def h2d() -> None:
        up.copy_(from_host, non_blocking=True)

    together = alongside(lanes, {Lane.D2H: d2h, Lane.H2D: h2d}, settings.repetitions)
    figures = compared_hardware(settings)
    expected = figures.host_bandwidth * figures.efficiency.host
    return {
        "bytes": size,
        "d2h_alone": pair(expected, size / seconds_of(lanes, d2h, repetitions=settings.repetitions)),
        "h2d_alone": pair(expected, size / seconds_of(lanes, h2d, repetitions=settings.repetitions)),
        "d2h_together": pair(expected, size / together[Lane.D2H]),
        "h2d_together": pair(expected, size / together[Lane.H2D]),
    }


def alongside(lanes: Lanes, works: dict[Lane, Callable[[], None]], repetitions: int) -> dict[Lane, float]:
    """Median seconds of concurrent works, each on its lane in a separate thread."""
    times_of_lane: dict[Lane, list[float]] = {lane: [] for lane in works}

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
            times_of_lane[lane].append((end - start) / repeated)
        lanes.end_step()
    return {lane: statistics.median(times[1:]) for lane, times in times_of_lane.items()}
