"""Plan against measurement, operation by operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from debubble.formatting import cores_words, size_words, time_words
from debubble.ir import Kind, Lane, Plan, Trace
from debubble.simulator import TimedOperation
from debubble.simulator.timeline import WORK
from debubble.views.palette import KIND_WORDS
from debubble.views.scene import Scene, measured_peaks
from debubble.views.terminal import titled_table


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One figure, predicted and measured: seconds, bytes, or a fraction."""

    predicted: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted; None if nothing was predicted."""
        return self.measured / self.predicted if self.predicted else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The plan beside the typical measured step.

    Attributes:
        step: Number of that step, which is of median length.
        steps: The steps among which it is typical: all that were measured but the warm-up.
        cores: Cores that the devices shared, as the prediction has it too; None: each device has its own.
        makespan: Of the step, in seconds.
        bubble_fraction: Of the step.
        kinds: Mean seconds of one operation of each kind.
        busy: Seconds per device.
        peak_memory: Bytes per device, measured over all of `steps`.
        worst: The compute operations that are furthest from their prediction.
        drift: A sentence on the largest difference.
        around: The devices' work before and after their programs: mean seconds per device.
        seconds: Time of the measured step with all that.
    """

    step: int
    steps: tuple[int, ...]
    cores: int | None
    makespan: Pair
    bubble_fraction: Pair
    kinds: dict[Kind, Pair]
    busy: tuple[Pair, ...]
    peak_memory: tuple[Pair, ...]
    worst: tuple[tuple[str, Pair], ...]
    drift: str
    around: dict[str, float]
    seconds: float


def compare(plan: Plan, trace: Trace) -> Comparison:
    """Compare a plan with the trace of its run.

    Raises:
        InputError: If the trace is not of this plan.
    """
    predicted, measured = Scene.pair(plan, trace)
    both = list(zip(predicted.timeline.operations, measured.timeline.operations, strict=True))
    compute = [(p, m) for p, m in both if p.lane is Lane.COMPUTE and p.op.kind in WORK]
    worst = sorted(compute, key=lambda pair: abs(float(pair[1].duration) - float(pair[0].duration)), reverse=True)[:5]
    makespan = _pair(predicted.timeline.makespan, measured.timeline.makespan)
    return Comparison(
        step=trace.typical.step,
        steps=tuple(step.step for step in trace.warm),
        cores=trace.cores,
        makespan=makespan,
        bubble_fraction=_pair(predicted.timeline.bubble_fraction, measured.timeline.bubble_fraction),
        kinds=_kinds(both),
        busy=tuple(map(_pair, predicted.timeline.busy, measured.timeline.busy)),
        peak_memory=tuple(map(_pair, predicted.peak_memory, measured_peaks(trace) or measured.peak_memory)),
        worst=tuple((p.name, _pair(p.duration, m.duration)) for p, m in worst),
        drift=_drift(makespan, compute),
        around=_around(trace),
        seconds=trace.typical.seconds,
    )


def _pair(predicted: Any, measured: Any) -> Pair:
    return Pair(predicted=float(predicted), measured=float(measured))


def _kinds(both: list[tuple[TimedOperation, TimedOperation]]) -> dict[Kind, Pair]:
    times: dict[Kind, list[tuple[float, float]]] = {}
    for p, m in both:
        times.setdefault(p.op.kind, []).append((float(p.duration), float(m.duration)))
    means = {
        kind: _pair(sum(p for p, _ in pairs) / len(pairs), sum(m for _, m in pairs) / len(pairs))
        for kind, pairs in times.items()
    }
    return {kind: means[kind] for kind in Kind if kind in means and (means[kind].predicted or means[kind].measured)}


def _around(trace: Trace) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phase in sorted(trace.typical.phases, key=lambda phase: phase.start):
        sums[phase.what] = sums.get(phase.what, 0.0) + phase.end - phase.start
    return {what: total / trace.devices for what, total in sums.items()}


def _drift(makespan: Pair, compute: list[tuple[TimedOperation, TimedOperation]]) -> str:
    """A sentence on how the step differs, and which kind of operation on which stage differs most in that direction."""
    sentence = f"The step took {makespan.measured / makespan.predicted:.2f} times as long as predicted"
    groups: dict[tuple[Kind, int], list[tuple[float, float]]] = {}
    for p, m in compute:
        groups.setdefault((p.op.kind, p.op.stage), []).append((float(p.duration), float(m.duration)))
    sums = {key: _pair(sum(p for p, _ in pairs), sum(m for _, m in pairs)) for key, pairs in groups.items()}
    sign = 1 if makespan.measured > makespan.predicted else -1
    kind, stage = max(sums, key=lambda key: sign * (sums[key].measured - sums[key].predicted))
    most = sums[kind, stage]
    if abs(makespan.measured - makespan.predicted) <= 0.02 * makespan.predicted or most.ratio is None:
        return f"{sentence}."
    if sign * (most.measured - most.predicted) <= 0:
        return f"{sentence}, although no stage computed {'slower' if sign > 0 else 'faster'}: it waited differently."
    return f"{sentence}; furthest off is {KIND_WORDS[kind]} on stage {stage}, at {most.ratio:.2f} times its prediction."


def render(comparison: Comparison) -> RenderableType:
    """Tables for the terminal."""
    kinds = _operations("Mean time per operation", {KIND_WORDS[kind]: pair for kind, pair in comparison.kinds.items()})
    worst = _operations("Furthest from their prediction", dict(comparison.worst))
    columns = ("device", "busy, predicted", "measured", "ratio", "peak memory, predicted", "measured", "ratio")
    devices = titled_table("Devices", columns)
    for device, (busy, peak) in enumerate(zip(comparison.busy, comparison.peak_memory, strict=True)):
        sizes = (size_words(peak.predicted), size_words(peak.measured))
        devices.add_row(str(device), *_times(busy), _ratio(busy), *sizes, _ratio(peak))
    title = f"Around the program: the whole step took {time_words(comparison.seconds, seconds=True)}"
    around = titled_table(title, ("mean per device", "measured"), texts=("mean per device",))
    for what, seconds in comparison.around.items():
        around.add_row(what, time_words(seconds, seconds=True))
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
    return Group(Text(head, style="bold"), Text(comparison.drift + "\n"), *parts)


def _operations(title: str, pairs: Mapping[str, Pair]) -> Table:
    """A row for each operation, or kind of operations."""
    table = titled_table(title, ("operation", "predicted", "measured", "ratio"), texts=("operation",))
    for name, pair in pairs.items():
        table.add_row(name, *_times(pair), _ratio(pair))
    return table


def _which(comparison: Comparison) -> str:
    """The step that the figures are of, and how it was chosen."""
    first, last = min(comparison.steps), max(comparison.steps)
    if first == last:
        return f"Step {comparison.step}"
    return f"Step {comparison.step}, the typical one of steps {first} to {last}"


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison for `--json`."""
    return {
        "step": comparison.step,
        "steps": list(comparison.steps),
        "cores": comparison.cores,
        "makespan": _entry(comparison.makespan),
        "bubble_fraction": _entry(comparison.bubble_fraction),
        "kinds": {kind.value: _entry(pair) for kind, pair in comparison.kinds.items()},
        "busy": [_entry(pair) for pair in comparison.busy],
        "peak_memory": [_entry(pair) for pair in comparison.peak_memory],
        "worst": [{"operation": name, **_entry(pair)} for name, pair in comparison.worst],
        "drift": comparison.drift,
        "around": comparison.around,
        "seconds": comparison.seconds,
    }


def _entry(pair: Pair) -> dict[str, float | None]:
    return {**asdict(pair), "ratio": pair.ratio}


def _times(pair: Pair) -> tuple[str, str]:
    return time_words(pair.predicted, seconds=True), time_words(pair.measured, seconds=True)


def _ratio(pair: Pair) -> str:
    return "-" if pair.ratio is None else f"{pair.ratio:.2f}"
