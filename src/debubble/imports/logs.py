"""Reads the seconds per step and the peak memory of the fullest device from logs and traces of a plan's run.

Supported are traces of debubble and torch.profiler, and the step lines of Megatron-LM (Megatron-Bridge, Primus), NeMo,
DeepSpeed and torchtitan.  torchtitan prints tokens per second per device, and the memory that torch reserved.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from debubble.costs.devices.cluster import FRAGMENTATION
from debubble.files import parse, read_file
from debubble.ir import InputError, Trace
from debubble.plans import Plan
from debubble.views.scene import measured_peaks

ITERATION = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
"""Megatron-LM's milliseconds per step."""
_SECONDS = re.compile(r"(?:train_step_timing in s|iter time \(s\))['\"]?[:=] ?([\d.]+)")
_TOKENS = re.compile(r"memory: *([\d.]+)GiB\([\d.]+%\)\s+(?:\x1b\[\d+m)?tps: ([\d,]+)")
_ALLOCATED = re.compile(r"max allocated: ([\d.]+)")


@dataclass(frozen=True)
class MeasuredFigures:
    """Figures that a run measured.

    Attributes:
        step: Median seconds per step; None: not measured.
        memory: Bytes allocated on the fullest device; None: not measured.
    """

    step: float | None = None
    memory: float | None = None


def read_figures(paths: Sequence[Path], plan: Plan, *, needs_step: bool = True) -> MeasuredFigures:
    """Read the measured figures of a plan's run.

    Args:
        paths: Logs, or the traces of all ranks.
        plan: The plan that ran; its tokens per step convert torchtitan's throughput to seconds.
        needs_step: Whether to raise an error if no file has the time of a step.

    Raises:
        InputError: If a file cannot be read, or none has the time of a step and that is needed.
    """
    steps: list[float] = []
    memory: list[float] = []
    for path in paths:
        text = read_text(path)
        if not text.lstrip().startswith("{"):
            _read_log(text, plan, steps, memory)
        elif "debubble_trace" in text[:200]:
            trace = Trace.load(path)
            steps.append(trace.typical.seconds)
            memory += map(float, measured_peaks(trace) or ())
        else:
            steps += profiled_steps(trace_events(text, path))
    if paths and needs_step and not steps:
        raise InputError(
            f"{', '.join(map(str, paths))}: there is no time of a step in it, as Megatron-LM, NeMo, DeepSpeed,"
            " torchtitan or torch.profiler write it; give --step SECONDS."
        )
    return MeasuredFigures(step=median(steps) if steps else None, memory=max(memory, default=None))


def _read_log(text: str, plan: Plan, steps: list[float], memory: list[float]) -> None:
    """Append the step times and memory peaks in a log to the lists."""
    steps += [float(elapsed) / 1e3 for elapsed in ITERATION.findall(text)]
    steps += [float(elapsed) for elapsed in _SECONDS.findall(text)]
    memory += [float(size) * 2**20 for size in _ALLOCATED.findall(text)]
    for reserved, pace in _TOKENS.findall(text):
        if plan.tokens is not None:
            steps.append(plan.tokens / plan.ranks / max(1, int(pace.replace(",", ""))))
        memory.append(float(reserved) * 2**30 / (1 + FRAGMENTATION))


def read_text(path: Path) -> str:
    """The text of a trace or log, decompressed if its name ends in .gz; raises InputError if it is not text."""
    content = read_file(path, "trace")
    try:
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is neither a trace nor a log: {error}.") from error


def trace_events(text: str, path: Path) -> list[dict[str, Any]]:
    """The events with a duration in a trace of torch.profiler; raises InputError if the text is no such trace."""
    trace = parse(json.loads, text, f"{path} is no trace of torch.profiler")
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise InputError(f"{path} is no trace of torch.profiler: it has no traceEvents.")
    return [event for event in events if isinstance(event, dict) and event.get("ph") == "X" and "dur" in event]


def profiled_steps(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of every step in a trace of torch.profiler."""
    return [event["dur"] / 1e6 for event in events if str(event.get("name")).startswith("ProfilerStep#")]
