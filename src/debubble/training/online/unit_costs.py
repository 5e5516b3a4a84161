"""Profile of a model's units from the times measured in the running pipeline.

Forwards are measured per unit, backwards per segment between recomputations.  Equal units share their measurements, and
the time of a segment is divided among its units in proportion to their assumed times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from debubble.costs.files import units_to_dict
from debubble.costs.partition import partition_named
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir import Kind, Number, StageCosts
from debubble.ir.trace import TraceStep, UnitTime
from debubble.plans import Plan
from debubble.training.online.partition import units_of

UnitKind = tuple[str, float, float, float]
"""Type and assumed times of a unit; units of the same kind share measurements."""


def measured_profile(plan: Plan, costs: StageCosts, steps: Sequence[TraceStep]) -> Mapping[str, Any] | None:
    """The content of a profile from some measured steps; the plan's own profile if they measured no units.

    Args:
        plan: The plan that ran.
        costs: Its measured costs, with the times of messages and offloads.
        steps: The measured steps.
    """
    units = units_of(plan) if any(step.units for step in steps) else None
    if units is None or units.on_devices:
        return plan.profile
    times = _median_times(steps)
    forward = _paces(_measured_runs(plan, units, times, Kind.F, {}))
    fused = _paces(_measured_runs(plan, units, times, Kind.B, forward))
    split = _paces(_measured_runs(plan, units, times, Kind.I, forward))
    messages = [float(time) for time in costs.communication if time]

    def measured(unit: Unit) -> Unit:
        pace = forward.get(_kind(unit), 1.0)
        back = fused.get(_kind(unit), split.get(_kind(unit), pace))
        return _at_pace(unit, pace, split.get(_kind(unit), back), back)

    return units_to_dict(
        replace(
            units,
            units=tuple(map(measured, units.units)),
            communication=median(messages) if messages else units.communication,
            communication_within_node=None if messages else units.communication_within_node,
            offload_bandwidth=_bandwidth(units, plan.costs, costs),
        )
    )


def _median_times(steps: Sequence[TraceStep]) -> list[UnitTime]:
    """The median over steps of the time of each segment of units."""
    times: defaultdict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for unit in (unit for step in steps for unit in step.units):
        times[unit[:4]].append(unit.seconds)
    return [UnitTime(*units, median(seconds)) for units, seconds in times.items()]


def _measured_runs(
    plan: Plan, units: Units, times: Sequence[UnitTime], kind: Kind, forward: Mapping[UnitKind, float]
) -> Iterator[tuple[Sequence[Unit], float]]:
    """Segments of units that ran in operations of a kind, with their measured over assumed time.

    Recomputation inside a backward is subtracted, scaled like the units' forwards.
    """
    partition, schedule = partition_named(plan.partition, units), plan.schedule
    explicit = {stage for stage, _ in schedule.explicit_recompute}
    for time in (time for time in times if time.kind == kind.value):
        if kind is not Kind.F and time.stage in explicit | schedule.recompute_fraction.keys():
            continue
        ran = [(units.units[index], name) for index, name in partition[time.stage][time.first :][: time.length]]
        assumed = sum(_time(unit, kind) for unit, _ in ran)
        recompute = 0.0
        if kind is not Kind.F and time.stage in schedule.fused_recompute:
            recompute = sum(float(u.strategies[name].recompute) * forward.get(_kind(u), 1.0) for u, name in ran)
        if assumed:
            rest = time.seconds - recompute
            yield [unit for unit, _ in ran], rest / assumed if rest > 0 else time.seconds / (assumed + recompute)


def _time(unit: Unit, kind: Kind) -> float:
    """The assumed time of a unit in an F, an I or a B."""
    if kind is Kind.F:
        return float(unit.forward)
    return float(unit.backward_input) + (float(unit.backward_weight) if kind is Kind.B else 0.0)


def _paces(ran: Iterator[tuple[Sequence[Unit], float]]) -> dict[UnitKind, float]:
    """Kind of unit -> median of measured over assumed times, from the shortest segments with such a unit."""
    by_kind: defaultdict[UnitKind, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for together, pace in ran:
        for unit in together:
            by_kind[_kind(unit)][len(together)].append(pace)
    return {kind: median(by_length[min(by_length)]) for kind, by_length in by_kind.items()}


def _kind(unit: Unit) -> UnitKind:
    return unit.type, float(unit.forward), float(unit.backward_input), float(unit.backward_weight)


def _at_pace(unit: Unit, forward: float, backward_input: float, backward_weight: float) -> Unit:
    """The unit with its times multiplied by these factors; recomputation is scaled like the forward."""
    return replace(
        unit,
        forward=float(unit.forward) * forward,
        backward_input=float(unit.backward_input) * backward_input,
        backward_weight=float(unit.backward_weight) * backward_weight,
        attention_forward=float(unit.attention_forward) * forward,
        attention_backward=float(unit.attention_backward) * backward_input,
        strategies={
            name: replace(way, recompute=float(way.recompute) * forward, attention=float(way.attention) * forward)
            for name, way in unit.strategies.items()
        },
    )


def _bandwidth(units: Units, assumed: StageCosts, measured: StageCosts) -> Number | None:
    """Bytes per second of the host link, scaled by assumed over measured offload times."""
    if units.offload_bandwidth is None or assumed.offload is None or measured.offload is None:
        return units.offload_bandwidth
    paces = [float(a / b) for a, b in zip(assumed.offload, measured.offload, strict=True) if a and b]
    return float(units.offload_bandwidth) * median(paces) if paces else units.offload_bandwidth
