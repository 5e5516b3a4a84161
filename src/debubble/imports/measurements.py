"""Fits the unit costs of a plan's model to timings that another framework measured when it ran the plan.

A Kineto trace of torch.profiler, which torchtitan writes per rank, names torch's pipeline operations (`PP:2F5`);
Megatron-LM's log has the total time of all forwards and of all backwards of a step on the slowest rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from debubble.costs.partition import partition_named
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.imports.logs import ITERATION, profiled_steps, read_text, trace_events
from debubble.ir import InputError, Kind
from debubble.planners.model_problem import half_layers
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan

_OPERATION = re.compile(r"PP:(\d+)([FBIW])\d+")
_OLD_OPERATION = re.compile(r"(?:Forward|Backward) \d+")
_TIMER = re.compile(r"(forward|backward)-compute[ .]*: (?:\([\d.]+, ([\d.]+)\)|([\d.]+))")
"""A timer's (min, max) over ranks (minmax), or its single value (max, and older versions)."""
_RANKS = re.compile(r"(forward|backward)-compute:[ \t]*((?:\n[^\n]*\brank +\d+: [\d.]+)+)")
"""A timer's value for every rank (--timing-log-option all)."""


@dataclass(frozen=True)
class MeasuredStep:
    """Measured seconds of a step and its operations.

    Attributes:
        operations: Seconds of an F, B, I or W of a stage, the median over micro-batches and steps.
        totals: Seconds of all forwards (F) or all backwards (B) of a step on the slowest device, the median over steps.
        step: Seconds of the step; None: not measured.
    """

    operations: Mapping[tuple[Kind, int], float]
    totals: Mapping[Kind, float]
    step: float | None


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Units with measured times, and the error of a step predicted with them.

    Attributes:
        units: The model's units with fitted times and computed bytes.
        factors: Per stage, measured over computed seconds of its forward and of its backward.
        predicted: Seconds per step of the plan with these units.
        measured: Measured seconds per step; None: not measured.
    """

    units: Units
    factors: tuple[tuple[float, float], ...]
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the predicted step; None if no step was measured."""
        return None if self.measured is None else self.predicted / self.measured - 1


def read_measurements(paths: Sequence[Path]) -> MeasuredStep:
    """Read the measurements in the traces of all ranks, or in logs.

    Raises:
        InputError: if a file cannot be read, or no file has an operation or a timer.
    """
    durations: dict[tuple[Kind, int], list[float]] = {}
    totals: dict[Kind, list[float]] = {}
    steps: list[float] = []
    old_names = False
    for path in paths:
        text = read_text(path)
        if text.lstrip().startswith("{"):
            events = trace_events(text, path)
            old_names = old_names or any(_OLD_OPERATION.fullmatch(str(event.get("name"))) for event in events)
            for key, seconds in _operations(events):
                durations.setdefault(key, []).append(seconds)
            steps += profiled_steps(events)
        else:
            for kind, seconds in _timers(text):
                totals.setdefault(kind, []).append(seconds)
            steps += [float(elapsed) / 1e3 for elapsed in ITERATION.findall(text)]
    if not durations and old_names:
        raise InputError(
            "The traces name operations as older versions of torch do ('Forward 0'), which says no stage and counts the"
            " waiting for messages: trace with a version that names them as PP:2F5."
        )
    if not durations and not totals:
        raise InputError(
            "The files have neither operations of torch's pipelining (PP:2F5) nor Megatron-LM's timers of"
            " forward-compute and backward-compute (--timing-log-level 2)."
        )
    return MeasuredStep(
        operations={key: median(values) for key, values in durations.items()},
        totals={kind: median(values) for kind, values in totals.items()},
        step=median(steps) if steps else None,
    )


def fit_units(plan: Plan, measured: MeasuredStep) -> Fit:
    """Scale the times of the units of a plan's model so that every stage takes its measured time.

    The relative times of units within a stage stay the same.

    Args:
        plan: The plan that ran.
        measured: The measured times.

    Raises:
        InputError: if the plan is of no model, or a stage of it was not measured.
    """
    described = plan.model_on_cluster
    if described is None:
        raise InputError("Only a MODEL's plan can be fitted to a trace; this one is of abstract costs.")
    factors = tuple(_factors(plan, measured))
    units = half_layers(
        *described,
        plan.options,
        pipeline=plan.devices,
        target=plan.target,
        micro_batches=plan.micro_batches,
    )
    stage_of = [stage for stage, units_of_stage in enumerate(plan.partition) for _ in units_of_stage]
    scaled = replace(units, units=tuple(_with_times(unit, *factors[stage_of[i]]) for i, unit in enumerate(units.units)))
    costs = scaled.stage_costs(
        partition_named(plan.partition, units), plan.schedule.placement, on_host=plan.schedule.host_steps
    )
    predicted = seconds_per_step(replace(plan, costs=costs.with_limit(None)))
    return Fit(units=scaled, factors=factors, predicted=predicted, measured=measured.step)


def _timers(log: str) -> Iterator[tuple[Kind, float]]:
    """Seconds of all forwards or all backwards on the slowest rank, for every step that the log has."""
    for name, slowest, alone in _TIMER.findall(log):
        yield _KINDS[name], float(slowest or alone) / 1e3
    for name, ranks in _RANKS.findall(log):
        yield _KINDS[name], max(map(float, re.findall(r"rank +\d+: ([\d.]+)", ranks))) / 1e3


_KINDS = {"forward": Kind.F, "backward": Kind.B}


def _operations(events: Iterable[Mapping[str, Any]]) -> Iterator[tuple[tuple[Kind, int], float]]:
    """The pipeline operations with their GPU durations if the trace has these, otherwise their CPU durations."""
    named = [(match, event) for event in events if (match := _OPERATION.fullmatch(str(event.get("name"))))]
    on_gpu = [pair for pair in named if pair[1].get("cat") == "gpu_user_annotation"]
    for match, event in on_gpu or named:
        yield (Kind(match[2]), int(match[1])), event["dur"] / 1e6


def _factors(plan: Plan, measured: MeasuredStep) -> Iterator[tuple[float, float]]:
    """Measured over computed seconds of forward and backward of each stage."""
    costs, schedule = plan.costs, plan.schedule
    recompute = [float(costs.recompute[s]) if s in schedule.fused_recompute else 0.0 for s in range(schedule.stages)]
    forward = [float(seconds) for seconds in costs.forward]
    backward = [
        float(costs.backward_input[s]) + float(costs.backward_weight[s]) + recompute[s] for s in range(schedule.stages)
    ]
    if measured.totals:
        busiest = [
            max(sum(times[s] for s in stages) for stages in schedule.placement.stages_of) * plan.micro_batches
            for times in (forward, backward)
        ]
        both = [measured.totals.get(kind, 0.0) / time for kind, time in zip((Kind.F, Kind.B), busiest, strict=True)]
        if not all(both):
            raise InputError("The log has timers of forwards or of backwards alone: both are needed.")
        yield from [(both[0], both[1])] * schedule.stages
        return
    for stage in range(schedule.stages):
        halves = [measured.operations.get((kind, stage)) for kind in (Kind.I, Kind.W)]
        fused = measured.operations.get((Kind.B, stage))
        seconds = fused if fused is not None else None if None in halves else sum(half or 0.0 for half in halves)
        forward_seconds = measured.operations.get((Kind.F, stage))
        if forward_seconds is None or seconds is None:
            raise InputError(f"The traces have no forward and backward of stage {stage}: give those of all ranks.")
        yield forward_seconds / forward[stage], seconds / backward[stage]


def _with_times(unit: Unit, forward: float, backward: float) -> Unit:
    """A unit with its times scaled; recomputation is scaled with the backward."""
    strategies = {
        name: replace(strategy, recompute=strategy.recompute * backward) for name, strategy in unit.strategies.items()
    }
    return replace(
        unit,
        forward=unit.forward * forward,
        backward_input=unit.backward_input * backward,
        backward_weight=unit.backward_weight * backward,
        strategies=strategies,
    )
