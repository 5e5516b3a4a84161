from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

import debubble as db
from debubble.ir import Robustness, StageCosts, lower
from debubble.planners import FixedStages, Problem, planners
from debubble.planners.robustness import STRAGGLER, robustness
from debubble.schedules import schedules
from debubble.simulator import simulate
from tests.strategies import stage_costs


def judged(name: str, costs: StageCosts, p: int = 4, m: int = 8, seed: int = 0) -> Robustness:
    schedule = schedules[name](devices=p, micro_batches=m, costs=costs)
    return robustness(lower(schedule, costs), objective="makespan", seed=seed)


@given(costs=stage_costs(stages=4))
@settings(max_examples=15, deadline=None)
def test_a_slow_device_costs_at_most_its_share(costs: StageCosts) -> None:
    time = float(simulate(schedules["1f1b"](devices=4, micro_batches=8), costs).makespan)
    judgement = judged("1f1b", costs)
    assert time - 1e-9 <= judgement.straggler <= time * (1 + STRAGGLER) + 1e-9
    assert judgement.links >= time - 1e-9


def test_without_links_slow_ones_cost_nothing() -> None:
    costs = StageCosts.of(stages=4, communication=0)
    time = simulate(schedules["1f1b"](devices=4, micro_batches=8), costs).makespan
    assert judged("1f1b", costs).links == time


def test_one_device_alone_is_as_much_slower_as_it_is_slow() -> None:
    assert judged("1f1b", StageCosts.of(stages=1), p=1).straggler == pytest.approx(24 * (1 + STRAGGLER))


def test_the_noise_of_operations_that_follow_each_other_evens_out() -> None:
    """A device alone: the mean of the factors is 1, and what scatters is their sum's small remainder."""
    judgement = judged("1f1b", StageCosts.of(stages=1), p=1, m=400)
    assert judgement.jitter == pytest.approx(1200, rel=0.005)


def test_a_plan_with_slack_is_preferred_to_a_faster_one() -> None:
    """Blocking messages: with slow links more chunks pay more of them."""
    costs = StageCosts.of(
        stages=4, forward=10, backward_input=10, backward_weight=10, communication=2, activation=1, memory_limit=4
    )
    problem = Problem(workload=FixedStages(costs), devices=4, micro_batches=8, effort=0.2, robust=True)
    result = planners["auto"](problem)
    by_step = planners["auto"](replace(problem, robust=False))
    assert by_step.robustness is None
    assert result.robustness is not None
    expected = [c.robustness.expected for c in result.solution.candidates if c.robustness is not None]
    assert result.robustness.expected == min(expected)
    again = robustness(lower(result.solution.schedule, costs), objective="makespan")
    assert again == result.robustness


def test_a_robust_answer_stands_disturbances_as_well_as_the_fastest() -> None:
    """Where transfers alone are what slow links spoil, the same plan without them is an answer."""
    job: dict[str, Any] = {"micro_batches": 8, "effort": 0.5}
    plans = [db.plan("llama3.2-1b", db.Cluster.parse("4xL40S-48GB"), robust=robust, **job) for robust in (False, True)]
    expected = []
    for plan in plans:
        timeline = plan.simulate()
        tail = plan.step_time - float(timeline.makespan)
        expected.append(robustness(timeline.program, objective="makespan", tail=tail).expected)

    assert expected[1] <= expected[0]
