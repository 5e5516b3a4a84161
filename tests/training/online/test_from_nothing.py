"""An online run without a plan or profile reaches the plan that a separate profile would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.costs.files import units_to_dict
from debubble.costs.partition import partition_named
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir.trace import TraceStep, UnitTime
from debubble.planners.plan_model import plan_again
from debubble.plans import Plan
from debubble.training.online.controller import Controller
from debubble.training.online.first_plan import least_memory_plan, save_first
from debubble.training.online.partition import units_of
from debubble.training.online.scheduler import better_orders
from debubble.training.online.unit_costs import measured_profile
from tests.support.online_cases import Finished, controlled, events_of, traced
from tests.support.runtime_cases import LLAMA, with_layers

PACE = {"embedding": (1.5, 2.0), "attention": (0.7, 1.1), "mlp": (1.2, 0.9), "head": (3.0, 2.5)}
"""Slowdown of forwards and backwards by unit type on the machine, relative to computed times."""
STEPS = 60


def first_plan() -> Plan:
    model, cluster = db.Model.from_hf(with_layers(LLAMA, 8)), db.Cluster.parse("2xA100-80GB")
    return least_memory_plan(model, cluster, micro_batches=8, sequence_length=64, dtype="fp32")


def true_units(plan: Plan) -> Units:
    """Units with the times of the machine."""

    def slowed(unit: Unit) -> Unit:
        forward, backward = PACE[unit.type]
        ways = {name: replace(way, recompute=way.recompute * forward) for name, way in unit.strategies.items()}
        return replace(
            unit,
            forward=unit.forward * forward,
            backward_input=unit.backward_input * backward,
            backward_weight=unit.backward_weight * backward,
            strategies=ways,
        )

    units = units_of(replace(plan, profile=None))
    assert units is not None
    return replace(units, units=tuple(map(slowed, units.units)))


def on_machine(plan: Plan, true: Units) -> Plan:
    """The plan with the costs of the machine."""
    partition = partition_named(plan.partition, true)
    return replace(plan, costs=true.stage_costs(partition, plan.schedule.placement), timeline=None)


def segments(stage: tuple[tuple[int, str], ...], true: Units) -> Iterator[tuple[int, int, float]]:
    """First unit, count and backward seconds of the units that recompute together, or not at all."""

    def together(place: int) -> object:
        index, strategy = stage[place]
        layer = true.units[index].layer
        return strategy == "none" or ("unit", place) if strategy != "full" or layer is None else ("layer", layer)

    for _, places in groupby(range(len(stage)), together):
        first, *rest = places
        ran = [(true.units[index], name) for index, name in stage[first : first + 1 + len(rest)]]
        seconds = sum(float(u.backward_input + u.backward_weight + u.strategies[name].recompute) for u, name in ran)
        yield first, len(ran), seconds


def measured_step(plan: Plan, true: Units) -> TraceStep:
    """A traced step of the plan on the machine, with the times of its units."""
    times: list[UnitTime] = []
    for number, stage in enumerate(partition_named(plan.partition, true)):
        times += [UnitTime("F", number, i, 1, float(true.units[unit].forward)) for i, (unit, _) in enumerate(stage)]
        times += [UnitTime("B", number, first, length, took) for first, length, took in segments(stage, true)]
    return replace(traced(plan, on_machine(plan, true).costs), units=tuple(times))


def test_the_first_plan_recomputes_everything() -> None:
    plan = first_plan()
    assert (plan.schedule.name, plan.schedule.fused_recompute) == ("1f1b", frozenset({0, 1}))
    assert [unit.strategy for stage in plan.partition for unit in stage if unit.layer is not None] == ["full"] * 16


@pytest.mark.slow
def test_the_first_plan_fits_where_recomputing_is_not_enough() -> None:
    config = {**with_layers(LLAMA, 8), "max_position_embeddings": 2048}
    model, cluster = db.Model.from_hf(config), db.Cluster.parse("2xA100-80GB")
    run: dict[str, Any] = {"micro_batches": 8, "sequence_length": 2048, "dtype": "fp32"}
    limit = 0.95 * float(max(least_memory_plan(model, cluster, **run).simulate().peak_memory))
    tight = least_memory_plan(model, cluster, memory_limit=str(round(limit)), **run)
    assert tight.planner == "auto"
    assert max(tight.simulate().peak_memory) <= limit


def test_first_plan_is_named_by_its_run(tmp_path: Path) -> None:
    plan = first_plan()
    assert save_first(plan, tmp_path) == save_first(plan, tmp_path)
    other = replace(plan, options=replace(plan.options, sequence_length=32))
    assert save_first(other, tmp_path) != save_first(plan, tmp_path)


def test_units_are_measured_in_the_running_pipeline() -> None:
    plan = first_plan()
    true = true_units(plan)
    profile = measured_profile(plan, plan.costs, [measured_step(plan, true)])
    measured = units_of(replace(plan, profile=profile))
    assert measured is not None
    for actual, expected in zip(measured.units, true.units, strict=True):
        times = [float(time) for time in (expected.forward, expected.backward_input, expected.backward_weight)]
        # Both halves of a layer are one segment, so only their joint backward is known.
        accuracy = 0.15 if actual.layer is not None else 1e-6
        assert [actual.forward, actual.backward_input, actual.backward_weight] == pytest.approx(times, rel=accuracy)


def test_profile_is_unchanged_without_unit_times() -> None:
    plan = first_plan()
    assert measured_profile(plan, plan.costs, [traced(plan, plan.costs)]) is None


@pytest.mark.slow
def test_a_run_from_nothing_ends_within_2_percent_of_a_profile(tmp_path: Path) -> None:
    plan = first_plan()
    true = true_units(plan)

    def solved(plan: Plan, steps_left: int) -> Finished:
        return Finished(plan, list(better_orders(plan, effort=4.0, steps_left=steps_left))[-1:])

    controller: Controller = controlled(plan, tmp_path, search=solved, steps=10**6)
    for step in range(1, STEPS + 1):
        trace = measured_step(controller.plan, true)
        controller.after_step(step, trace.makespan, trace)
    profiled = on_machine(plan_again(plan, chunks=1, profile=units_to_dict(true), effort=1.0), true)
    ended = on_machine(controller.plan, true)
    assert "adopted" in [event for _, event in events_of(controller)]
    assert float(ended.simulate().makespan) <= 1.02 * float(profiled.simulate().makespan)
    assert float(ended.simulate().makespan) < 0.9 * float(on_machine(plan, true).simulate().makespan)
