from dataclasses import replace

import pytest

import debubble as db
from debubble.ir import Placement
from debubble.planners import FixedStages, Problem
from debubble.planners.fixed_plan import fixed_plan
from debubble.planners.registry import planners

CLUSTER = {limit: f"4xA100-{limit}GB" for limit in (40, 80)}


@pytest.mark.parametrize(("memory", "schedule", "recomputes"), [(80, "zb-v", False), (40, "zb-v", True)])
def test_zero_bubble_is_as_fast_as_each_schedule_on_even_stages(memory: int, schedule: str, recomputes: bool) -> None:
    model, cluster = "llama2-7b", CLUSTER[memory]
    plan = db.plan(model, cluster, micro_batches=8, planner="zero-bubble")
    assert (plan.schedule.name, bool(plan.schedule.fused_recompute)) == (schedule, recomputes)
    for name in ("zb-h1", "zb", "v-half"):
        recompute = "full" if recomputes else "none"
        by_hand = fixed_plan(
            db.models[model], db.Cluster.parse(cluster), schedule=name, micro_batches=8, recompute=recompute
        )
        try:
            other = by_hand.step_time
        except db.InfeasibleError:
            continue
        assert plan.step_time <= other * (1 + 1e-9)


def test_fixed_stages_are_ordered_too() -> None:
    costs = db.StageCosts.of(stages=4)
    problem = Problem(workload=FixedStages(costs), devices=4, micro_batches=8)
    solution = planners["zero-bubble"](problem).solution
    assert solution.schedule.placement == Placement.linear(4)
    assert solution.simulate().makespan < db.simulate(db.schedules["1f1b"](devices=4, micro_batches=8), costs).makespan


def test_more_chunks_than_any_schedule_has_are_refused() -> None:
    problem = Problem(workload=FixedStages(db.StageCosts.of(stages=12)), devices=4, micro_batches=8, chunks=3)
    with pytest.raises(db.InfeasibleError, match=r"No zero-bubble schedule has 3 chunks: leave --chunks out\."):
        planners["zero-bubble"](problem)
    assert planners["zero-bubble"](replace(problem, workload=FixedStages(db.StageCosts.of(stages=8)), chunks=2))
