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
def test_a_slow_device_costs_at_most_its_slowdown(costs: StageCosts) -> None:
    time = float(simulate(schedules["1f1b"](devices=4, micro_batches=8), costs).makespan)
    judgement = judged("1f1b", costs)
    assert time - 1e-9 <= judgement.straggler <= time * (1 + STRAGGLER) + 1e-9
    assert judgement.links >= time - 1e-9


def test_slow_links_cost_nothing_without_communication() -> None:
    costs = StageCosts.of(stages=4, communication=0)
    time = simulate(schedules["1f1b"](devices=4, micro_batches=8), costs).makespan
    assert judged("1f1b", costs).links == time


def test_a_single_slow_device_costs_its_slowdown() -> None:
    assert judged("1f1b", StageCosts.of(stages=1), p=1).straggler == pytest.approx(24 * (1 + STRAGGLER))


def test_noise_of_consecutive_operations_averages_out() -> None:
    """On one device, the mean of the noise factors is 1."""
    judgement = judged("1f1b", StageCosts.of(stages=1), p=1, m=400)
    assert judgement.jitter == pytest.approx(1200, rel=0.005)


def test_a_plan_with_slack_is_preferred_to_a_faster_one() -> None:
    """Messages block, so that more chunks lose more time on slow links."""
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
    recomputed = robustness(lower(result.solution.schedule, costs), objective="makespan")
    assert recomputed == result.robustness


def test_a_robust_plan_has_no_longer_expected_step() -> None:
    """If slow links affect only transfers, the same plan without transfers is a candidate."""
    job: dict[str, Any] = {"micro_batches": 8, "effort": 0.5}
    plans = [db.plan("llama3.2-1b", db.Cluster.parse("4xL40S-48GB"), robust=robust, **job) for robust in (False, True)]
    expected = []
    for plan in plans:
        timeline = plan.simulate()
        tail = plan.step_time - float(timeline.makespan)
        expected.append(robustness(timeline.program, objective="makespan", tail=tail).expected)

    assert expected[1] <= expected[0]
