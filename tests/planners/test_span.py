import json
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import StageCosts
from debubble.planners import FixedStages, Problem, planners
from debubble.planners.bounds.proven import lower_bound
from debubble.plans import Plan


def problem(objective: str, *, limit: int) -> Problem:
    """A problem of 3 devices and 6 micro-batches with F = I = W = 1 and no offload."""
    costs = StageCosts.of(stages=3, memory_limit=limit)
    return Problem(devices=3, micro_batches=6, workload=FixedStages(costs), effort=3.0, objective=objective)  # type: ignore[arg-type]


@pytest.mark.parametrize(("limit", "makespan", "span"), [(3, 20, 20), (5, 20, 18)])
def test_optpipe_finds_the_optimum_of_both_objectives(limit: int, makespan: int, span: int) -> None:
    """CP-SAT proved the optima outside of this program."""
    shortest = planners["optpipe"](problem("makespan", limit=limit))
    assert shortest.time == shortest.timeline.makespan == makespan
    tightest = planners["optpipe"](problem("span", limit=limit))
    assert tightest.time == tightest.timeline.span == span
    assert tightest.lower_bound <= span


def test_portfolio_ranks_schedules_by_the_span() -> None:
    result = planners["portfolio"](problem("span", limit=5))
    assert result.timeline.span == 18 < result.timeline.makespan


def test_the_bound_on_a_span_omits_the_first_forwards() -> None:
    slow_end = StageCosts.of(stages=2, forward=[1, 5], backward_input=[1, 5], backward_weight=[1, 5])
    bounds = [
        lower_bound(Problem(devices=2, micro_batches=4, workload=FixedStages(slow_end), objective=objective))
        for objective in ("makespan", "span")
    ]
    assert bounds == [1 + 4 * 15, 4 * 15]


def test_post_validation_minimizes_the_span(run: Any, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text('{"stages": 3, "memory_limit": 5}')
    call = ["plan", "--costs", str(tmp_path / "costs.json"), "--devices", "3", "--micro-batches", "6"]
    more = ["--planner", "optpipe", "--effort", "3", "--post-validation", "-o", str(tmp_path / "plan.json"), "--json"]
    answer = json.loads(run(*call, *more)[1])
    assert (answer["span"], answer["step_time"], answer["gap"]) == (18, 18, 0)
    assert Plan.load(tmp_path / "plan.json").options.post_validation
