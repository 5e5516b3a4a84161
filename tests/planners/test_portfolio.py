from contextlib import suppress
from dataclasses import replace

import pytest

import debubble as db
from debubble.costs.partition import Partition
from debubble.costs.unit import HostStates, Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import DebubbleError, RunOptions, StageCosts
from debubble.planners import FixedStages, ModelUnits, Problem, planners
from debubble.planners.model_problem import problem_of
from debubble.planners.partitioning.balance import even_counts
from debubble.schedules import schedules
from debubble.simulator import simulate


def llama_like(layers: int, *, offload: bool = False) -> Units:
    layer = Unit(
        type="dense", layer=0, forward=4, backward_input=5, backward_weight=3, static=10,
        strategies={"none": Strategy(8), "full": Strategy(1, 4)},
    )  # fmt: skip
    head = replace(layer, type="head", forward=3, backward_input=3, backward_weight=3)
    bandwidth = 2 if offload else None
    return Units(units=(*(layer,) * layers, head), communication=1, offload_bandwidth=bandwidth, memory_limit=(400,))


@pytest.mark.slow
def test_no_schedule_of_the_library_is_faster() -> None:
    units = llama_like(11)
    result = planners["portfolio"](
        Problem(workload=ModelUnits(units), devices=4, micro_batches=8, effort=5, deadline=1e6)
    )
    slower = 0
    for entry in schedules.values():
        placement = entry(devices=4, micro_batches=8).placement
        costs = units.stage_costs(Partition.cut(units, even_counts(units, placement.stages)), placement)
        schedule = entry(devices=4, micro_batches=8, costs=costs.with_limit(None))
        with suppress(DebubbleError):
            assert result.time <= simulate(schedule, costs).makespan
            slower += 1
    assert slower > 10


def test_a_step_of_many_micro_batches_is_simulated_in_full() -> None:
    problem = Problem(workload=ModelUnits(llama_like(11)), devices=4, micro_batches=66, effort=1, deadline=1e6)
    result = planners["portfolio"](problem)
    assert result.solution.schedule.micro_batches == 66
    assert result.time == simulate(result.solution.schedule, result.solution.costs).makespan
    assert result.gap < 0.1


def test_a_plan_that_fits_only_as_a_short_step_is_rejected() -> None:
    """GPipe keeps the activations of all micro-batches, so that only a short step fits."""
    costs = StageCosts.of(stages=2, memory_limit=8)
    result = planners["portfolio"](Problem(workload=FixedStages(costs), devices=2, micro_batches=40, deadline=1e6))
    assert max(result.timeline.peak_memory) <= 8


@pytest.mark.slow
def test_portfolio_is_as_fast_as_zb_v_under_its_limit() -> None:
    costs = StageCosts.of(
        stages=8, forward=10, backward_input=10, backward_weight=10, communication=1, activation=1, memory_limit=5
    )
    problem = Problem(workload=FixedStages(costs), devices=4, chunks=2, micro_batches=8, effort=1)
    makespan = simulate(schedules["zb-v"](devices=4, micro_batches=8, costs=costs), costs).makespan
    assert planners["portfolio"](problem).time <= makespan == 588


def test_without_effort_a_small_step_is_as_fast_as_pipeoffload() -> None:
    costs = StageCosts.of(
        stages=3, forward=5, backward_input=4, backward_weight=4, recompute=5, communication=2, activation=4,
        offload=9, memory_limit=9,
    )  # fmt: skip
    makespan = simulate(schedules["pipeoffload"](devices=3, micro_batches=8, chunks=1, costs=costs), costs).makespan
    result = planners["portfolio"](Problem(workload=FixedStages(costs), devices=3, micro_batches=8, effort=0))
    assert result.time <= makespan == 146


@pytest.mark.slow
def test_a_quarter_of_gpt3_is_planned_close_to_its_bound() -> None:
    """The busiest device has two attentions, an MLP and the head; otherwise another device has four half-layers."""
    gpt3 = db.models["gpt3-175b"]
    quarter, options = replace(gpt3, per_layer=gpt3.per_layer[:24]), RunOptions(tensor=8, sequence_length=2048)
    problem = problem_of(quarter, db.Cluster.parse("128xH100-80GB"), options, micro_batches=64, pipeline=16)
    assert isinstance(problem.workload, ModelUnits)
    work = {unit.type: float(unit.work) for unit in problem.workload.units.units}
    busiest = 2 * work["attention"] + work["mlp"] + work["head"]
    assert busiest < 3 * work["attention"] + work["mlp"]
    result = planners["portfolio"](replace(problem, effort=2, deadline=1e6))
    assert 64 * busiest < result.time < 1.02 * 64 * busiest
    assert not result.solution.cut_off


def with_hosts(*, limit: int, step: float = 1) -> Problem:
    """Eight layers on two devices; the host may take the optimizer states, 60 of the 100 bytes of a layer."""
    layer = Unit(
        type="dense", layer=0, forward=4, backward_input=5, backward_weight=3, static=100,
        strategies={"none": Strategy(8), "full": Strategy(1, 4)},
        on_host=HostStates(static=40, gradients=1, parameters=1, step=step),
    )  # fmt: skip
    units = Units(units=(layer,) * 8, communication=1, offload_bandwidth=2, memory_limit=(limit,))
    return Problem(workload=ModelUnits(units), devices=2, micro_batches=6, effort=1, deadline=1e6)


@pytest.mark.slow
def test_states_that_do_not_fit_are_offloaded() -> None:
    result = planners["portfolio"](with_hosts(limit=300))
    assert result.solution.schedule.host_steps
    assert max(result.timeline.peak_memory) <= 300


@pytest.mark.slow
def test_hosts_step_if_that_saves_recomputation() -> None:
    limited = with_hosts(limit=415)
    result = planners["portfolio"](limited)
    assert result.solution.schedule.host_steps
    assert not result.solution.schedule.fused_recompute
    assert isinstance(limited.workload, ModelUnits)
    without = replace(limited.workload.units, offload_bandwidth=None)
    assert result.time < planners["portfolio"](replace(limited, workload=ModelUnits(without))).time


@pytest.mark.parametrize(("limit", "step"), [(4000, 1), (415, 1000)])
def test_devices_step_if_memory_suffices_or_hosts_are_slow(limit: int, step: float) -> None:
    assert not planners["portfolio"](with_hosts(limit=limit, step=step)).solution.schedule.host_steps
