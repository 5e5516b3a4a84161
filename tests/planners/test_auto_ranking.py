"""`auto` keeps the shortest whole step, and every figure says which part of it is the pipeline's."""

from __future__ import annotations

from dataclasses import replace

import pytest

import debubble as db
from debubble.costs import StepTail
from debubble.ir import Kind, RunOptions
from debubble.papers.chronospipe.offload import offload_states
from debubble.planners import planners
from debubble.planners.auto import fastest_of
from debubble.planners.bounds import proven_step_bound
from debubble.planners.model_problem import problem_of
from tests.planners.test_fixed import MODEL

OPTIONS = RunOptions(data=2, sequence_length=2048)
CLUSTER = db.Cluster.parse("4xA100-80GB")
TAIL = StepTail(model=MODEL, cluster=CLUSTER, options=OPTIONS, pipeline=2)


def problem() -> db.Problem:
    return problem_of(MODEL, CLUSTER, OPTIONS, micro_batches=8)


def test_a_planners_answer_takes_what_follows_its_pipeline_too() -> None:
    asked = problem()
    result = db.planners["dapple"](asked)
    assert result.time == result.timeline.makespan + TAIL.of(result.solution.schedule, result.solution.costs)
    assert result.summary.step_time == result.time
    # Nothing but the optimizer's step is behind the pipeline, and no plan hides it all.
    assert TAIL.least == 0
    assert result.lower_bound == proven_step_bound(asked).time > result.pipeline_bound


def test_every_candidate_has_its_step_and_the_shortest_is_the_plan() -> None:
    *_, best = fastest_of(problem(), [name for name, entry in db.planners.items() if not entry.searches])
    steps = [c.step_time for c in best.candidates if c.step_time is not None]
    assert steps == sorted(steps)
    assert steps[0] == pytest.approx(
        float(db.simulate(best.schedule, best.costs).makespan) + TAIL.of(best.schedule, best.costs)
    )


def test_every_candidate_has_its_partition_with_the_strategies_of_its_units() -> None:
    *_, best = fastest_of(problem(), ["dapple", "adapipe"])
    given = {c.planner: planners[c.planner](problem()).solution.partition for c in best.candidates}
    for candidate in best.candidates:
        partition = given[candidate.planner]
        assert partition is not None
        assert [[u.strategy for u in stage] for stage in candidate.partition] == [[n for _, n in s] for s in partition]
        assert len(candidate.recompute) == len(partition)


def test_planners_that_are_well_behind_have_a_part_of_the_effort_and_say_so() -> None:
    *_, best = fastest_of(replace(problem(), effort=1), ["joint", "chronos", "portfolio"])
    steps = {c.planner: c.step_time for c in best.candidates}
    assert {c.planner: c.remark for c in best.candidates} == {
        "joint": None,
        "portfolio": None,
        "chronos": "searched with 50% of the effort, as another is well ahead",
    }
    joint, portfolio, chronos = (float(steps[name] or 0) for name in ("joint", "portfolio", "chronos"))
    assert portfolio <= 1.05 * joint < chronos
    assert portfolio == planners["portfolio"](replace(problem(), effort=1)).time


def test_without_an_answer_of_joint_all_have_the_whole_effort() -> None:
    *_, best = fastest_of(replace(problem(), effort=1), ["chronos", "portfolio"])
    assert [c.remark for c in best.candidates] == [None, None]


def test_a_stage_that_is_stepped_inside_the_pipeline_leaves_less_behind_it() -> None:
    made = db.schedules["chronos"](devices=2, micro_batches=8, chunks=2)
    hosted = offload_states(made, chunks=[1])
    assert {op.stage for op in hosted.operations if op.kind is Kind.S} == {2, 3}
    costs = db.StageCosts.of(stages=4)
    slower = db.simulate(hosted, costs.replace(host_step=1))
    assert problem().step_time(db.simulate(made, costs)) - problem().step_time(slower) == pytest.approx(
        TAIL.of(made, costs) - TAIL.of(hosted, costs) - float(slower.makespan - db.simulate(made, costs).makespan)
    )
    assert TAIL.least < TAIL.of(hosted, costs) < TAIL.of(made, costs)
