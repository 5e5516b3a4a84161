import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InfeasibleError, Number, Placement, StageCosts
from debubble.planners import FixedStages, ModelUnits, Problem, planners
from debubble.planners.initial_schedules import initial
from debubble.schedules import schedules
from debubble.search.annealing.search import best_starts
from debubble.search.effort import Effort
from debubble.search.problem import OrderProblem
from debubble.simulator import simulate
from tests.search.orders import offload_problems
from tests.strategies import stage_costs


def costs(p: int, to: float | None, limit: int) -> StageCosts:
    return StageCosts.of(
        stages=p, forward=10, backward_input=10, backward_weight=10, activation=2, activation_after_input=1,
        communication=1, offload=to, memory_limit=2 * limit,
    )  # fmt: skip


def units() -> Units:
    inner = Unit(
        type="dense", layer=None, forward=2, backward_input=2, backward_weight=2, static=1,
        strategies={"none": Strategy(4), "full": Strategy(1, 2)},
    )  # fmt: skip
    ends = Unit(
        type="end", layer=None, forward=1, backward_input=1, backward_weight=1, static=1,
        strategies={"none": Strategy(1)},
    )  # fmt: skip
    return Units(units=(ends, *[inner] * 8, ends), communication=0.1, offload_bandwidth=2, memory_limit=(24,))


@pytest.mark.parametrize(("chunks", "is_fixed"), [(1, True), (5, True), (2, False)])
def test_optpipe_answers_for_any_number_of_chunks(chunks: int, is_fixed: bool) -> None:
    fixed = FixedStages(StageCosts.of(stages=2 * chunks, memory_limit=5 * chunks))
    problem = Problem(
        devices=2, micro_batches=4, workload=fixed if is_fixed else ModelUnits(units()), chunks=chunks, effort=0.05
    )
    result = planners["optpipe"](problem)
    assert result.solution.schedule.stages == 2 * chunks
    assert result.lower_bound <= result.makespan


def test_optpipe_is_proven_optimal_and_not_slower_than_rules() -> None:
    problem = Problem(devices=4, micro_batches=8, workload=FixedStages(costs(4, 10, 3)), effort=20)
    results = {name: planners[name](problem) for name in ("optpipe", "adaoffload", "pipeoffload")}
    assert results["optpipe"].gap == 0
    assert results["optpipe"].makespan == 273
    assert 273 <= results["adaoffload"].makespan <= results["pipeoffload"].makespan
    for result in results.values():
        assert all(peak <= 6 for peak in result.timeline.peak_memory)


def test_units_are_partitioned_and_ordered_within_memory() -> None:
    problem = Problem(devices=2, micro_batches=4, workload=ModelUnits(units()), effort=0.3)
    for name in ("optpipe", "adaoffload", "pipeoffload"):
        result = planners[name](problem)
        assert result.solution.partition is not None
        assert sum(map(len, result.solution.partition)) == 10
        assert all(peak <= 24 for peak in result.timeline.peak_memory)


BASELINES = ("adaoffload", "pipeoffload", "zb")


@pytest.mark.slow
@given(limit=st.integers(2, 8), to=st.sampled_from([1, 5, 10, 20, 40]), m=st.integers(1, 6))
@settings(max_examples=6)
def test_optpipe_without_effort_is_as_fast_as_the_best_baseline(limit: int, to: int, m: int) -> None:
    costs_ = costs(3, to, limit)
    times = []
    for name in BASELINES:
        options = {"chunks": 1} if name == "pipeoffload" else {"steps": 0} if name == "zb" else {}
        schedule = schedules[name](devices=3, micro_batches=m, costs=costs_, **options)
        times.append(simulate(schedule, costs_).makespan)
    result = planners["optpipe"](Problem(devices=3, micro_batches=m, workload=FixedStages(costs_), effort=0))
    assert result.makespan <= min(times)


@pytest.mark.slow
def test_a_searched_zb_is_a_start_if_nothing_must_move() -> None:
    tight = costs(4, 40, 3)
    searched = simulate(schedules["zb"](devices=4, micro_batches=8, costs=tight), tight).makespan
    problem = OrderProblem(placement=Placement.linear(4), micro_batches=8, costs=tight, offload=True)
    assert searched == 326
    names = [schedule.name for schedule in initial(problem, Effort(10))]
    assert (len(names), names[0]) == (4, "zb")
    assert [problem.value(initial(problem, Effort(effort))[0]) for effort in (10, 1)] == [326, 330]


@pytest.mark.slow
@given(data=st.data(), limit=st.integers(2, 9), moved=st.booleans())
@settings(max_examples=2)
def test_no_schedule_of_two_chunks_is_faster(data: st.DataObject, limit: int, moved: bool) -> None:
    stages = data.draw(stage_costs(stages=4, offload=moved))
    stages = stages.with_limit(limit * max(stages.activation))
    problem = Problem(devices=2, micro_batches=4, chunks=2, workload=FixedStages(stages), effort=0)
    times: dict[str, Number] = {}
    for name, entry in schedules.items():
        if entry.default_chunks == 2 or "chunks" in entry.options:
            options = entry.accepted_options(chunks=2)
            with contextlib.suppress(DebubbleError):
                schedule = entry(devices=2, micro_batches=4, costs=stages, **options)
                recomputes = schedule.fused_recompute or schedule.explicit_recompute
                if schedule.stages == 4 and not recomputes:
                    times[name] = simulate(schedule, stages).makespan
    if times:
        assert planners["optpipe"](problem).makespan <= min(times.values()), min(times, key=lambda name: times[name])


@pytest.mark.parametrize("limit", [6, pytest.param(7, marks=pytest.mark.slow)])
def test_starts_of_two_chunks_are_close_to_the_bound(limit: int) -> None:
    """Eight devices without offload, with less memory than the eight micro-batches of 1F1B need."""
    stages = StageCosts.of(
        stages=16, forward=10, backward_input=10, backward_weight=10, communication=1, activation=2,
        activation_after_input=1, memory_limit=4 * limit,
    )  # fmt: skip
    problem = OrderProblem(placement=Placement.v_shape(8, 2), micro_batches=32, costs=stages)
    *_, best = best_starts(problem, effort=Effort(10))
    assert best.value <= {7: 2051, 6: 2162}[limit]
    assert best.bound == {7: 2031, 6: 2072}[limit]


def test_a_recomputing_problem_has_no_published_start() -> None:
    plain = OrderProblem(placement=Placement.linear(2), micro_batches=4, costs=costs(2, 10, 2), offload=True)
    assert initial(plain, Effort(0))
    assert initial(replace(plain, fused_recompute=frozenset({0})), Effort(0)) == []


@given(offload_problems(micro_batches=5))
@settings(max_examples=5)
def test_plans_of_the_rules_take_the_time_of_their_schedules(problem: OrderProblem) -> None:
    p, m, stages = problem.devices, problem.micro_batches, problem.costs
    for name, options in (("adaoffload", {}), ("pipeoffload", {"chunks": 1})):
        try:
            schedule = schedules[name](devices=p, micro_batches=m, costs=stages, **options)
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                planners[name](Problem(devices=p, micro_batches=m, workload=FixedStages(stages)))
            continue
        planned = planners[name](Problem(devices=p, micro_batches=m, workload=FixedStages(stages)))
        assert planned.makespan == simulate(schedule, stages).makespan


@pytest.mark.parametrize(("retained", "optimum"), [(0, 11), (1, 12)])
def test_recomputation_that_frees_memory_changes_the_optimum(retained: int, optimum: int) -> None:
    stages = StageCosts.of(stages=3, activation=1, activation_recomputed=retained, offload=1, memory_limit=2)
    result = planners["optpipe"](Problem(devices=3, micro_batches=3, workload=FixedStages(stages), effort=5))
    assert (result.makespan, result.gap) == (optimum, 0)


def test_the_rules_need_a_link_to_the_host() -> None:
    problem = Problem(devices=2, micro_batches=4, workload=FixedStages(costs(2, None, 2)))
    for name in ("adaoffload", "pipeoffload"):
        with pytest.raises(InfeasibleError, match="no link"):
            planners[name](problem)
