"""Online runs move units between stages if measured times and memory justify it."""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.plans import Plan
from debubble.training.online.controller import Policy
from debubble.training.online.partition import better_partition, move_seconds, units_of
from debubble.training.online.scheduler import better_orders
from tests.support.online_cases import controlled, events_of, traced, trained
from tests.support.runtime_cases import LLAMA, assert_same_run

QUICK = Policy(settling=1, window=2)


def even_plan(devices: int) -> Plan:
    return db.plan(
        db.Model.from_hf(LLAMA), db.Cluster.parse(f"{devices}xA100-80GB"), micro_batches=4, planner="megatron-even",
        dtype="fp32", sequence_length=12,
    )  # fmt: skip


def large_plan() -> Plan:
    """A plan whose units take longer to move than a step gains."""
    return db.plan(
        db.models["llama2-7b"], db.Cluster.parse("2xA100-80GB"), micro_batches=4, planner="megatron-even",
        sequence_length=16,
    )  # fmt: skip


def slowed(plan: Plan, device: int, *, factor: float = 3.0) -> Plan:
    """The plan with the costs of a run in which one device is slower by this factor."""
    stages = plan.schedule.placement.stages_of[device]
    times = {
        name: [t * factor if s in stages else t for s, t in enumerate(getattr(plan.costs, name))]
        for name in ("forward", "backward_input", "backward_weight")
    }
    return replace(plan, costs=plan.costs.replace(**times))


def seconds(plan: Plan) -> tuple[float, float]:
    return 0.0, float(plan.simulate().makespan)


def test_units_leave_a_slow_device_for_the_best_partition() -> None:
    plan = slowed(even_plan(2), 0)
    moved = better_partition(plan, seconds)
    assert moved is not None
    assert sum(moved.lengths) == sum(plan.lengths)
    assert moved.lengths[0] < plan.lengths[0]
    assert [u.layer for stage in moved.partition for u in stage] == [u.layer for stage in plan.partition for u in stage]
    # All other partitions differ from it by one or more moves, and none is faster.
    assert better_partition(moved, seconds) is None
    assert seconds(moved) < seconds(plan)
    assert better_partition(replace(plan, model_on_cluster=None), seconds) is None


def test_moved_unit_has_the_time_of_its_new_device() -> None:
    plan = even_plan(2)
    slow, fast = (better_partition(slowed(plan, 0, factor=factor), seconds) for factor in (3.0, 1 / 3))
    assert slow is not None
    assert fast is not None
    assert slow.lengths[0] < fast.lengths[0]
    units = units_of(plan)
    assert units is not None
    work = [float(unit.forward) for unit in units.units]
    for made, factor in ((slow, 3.0), (fast, 1 / 3)):
        first = made.lengths[0]
        expected = [factor * sum(work[:first]), sum(work[first:])]
        assert list(map(float, made.costs.forward)) == pytest.approx(expected)


def test_units_move_to_free_memory() -> None:
    plan = even_plan(4)
    peaks = plan.simulate().peak_memory
    limits = [float(peak) * (0.8 if device == 1 else 2) for device, peak in enumerate(peaks)]
    tight = replace(plan, costs=plan.costs.with_limit(limits))
    better = list(better_orders(tight, effort=1.0, steps_left=1000))[-1]
    assert better.makespan_before == float("inf")
    peak_memory = better.plan.simulate().peak_memory
    assert all(float(peak) <= limit for peak, limit in zip(peak_memory, limits, strict=True))


def test_moving_time_is_weights_and_states_over_the_links() -> None:
    plan = even_plan(2)
    units = units_of(plan)
    assert units is not None
    other = better_partition(slowed(plan, 0), seconds)
    assert other is not None
    moved = units.units[other.lengths[0] : plan.lengths[0]]
    size = sum(float(unit.states.weights + unit.states.optimizer) for unit in moved if unit.states is not None)
    assert plan.cluster is not None
    hardware = plan.cluster.slowest
    expected = hardware.link_latency + size / (hardware.link_bandwidth * hardware.efficiency.link)
    assert move_seconds(plan, other) == pytest.approx(expected)
    slower = replace(other, costs=other.costs.replace(communication=[2 * c for c in other.costs.communication]))
    assert move_seconds(plan, slower) == pytest.approx(2 * expected)
    assert move_seconds(plan, plan) == 0


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_units_leave_a_slow_device_and_no_bit_changes(devices: int, tmp_path: Path) -> None:
    plan = even_plan(devices)
    controller = controlled(plan, tmp_path, steps=10**6, policy=QUICK)
    # The machine's second device takes three times as long for any unit.
    costs, seconds = partial(true_costs, plan), partial(step_of, plan)
    losses, plans, parameters = trained(plan, controller=controller, costs=costs, seconds=seconds)
    lengths = [running.lengths for running in plans]
    assert events_of(controller) == [(3, "search"), (3, "adopted"), (6, "kept")]
    assert [len(set(group)) for group in (lengths[:3], lengths[3:])] == [1, 1]
    assert lengths[3][1] < lengths[0][1]
    assert controller.journal.entries[1].units == lengths[3]
    assert f"another order with {', '.join(map(str, lengths[3]))} units" in str(controller.journal.entries[1])
    assert Plan.load(tmp_path / "plan.online.json").lengths == lengths[3]
    expected, _, weights = trained(plan)
    assert_same_run((losses, parameters), (expected, weights))


def true_costs(start: Plan, running: Plan) -> Any:
    """True costs of a plan's stages: the second device is three times as slow as planned."""
    units = units_of(start)
    assert units is not None
    index = itertools.count()
    partition = [[(next(index), "none") for _ in stage] for stage in running.partition]
    costs = units.stage_costs(partition, running.schedule.placement)
    return slowed(replace(running, costs=costs), 1).costs


def step_of(start: Plan, running: Plan) -> float:
    return float(db.simulate(running.schedule, true_costs(start, running)).makespan)


@pytest.mark.parametrize(("steps", "moves"), [(10**6, True), (5, False), (None, False)])
def test_units_move_if_remaining_steps_repay_it(steps: int | None, moves: bool, tmp_path: Path) -> None:
    plan = large_plan()
    controller = controlled(plan, tmp_path, steps=steps)
    for step in range(1, 5):
        controller.after_step(step, 1.0, traced(plan, slowed(plan, 1, factor=1.2).costs))
    assert (controller.plan.lengths != plan.lengths) == moves


@pytest.mark.slow
def test_units_that_made_steps_slower_move_back(tmp_path: Path) -> None:
    plan = even_plan(2)
    controller = controlled(plan, tmp_path, steps=10**6, policy=QUICK)
    losses, plans, _ = trained(
        plan,
        controller=controller,
        costs=partial(true_costs, plan),
        seconds=lambda p: 1.0 if p.lengths == plan.lengths else 2.0,
    )
    assert events_of(controller) == [(3, "search"), (3, "adopted"), (6, "taken back")]
    assert plans[5].lengths != plan.lengths
    assert plans[6].lengths == plan.lengths
    assert losses == trained(plan)[0]
