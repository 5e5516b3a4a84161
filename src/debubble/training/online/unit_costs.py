"""The units of a model with the times that a run has measured: a profile made within the running pipeline.

Forwards are measured unit by unit; a backward as far as recomputation cuts it into segments.  Equal units share what is
measured of any of them, and the units of a segment share its time as they were assumed to.
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
"""The type and the assumed times of a unit: units that share them are measured together."""


def measured_profile(plan: Plan, costs: StageCosts, steps: Sequence[TraceStep]) -> Mapping[str, Any] | None:
    """The content of a profile with the times of some steps of a plan; the plan's own if they measured no units.

    Args:
        plan: What ran.
        costs: Its costs as they were measured, with the times of messages and offloads.
        steps: What was measured of it.
    """
    units = units_of(plan) if any(step.units for step in steps) else None
    if units is None or units.on_devices:
        return plan.profile
    times = _median_times(steps)
    forward = _paces(_ran(plan, units, times, Kind.F, {}))
    whole = _paces(_ran(plan, units, times, Kind.B, forward))
    split = _paces(_ran(plan, units, times, Kind.I, forward))
    messages = [float(time) for time in costs.communication if time]

    def measured(unit: Unit) -> Unit:
        pace = forward.get(_kind(unit), 1.0)
        back = whole.get(_kind(unit), split.get(_kind(unit), pace))
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
    """The median over steps of the time of each run of units."""
    found: defaultdict[tuple[str, int, int, int], list[float]] = defaultdict(list)
    for unit in (unit for step in steps for unit in step.units):
        found[unit[:4]].append(unit.seconds)
    return [UnitTime(*units, median(seconds)) for units, seconds in found.items()]


def _ran(
    plan: Plan, units: Units, times: Sequence[UnitTime], kind: Kind, forward: Mapping[UnitKind, float]
) -> Iterator[tuple[Sequence[Unit], float]]:
    """Units that ran together in operations of a kind, and how much longer they took than assumed.

    What they recompute inside a backward takes as much longer as their forwards, and is not part of that.
    """
    partition, schedule = partition_named(plan.partition, units), plan.schedule
    explicit = {stage for stage, _ in schedule.explicit_recompute}
    for time in (time for time in times if time.kind == kind.value):
        if kind is not Kind.F and time.stage in explicit | schedule.recompute_fraction.keys():
            continue
        ran = [(units.units[index], name) for index, name in partition[time.stage][time.first :][: time.length]]
        assumed = sum(_time(unit, kind) for unit, _ in ran)
        again = 0.0
        if kind is not Kind.F and time.stage in schedule.fused_recompute:
            again = sum(float(unit.strategies[name].recompute) * forward.get(_kind(unit), 1.0) for unit, name in ran)
        if assumed:
            rest = time.seconds - again
            yield [unit for unit, _ in ran], rest / assumed if rest > 0 else time.seconds / (assumed + again)


def _time(unit: Unit, kind: Kind) -> float:
    """The assumed time of a unit in an F, an I or a B."""
    if kind is Kind.F:
        return float(unit.forward)
    return float(unit.backward_input) + (float(unit.backward_weight) if kind is Kind.B else 0.0)


def _paces(ran: Iterator[tuple[Sequence[Unit], float]]) -> dict[UnitKind, float]:
    """Measured over assumed times of units, by what ran with the fewest others."""
    found: defaultdict[UnitKind, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for together, pace in ran:
        for unit in together:
            found[_kind(unit)][len(together)].append(pace)
    return {kind: median(by_length[min(by_length)]) for kind, by_length in found.items()}


def _kind(unit: Unit) -> UnitKind:
    return unit.type, float(unit.forward), float(unit.backward_input), float(unit.backward_weight)


def _at_pace(unit: Unit, forward: float, backward_input: float, backward_weight: float) -> Unit:
    """The unit whose times are as much longer as said; it recomputes at the pace of its forward."""
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
    """Bytes per second of the host link, as much faster than assumed as measured offloads were."""
    if units.offload_bandwidth is None or assumed.offload is None or measured.offload is None:
        return units.offload_bandwidth
    paces = [float(a / b) for a, b in zip(assumed.offload, measured.offload, strict=True) if a and b]
    return float(units.offload_bandwidth) * median(paces) if paces else units.offload_bandwidth
