"""SCOPE's integer program in numbers: times and bytes as integers, and what is alive on each device.

Times are rounded to about a millionth of the slowest layer, bytes are rounded up to about a millionth of the limit, so
that no answer breaks it.  Both units are powers of two, so that small integers stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from debubble.ir import Kind, Schedule
from debubble.papers.scope.program.layer_types import LayerRun

RESOLUTION = 2**20


@dataclass(frozen=True)
class DeviceInstance:
    """One device's numbers.

    Attributes:
        stages: Its stages, one per chunk.
        room: Bytes for its layers' states, for what is alive of them and for what one recomputation brings back.
        static: Bytes of a layer of each run.
        kept: `kept[row][run][option][chunk]`: bytes of a layer's activations, at each combination alive; empty without
            a limit.
        restored: `restored[run][option]`: what recomputing such a layer brings back.
        alive: `alive[row][chunk]`: micro-batches alive at each of these combinations.
        unit: Bytes that all of these sizes are counted in.
    """

    stages: tuple[int, ...]
    room: int
    static: tuple[int, ...]
    kept: tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]
    restored: tuple[tuple[int, ...], ...]
    alive: tuple[tuple[int, ...], ...]
    unit: float


@dataclass(frozen=True)
class Instance:
    """The integer program's numbers.

    Attributes:
        counts: Layers per run.
        times: `times[run][option]`: time of a layer per micro-batch, in time units.
        activations: `activations[run][option]`: bytes of a layer's activations, of one micro-batch.
        restored: `restored[run][option]`: bytes that recomputing such a layer brings back.
        devices: What holds for each device.
        micro_batches: Micro-batches per step.
        time_unit: Seconds (or the costs' own unit of time) per time unit.
    """

    counts: tuple[int, ...]
    times: tuple[tuple[int, ...], ...]
    activations: tuple[tuple[float, ...], ...]
    restored: tuple[tuple[float, ...], ...]
    devices: tuple[DeviceInstance, ...]
    micro_batches: int
    time_unit: float

    @property
    def chunks(self) -> int:
        """Stages per device."""
        return len(self.devices[0].stages)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.devices) * self.chunks

    @property
    def weight(self) -> int:
        """Weight of the slowest device: the objective is weight x (max T) + sum T, C times the step time."""
        return self.micro_batches * self.chunks - 1

    @cached_property
    def most(self) -> int:
        """Time that no device can exceed."""
        return sum(count * max(times) for count, times in zip(self.counts, self.times, strict=True))

    @cached_property
    def shortest(self) -> tuple[int, ...]:
        """Per run, the time of a layer without recomputation."""
        return tuple(map(min, self.times))

    @cached_property
    def windows(self) -> tuple[range, ...]:
        """Per run, the stages that may hold its layers if every stage holds at least one."""
        total, before, windows = sum(self.counts), 0, []
        for count in self.counts:
            windows.append(range(max(0, self.stages - total + before), min(self.stages, before + count)))
            before += count
        return tuple(windows)


def instance(runs: Sequence[LayerRun], schedule: Schedule, *, limits: Sequence[float], static: float) -> Instance:
    """The numbers for a model's runs on a schedule; `static`: bytes on every device beside its layers' own."""
    time_unit = _unit(max(option.time for run in runs for option in run.options))
    everywhere = max((run.workspace for run in runs if run.count > 1), default=0.0)
    devices = tuple(
        _device(runs, stages, combinations, limit=limit, static=static + everywhere, everywhere=everywhere)
        for stages, combinations, limit in zip(schedule.placement.stages_of, alive(schedule), limits, strict=True)
    )
    return Instance(
        counts=tuple(run.count for run in runs),
        times=tuple(tuple(round(option.time / time_unit) for option in run.options) for run in runs),
        activations=tuple(tuple(option.activation for option in run.options) for run in runs),
        restored=tuple(tuple(option.restored for option in run.options) for run in runs),
        devices=devices,
        micro_batches=schedule.micro_batches,
        time_unit=time_unit,
    )


def _device(
    runs: Sequence[LayerRun],
    stages: Sequence[int],
    combinations: Sequence[tuple[int, ...]],
    *,
    limit: float,
    static: float,
    everywhere: float,
) -> DeviceInstance:
    limited = limit < float("inf")
    unit = _unit(limit) if limited else 1.0
    return DeviceInstance(
        stages=tuple(stages),
        room=math.floor(limit / unit) - math.ceil(static / unit) if limited else 0,
        static=tuple(
            math.ceil((run.static + max(0.0, run.workspace - everywhere) * (run.count == 1)) / unit) for run in runs
        ),
        kept=tuple(
            tuple(
                tuple(tuple(math.ceil(n * option.activation / unit) for n in numbers) for option in run.options)
                for run in runs
            )
            for numbers in (combinations if limited else ())
        ),
        restored=tuple(tuple(math.ceil(option.restored / unit) for option in run.options) for run in runs),
        alive=tuple(combinations) if limited else (),
        unit=unit,
    )


def alive(schedule: Schedule) -> list[list[tuple[int, ...]]]:
    """Per device, the combinations of micro-batches alive per chunk that its order reaches, as far as they matter.

    What is alive is linear in the combination, so those that a mixture of two others covers need no row.
    """
    return [_extreme(sorted(set(_reached(schedule, device)))) for device in range(schedule.devices)]


def _reached(schedule: Schedule, device: int) -> Iterator[tuple[int, ...]]:
    """The micro-batches alive per chunk wherever a backward follows a forward: there is more nowhere else."""
    chunk = {stage: k for k, stage in enumerate(schedule.placement.stages_of[device])}
    alive = [0] * len(chunk)
    before = None
    for op in schedule.orders[device]:
        if op.kind is Kind.F:
            alive[chunk[op.stage]] += 1
        elif op.kind in (Kind.B, Kind.W):
            if before is Kind.F:
                yield tuple(alive)
            alive[chunk[op.stage]] -= 1
        before = op.kind


def _extreme(rows: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The rows, in order, that neither another row nor a mixture of their neighbours covers."""
    kept: list[tuple[int, ...]] = []
    for row in rows:
        if any(other != row and all(a <= b for a, b in zip(row, other, strict=True)) for other in rows):
            continue
        kept.append(row)
        while len(kept) > 2 and _covered(kept[-2], kept[-3], kept[-1]):
            del kept[-2]
    return kept


def _covered(row: Sequence[int], left: Sequence[int], right: Sequence[int]) -> bool:
    """Tell whether some share x of `left` and 1 - x of `right` is at least `row` everywhere."""
    low, high = 0.0, 1.0
    for middle, a, b in zip(row, left, right, strict=True):
        if a > b:
            low = max(low, (middle - b) / (a - b))
        elif a < b:
            high = min(high, (b - middle) / (b - a))
        elif middle > a:
            return False
    return low <= high


def _unit(largest: float) -> float:
    """The power of two of which `largest` has about RESOLUTION."""
    return 2.0 ** math.ceil(math.log2(largest)) / RESOLUTION
