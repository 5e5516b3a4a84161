from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.costs import StepTail
from debubble.ir import DebubbleError, Kind, RunOptions
from debubble.papers.chronospipe.offload import offload_states
from debubble.planners import planners
from debubble.planners.answers import ONE_STAGE_TOLERANCE, PLAIN_TOLERANCE
from debubble.planners.auto import fastest_of
from debubble.planners.bounds.proven import proven_step_bound
from debubble.planners.model_problem import problem_of
from debubble.planners.problem import Solution
from debubble.planners.registry import Result, verify
from debubble.targets.orders import undivided
from tests.planners.test_fixed import MODEL

OPTIONS = RunOptions(data=2, sequence_length=2048)
CLUSTER = db.Cluster.parse("4xA100-80GB")
TAIL = StepTail(model=MODEL, cluster=CLUSTER, options=OPTIONS, pipeline=2)


def problem() -> db.Problem:
    return problem_of(MODEL, CLUSTER, OPTIONS, micro_batches=8)


def test_the_step_includes_the_time_after_the_pipeline() -> None:
    asked = problem()
    result = db.planners["dapple"](asked)
    assert result.time == result.timeline.makespan + TAIL.of_schedule(result.solution.schedule, result.solution.costs)
    assert result.summary.step_time == result.time
    # Only the optimizer's step follows the pipeline, and no plan hides all of it.
    assert TAIL.min_seconds == 0
    assert result.lower_bound == proven_step_bound(asked).time > result.pipeline_bound


def test_the_candidate_with_the_shortest_step_is_the_plan() -> None:
    *_, best = fastest_of(problem(), [name for name, entry in db.planners.items() if not entry.searches])
    steps = [c.step_time for c in best.candidates if c.step_time is not None]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(
        float(db.simulate(best.schedule, best.costs).makespan) + TAIL.of_schedule(best.schedule, best.costs)
    )


def test_every_candidate_has_its_partition_and_strategies() -> None:
    *_, best = fastest_of(problem(), ["dapple", "adapipe"])
    partitions = {c.planner: planners[c.planner](problem()).solution.partition for c in best.candidates}
    for candidate in best.candidates:
        partition = partitions[candidate.planner]
        assert partition is not None
        assert [[u.strategy for u in stage] for stage in candidate.partition] == [[n for _, n in s] for s in partition]
        assert len(candidate.recompute) == len(partition)


@pytest.mark.slow
def test_every_planner_has_the_full_effort() -> None:
    asked = replace(problem(), effort=0.2)
    *_, best = fastest_of(asked, ["joint", "chronos", "portfolio"])
    steps = {c.planner: c.step_time for c in best.candidates}
    assert {name: steps[name] for name in ("chronos", "portfolio")} == {
        name: planners[name](asked).time for name in ("chronos", "portfolio")
    }


@pytest.mark.slow
def test_the_portfolio_does_not_run_where_memory_is_short() -> None:
    model, cluster = db.models["llama2-13b"], db.Cluster.parse("8xA100-40GB")
    short = problem_of(model, cluster, RunOptions(), micro_batches=16, effort=0.6)
    *_, best = fastest_of(short, ["adapipe", "joint", "portfolio"])
    assert best.lower_bound < 0.9 * best.simulate().makespan
    assert {c.planner for c in best.candidates} == {"adapipe", "joint"}


def test_the_portfolio_runs_if_the_step_is_near_its_bound() -> None:
    ample = problem_of(MODEL, CLUSTER, OPTIONS, micro_batches=32, effort=0.1)
    *_, best = fastest_of(ample, ["joint", "portfolio"])
    assert {c.planner for c in best.candidates} == {"joint", "portfolio"}


def test_host_steps_in_the_pipeline_shorten_its_tail() -> None:
    schedule = db.schedules["chronos"](devices=2, micro_batches=8, chunks=2)
    hosted = offload_states(schedule, chunks=[1])
    assert {op.stage for op in hosted.operations if op.kind is Kind.S} == {2, 3}
    costs = db.StageCosts.of(stages=4)
    slower = db.simulate(hosted, costs.replace(host_step=1))
    assert problem().step_time(db.simulate(schedule, costs)) - problem().step_time(slower) == pytest.approx(
        TAIL.of_schedule(schedule, costs)
        - TAIL.of_schedule(hosted, costs)
        - float(slower.makespan - db.simulate(schedule, costs).makespan)
    )
    assert TAIL.min_seconds < TAIL.of_schedule(hosted, costs) < TAIL.of_schedule(schedule, costs)


NAMES = ("chronos", "adapipe", "scope", "dapple", "dapple+", "pipeoffload")


@pytest.mark.slow
def test_a_plan_with_ample_memory_neither_moves_nor_recomputes() -> None:
    plan = db.plan("llama-tiny", "2xCPU", micro_batches=4, sequence_length=128, dtype="fp32", effort=0.1)
    assert not any(op.kind in (Kind.O, Kind.R) for op in plan.schedule.operations)
    assert {unit.strategy for stage in plan.partition for unit in stage} == {"none"}


@pytest.mark.parametrize(("name", "plain"), [("dapple", True), ("dapple+", False), ("chronos", True)])
def test_a_plain_answer_neither_recomputes_nor_offloads(name: str, plain: bool) -> None:
    problem = problem_of(MODEL, db.Cluster.parse("4xA100-80GB"), RunOptions(sequence_length=2048), micro_batches=8)
    assert planners[name](problem).plain == plain


@pytest.mark.parametrize("limit", ["80GiB", pytest.param("14GiB", marks=pytest.mark.slow)])
def test_a_plain_answer_of_any_planner_wins_within_a_percent(limit: str) -> None:
    cluster = db.Cluster.parse("4xA100-80GB").with_limit(limit)
    problem = replace(problem_of(MODEL, cluster, RunOptions(sequence_length=2048), micro_batches=8), effort=0.1)
    answers: dict[str, Result] = {}
    for name in NAMES:
        try:
            answers[name] = planners[name](problem)
        except DebubbleError:
            continue
    *_, best = fastest_of(problem, NAMES)
    shortest = min(float(answer.time) for answer in answers.values())
    plain = [float(a.time) for a in answers.values() if a.plain and a.time <= (1 + PLAIN_TOLERANCE) * shortest]
    step = best.candidates[0].step_time
    assert step is not None
    assert step <= (1 + PLAIN_TOLERANCE) * shortest
    *_, fastest = fastest_of(replace(problem, plain=False), NAMES)
    assert fastest.candidates[0].step_time == min(c.step_time for c in fastest.candidates if c.step_time is not None)
    if plain:
        assert not best.schedule.offloaded
        assert not best.schedule.host_steps
        assert step <= min(plain)


def one_device(zero: int) -> tuple[Solution, float]:
    """The plan of one pipeline device on four replicas, and the step of the fastest planner."""
    options = RunOptions(sequence_length=2048, data=4, zero=zero)
    problem = problem_of(MODEL, db.Cluster.parse("4xA100-80GB"), options, micro_batches=16)
    *_, plan = fastest_of(replace(problem, effort=0.2), ("portfolio", "joint", "adapipe"))
    return plan, min(candidate.step_time for candidate in plan.candidates if candidate.step_time is not None)


def test_a_simpler_plan_has_its_excess_over_the_fastest() -> None:
    job: dict[str, Any] = {"micro_batches": 4, "sequence_length": 128, "dtype": "fp32", "effort": 0.6}
    simpler, fastest = (db.plan("llama-tiny", "2xCPU", fastest=is_fastest, **job) for is_fastest in (False, True))
    excess = float(simpler.step_time / fastest.step_time) - 1
    assert excess > 0
    assert simpler.candidates[0].plain_excess == pytest.approx(excess)


def test_states_that_do_not_fit_devices_stay_on_hosts() -> None:
    model, cluster = db.models["qwen3-8b"], db.Cluster.parse("4xRTX4090-24GB")
    asked = replace(problem_of(model, cluster, RunOptions(tensor=2), micro_batches=8), effort=0.1)
    *_, best = fastest_of(asked, ["joint"])
    assert best.partition is not None
    hosted, placement = best.schedule.host_steps, best.schedule.placement
    assert hosted
    assert best.costs.static == asked.units.stage_costs(best.partition, placement, on_host=hosted).static


def test_a_solution_that_counts_too_few_states_is_refused() -> None:
    model, cluster = db.models["qwen3-8b"], db.Cluster.parse("4xRTX4090-24GB")
    asked = replace(problem_of(model, cluster, RunOptions(tensor=2), micro_batches=8), effort=0.1)
    *_, best = fastest_of(asked, ["joint"])
    without_states = replace(best, schedule=best.schedule.without_host_steps(), timeline=None)
    with pytest.raises(AssertionError, match="counts fewer states than its stages have"):
        verify("joint", asked, without_states, 0.0)


def test_adapters_are_stepped_on_their_devices() -> None:
    plan = db.plan("qwen2.5-7b", "7xRTX3090", micro_batches=14, lora=16, effort=0.6)
    assert not plan.schedule.host_steps


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_one_stage_per_device_wins_within_two_percent(zero: int) -> None:
    plan, fastest = one_device(zero)
    assert undivided(plan.schedule).stages == 1
    assert plan.candidates[0].step_time is not None
    assert plan.candidates[0].step_time <= (1 + ONE_STAGE_TOLERANCE) * fastest
