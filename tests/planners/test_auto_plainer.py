"""What a fastest plan recomputes and offloads to no use is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

import debubble as db
from debubble.ir import DebubbleError, Kind, RunOptions
from debubble.planners import planners
from debubble.planners.auto import LITTLE, ONE_STAGE, fastest_of
from debubble.planners.model_problem import problem_of
from debubble.planners.problem import Solution
from debubble.planners.registry import Result
from tests.planners.test_fixed import MODEL

NAMES = ("chronos", "adapipe", "scope", "dapple", "dapple+", "pipeoffload")


def test_a_plan_with_room_neither_offloads_nor_recomputes() -> None:
    plan = db.plan("llama-tiny", "2xCPU", micro_batches=4, sequence_length=128, dtype="fp32", effort=1)

    assert not any(op.kind in (Kind.O, Kind.R) for op in plan.schedule.operations)
    assert {unit.strategy for stage in plan.partition for unit in stage} == {"none"}


@pytest.mark.parametrize(("name", "plain"), [("dapple", True), ("dapple+", False), ("chronos", True)])
def test_a_plain_answer_neither_recomputes_nor_offloads(name: str, plain: bool) -> None:
    problem = problem_of(MODEL, db.Cluster.parse("4xA100-80GB"), RunOptions(sequence_length=2048), micro_batches=8)

    assert planners[name](problem).plain == plain


@pytest.mark.parametrize("limit", ["80GiB", "24GiB", "19GiB", "16GiB", "14GiB"])
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

    least = min(float(answer.time) for answer in answers.values())
    plain = [float(a.time) for a in answers.values() if a.plain and a.time <= (1 + LITTLE) * least]
    step = best.candidates[0].step_time
    assert step is not None
    assert step <= (1 + LITTLE) * least
    *_, fastest = fastest_of(replace(problem, plain=False), NAMES)
    assert fastest.candidates[0].step_time == min(c.step_time for c in fastest.candidates if c.step_time is not None)
    if plain:
        assert not best.schedule.offloaded
        assert not best.schedule.host_steps
        assert step <= min(plain)


def one_device(zero: int) -> tuple[Solution, float]:
    """The plan of one pipeline device on four replicas, and the fastest planner's step."""
    options = RunOptions(sequence_length=2048, data=4, zero=zero)
    problem = problem_of(MODEL, db.Cluster.parse("4xA100-80GB"), options, micro_batches=16)
    *_, plan = fastest_of(replace(problem, effort=0.2), ("portfolio", "joint", "adapipe"))
    return plan, min(each.step_time for each in plan.candidates if each.step_time is not None)


def test_one_stage_on_one_device_wins_within_two_percent() -> None:
    plan, fastest = one_device(zero=1)

    assert plan.schedule.stages == 1
    assert plan.candidates[0].step_time is not None
    assert plan.candidates[0].step_time <= (1 + ONE_STAGE) * fastest


def test_with_zero_3_more_stages_of_one_device_stay() -> None:
    plan, fastest = one_device(zero=3)

    assert plan.schedule.stages > 1
    assert plan.candidates[0].step_time == fastest
