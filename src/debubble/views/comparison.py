"""Comparison of a plan with a measured step, per operation, device and kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from debubble.formatting import cores_words, size_words, time_words
from debubble.ir import Kind, Lane, Number, Trace
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.simulator import TimedOperation
from debubble.simulator.timeline import BUSY_KINDS
from debubble.views.palette import KIND_WORDS
from debubble.views.scene import Scene, measured_peaks
from debubble.views.terminal import titled_table


class Pair(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One figure, predicted and measured: seconds, bytes, or a fraction."""

    predicted: float
    measured: float
    ratio: Annotated[float | None, Meta(description="Measured over predicted; null: nothing was predicted.")]


class OperationPair(Pair, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of one operation, such as `2F5`."""

    operation: str


class Comparison(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan next to a typical measured step."""

    step: Annotated[int, Meta(description="Number of the typical measured step, which is of median length.")]
    steps: Annotated[
        tuple[int, ...], Meta(description="Those among which it is typical: all that were measured but the warm-up.")
    ]
    cores: Annotated[
        int | None, Meta(description="That the devices shared, in the prediction too; null: each had its own.")
    ]
    makespan: Annotated[Pair, Meta(description="Seconds of the pipeline.")]
    planned_step: Annotated[
        float, Meta(description="Seconds of the whole step by the plan, each device with a core of its own.")
    ]
    bubble_fraction: Pair
    kinds: Annotated[dict[str, Pair], Meta(description="Mean seconds of an operation of each kind.")]
    busy: Annotated[tuple[Pair, ...], Meta(description="Seconds per device.")]
    peak_memory: Annotated[tuple[Pair, ...], Meta(description="Bytes per device, the most of all `steps`.")]
    worst: Annotated[tuple[OperationPair, ...], Meta(description="Operations that are furthest from their prediction.")]
    drift: Annotated[
        str, Meta(description="A sentence on the largest difference, and one on a device that differs from the others.")
    ]
    around: Annotated[dict[str, float], Meta(description="Mean seconds per device before and after the program.")]
    seconds: Annotated[float, Meta(description="Time of the measured step with all that.")]


def compare(plan: Plan, trace: Trace) -> Comparison:
    """Compare a plan with the trace of its run.

    Raises:
        InputError: If the trace is not of this plan.
    """
    predicted, measured = Scene.pair(plan, trace)
    both = list(zip(predicted.timeline.operations, measured.timeline.operations, strict=True))
    compute = [(p, m) for p, m in both if p.lane is Lane.COMPUTE and p.op.kind in BUSY_KINDS]
    worst = sorted(compute, key=lambda pair: abs(float(pair[1].duration) - float(pair[0].duration)), reverse=True)[:5]
    makespan = pair(predicted.timeline.makespan, measured.timeline.makespan)
    busy = tuple(map(pair, predicted.timeline.busy, measured.timeline.busy))
    return Comparison(
        step=trace.typical.step,
        steps=tuple(step.step for step in trace.warm),
        cores=trace.cores,
        makespan=makespan,
        planned_step=seconds_per_step(plan),
        bubble_fraction=pair(predicted.timeline.bubble_fraction, measured.timeline.bubble_fraction),
        kinds=_kinds(both),
        busy=busy,
        peak_memory=tuple(map(pair, predicted.peak_memory, measured_peaks(trace) or measured.peak_memory)),
        worst=tuple(OperationPair(operation=p.name, **_figures(p.duration, m.duration)) for p, m in worst),
        drift=" ".join([_drift(makespan, compute, devices=len(busy)), *_unlike_device(busy)]),
        around=_around(trace),
        seconds=trace.typical.seconds,
    )


def pair(predicted: Number, measured: Number) -> Pair:
    """One figure, predicted and measured."""
    return Pair(**_figures(predicted, measured))


def _figures(predicted: Number, measured: Number) -> dict[str, Any]:
    before, after = float(predicted), float(measured)
    return {"predicted": before, "measured": after, "ratio": after / before if before else None}


def _kinds(both: list[tuple[TimedOperation, TimedOperation]]) -> dict[str, Pair]:
    times: dict[Kind, list[tuple[float, float]]] = {}
    for p, m in both:
        times.setdefault(p.op.kind, []).append((float(p.duration), float(m.duration)))
    means = {
        kind.value: pair(*(sum(column) / len(column) for column in zip(*times[kind], strict=True)))
        for kind in Kind
        if kind in times
    }
    return {kind: mean for kind, mean in means.items() if mean.predicted or mean.measured}


def _around(trace: Trace) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phase in sorted(trace.typical.phases, key=lambda phase: phase.start):
        sums[phase.what] = sums.get(phase.what, 0.0) + phase.end - phase.start
    return {name: total / trace.devices for name, total in sums.items()}


def _drift(makespan: Pair, compute: list[tuple[TimedOperation, TimedOperation]], *, devices: int) -> str:
    """A sentence on the step's difference, and on the kind and stage of operations that cause most of it."""
    sentence = f"The pipeline took {makespan.measured / makespan.predicted:.2f} times as long as predicted"
    groups: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
    for p, m in compute:
        groups.setdefault((p.op.kind, p.op.stage), []).append((float(p.duration), float(m.duration)))
    sums = {key: pair(sum(p for p, _ in pairs), sum(m for _, m in pairs)) for key, pairs in groups.items()}
    sign = 1 if makespan.measured > makespan.predicted else -1
    kind, stage = max(sums, key=lambda key: sign * (sums[key].measured - sums[key].predicted))
    group = sums[kind, stage]
    if abs(makespan.measured - makespan.predicted) <= 0.02 * makespan.predicted or group.ratio is None:
        return f"{sentence}."
    predicted, measured = (sum(getattr(total, name) for total in sums.values()) for name in ("predicted", "measured"))
    too_little = sign * (group.measured - group.predicted) <= abs(makespan.measured - makespan.predicted) / 2
    if too_little or sign * (measured - predicted) <= 0:
        ratio = measured / predicted
        longer = devices * makespan.measured - measured > devices * makespan.predicted - predicted
        waited = "but devices waited longer" if longer else "and devices waited less"
        if sign > 0 and longer:
            waited = "and devices waited for most of the rest"
        return f"{sentence}; its operations took {ratio:.2f} times as long as predicted, {waited}."
    return (
        f"{sentence}; most of that is {KIND_WORDS[kind]} on stage {stage}, at {group.ratio:.2f} times its prediction."
    )


def _unlike_device(busy: Sequence[Pair]) -> Iterator[str]:
    """A sentence on a single device whose ratio to its prediction differs from all others, if there is one."""
    ratios = [figures.ratio for figures in busy]
    if len(ratios) < 2 or not all(ratios):
        return
    logs = [math.log(ratio) for ratio in ratios if ratio]
    unlike = max(range(len(logs)), key=lambda device: abs(logs[device]))
    rest = logs[:unlike] + logs[unlike + 1 :]
    middle = statistics.median(rest)
    near = all(abs(log - middle) < math.log(MAX_SIMILAR_RATIO) for log in rest)
    if near and abs(logs[unlike] - middle) > math.log(MIN_UNLIKE_RATIO):
        yield (
            f"Device {unlike} computed {ratios[unlike]:.2f} times as long as predicted, the"
            f" other{'s' * (len(rest) > 1)} {math.exp(middle):.2f} times."
        )


MAX_SIMILAR_RATIO, MIN_UNLIKE_RATIO = 1.2, 1.4
"""A device is unlike the others if these differ from their median by less than the first factor, and it by more than
the second."""


def render(comparison: Comparison) -> RenderableType:
    """Render the comparison as tables for the terminal."""
    kinds = _operations(
        "Mean time per operation", {KIND_WORDS[Kind(kind)]: pair for kind, pair in comparison.kinds.items()}
    )
    worst = _operations("Furthest from their prediction, in time", {pair.operation: pair for pair in comparison.worst})
    columns = ("device", "busy, predicted", "measured", "ratio", "peak memory, predicted", "measured", "ratio")
    devices = titled_table("Devices", columns)
    for device, (busy, peak) in enumerate(zip(comparison.busy, comparison.peak_memory, strict=True)):
        sizes = (size_words(peak.predicted), size_words(peak.measured))
        devices.add_row(str(device), *_times(busy), _ratio(busy), *sizes, _ratio(peak))
    title = f"Around the program: step {comparison.step} as a whole took {time_words(comparison.seconds, seconds=True)}"
    around = titled_table(title, ("mean per device", "measured"), texts=("mean per device",))
    for name, seconds in comparison.around.items():
        around.add_row(name, time_words(seconds, seconds=True))
    step, bubble = comparison.makespan, comparison.bubble_fraction
    predicted, measured = _times(step)
    where = (
        "" if comparison.cores is None else f" for {len(comparison.busy)} devices on {cores_words(comparison.cores)}"
    )
    head = (
        f"{_which(comparison)}: {measured}, predicted {predicted}{where}; bubble {100 * bubble.measured:.1f}%,"
        f" predicted {100 * bubble.predicted:.1f}%."
    )
    parts = [kinds, devices, worst, *([around] if comparison.around else [])]
    said = " ".join(filter(None, [comparison.drift, _planned_words(comparison)]))
    return Group(Text(head, style="bold"), Text(f"{said}\n"), *parts)


def _planned_words(comparison: Comparison) -> str | None:
    """A sentence if the plan's full step differs from the compared pipeline time; else None."""
    planned, predicted = comparison.planned_step, comparison.makespan.predicted
    if abs(planned - predicted) <= MIN_STEP_DIFFERENCE * planned:
        return None
    cores = "" if comparison.cores is None else ", each device with a core of its own"
    step = time_words(planned, seconds=True)
    return (
        f"These are times of the pipeline; the plan's whole step, gradients and optimizer included, is {step}{cores}."
    )


MIN_STEP_DIFFERENCE = 5e-4
"""Smallest difference of two predictions that is mentioned, as a fraction of the step."""


def _operations(title: str, pairs: Mapping[str, Pair]) -> Table:
    """A table with a row per operation or kind of operation."""
    table = titled_table(title, ("operation", "predicted", "measured", "ratio"), texts=("operation",))
    for name, pair in pairs.items():
        table.add_row(name, *_times(pair), _ratio(pair))
    return table


def _which(comparison: Comparison) -> str:
    """The measured step that is compared, and the steps from which it was chosen."""
    first, last = min(comparison.steps), max(comparison.steps)
    if first == last:
        return f"Step {comparison.step}"
    return f"Step {comparison.step} (counted from 0), the typical one of steps {first} to {last}"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison for `--json`."""
    entries: dict[str, Any] = msgspec.to_builtins(comparison)
    return {**entries, "worst": [{"operation": worst["operation"], **worst} for worst in entries["worst"]]}


def _times(pair: Pair) -> tuple[str, str]:
    return time_words(pair.predicted, seconds=True), time_words(pair.measured, seconds=True)


def _ratio(pair: Pair) -> str:
    return "-" if pair.ratio is None else f"{pair.ratio:.2f}"
