import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Group

import debubble as db
from debubble.ir import CutOffError, InputError, RunOptions, StageCosts
from debubble.planners import FixedStages, Problem, planners
from debubble.planners.model_problem import problem_of
from debubble.planners.plan_model import solve
from debubble.plans import Plan
from debubble.search.effort import Effort, price_of_move
from debubble.views.plan_table import render
from debubble.views.scene import Scene

COSTS: dict[str, Any] = {
    "stages": 4, "forward": 10, "backward_input": 11, "backward_weight": 9, "communication": 1, "activation": 2,
    "activation_after_input": 1, "offload": 15, "memory_limit": 5,
}  # fmt: skip


def fixed_stages(effort: float = 0.2) -> Problem:
    """Too many stages x micro-batches for CP-SAT to prove anything."""
    return Problem(
        devices=4, micro_batches=20, workload=FixedStages(StageCosts.of(**COSTS)), effort=effort, deadline=1e6
    )


def tight_llama(effort: float = 0.1) -> Problem:
    model, cluster = db.models["llama2-13b"], db.Cluster.parse("4xA100-80GB").with_limit("71GiB")
    problem = problem_of(model, cluster, RunOptions(sequence_length=4096), micro_batches=8, effort=effort)
    return replace(problem, deadline=1e6)


def faster_than(clock: Callable[[], float]) -> Callable[[], float]:
    begin = clock()
    return lambda: begin + 20 * (clock() - begin)


@pytest.mark.parametrize(
    ("planner", "problem"),
    [("portfolio", fixed_stages()), ("optpipe", tight_llama()), ("scope", tight_llama())],
    ids=lambda value: value if isinstance(value, str) else type(value.workload).__name__,
)
def test_a_clock_that_runs_faster_changes_no_plan(
    planner: str, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = planners[planner](problem).solution
    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, faster_than(getattr(time, name)))
    faster = planners[planner](problem).solution
    assert (faster.schedule, faster.partition) == (usual.schedule, usual.partition)
    assert faster.lower_bound == usual.lower_bound


@pytest.mark.slow
def test_another_process_prints_the_same_plan(run: Any, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(json.dumps(COSTS))
    command = [
        "plan", "--costs", str(tmp_path / "costs.json"), "--devices", "4", "--micro-batches", "20",
        "--effort", "0.1", "--deadline", "1e6", "--seed", "0", "--json",
    ]  # fmt: skip
    elsewhere = subprocess.run([sys.executable, "-m", "debubble", *command], check=True, capture_output=True).stdout
    plans = [json.loads(printed) for printed in (run(*command)[1], elsewhere)]
    for plan in plans:
        for answer in (plan, *plan["candidates"]):
            del answer["solve_seconds"]
    assert plans[0] == plans[1]
    assert plans[0]["cut_off"] == []


def test_a_planner_that_the_deadline_cut_off_is_named(tmp_path: Path) -> None:
    plan = solve(replace(fixed_stages(effort=30), deadline=1e-3), planner="optpipe")
    assert plan.cut_off == ("optpipe",)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").cut_off == ("optpipe",)
    page = render(plan, Scene.predicted(plan))
    assert isinstance(page, Group)
    headline = str(page.renderables[1])
    assert headline == (
        "The deadline cut off optpipe, so that the plan depends on the machine: raise --deadline or lower --effort."
    )


def test_a_planner_without_a_plan_at_the_deadline_says_so() -> None:
    with pytest.raises(CutOffError, match="at the deadline"):
        planners["portfolio"](replace(tight_llama(), deadline=1e-6))


def test_kernels_are_not_compiled_if_the_deadline_is_earlier(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("planners.joint.chain", "search.annealing.search"):
        monkeypatch.setattr(f"debubble.{module}.is_compiled", lambda _: False)
    problem = replace(tight_llama(), deadline=30.0)
    with pytest.raises(CutOffError, match="Its kernels are not compiled yet"):
        planners["joint"](problem)
    assert [c.status for c in planners["auto"](problem).solution.candidates if c.planner == "joint"] == ["cut off"]


def test_a_deadline_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match="deadline must be"):
        replace(fixed_stages(), deadline=0)


def test_a_plan_says_that_it_began_with_a_cached_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cold = planners["optpipe"](fixed_stages())
    assert not list(tmp_path.iterdir())
    asked = replace(fixed_stages(), cache=True)
    first, second = (solve(asked, planner="optpipe") for _ in range(2))
    assert first.schedule == cold.solution.schedule
    assert first.candidates[0].remark is None
    assert second.candidates[0].remark == "its search began with a schedule from this machine's cache"
    assert second.simulate().makespan <= first.simulate().makespan


@pytest.mark.parametrize(("pairs", "microseconds"), [(16 * 32, 11.24), (8 * 32, 6.12)])
def test_a_move_has_the_published_price(pairs: int, microseconds: float) -> None:
    assert price_of_move(pairs) * 1e6 == pytest.approx(microseconds, rel=0.01)
    # A move costs half if devices have several stages and nothing leaves memory.
    assert 2 * price_of_move(pairs, of_chunks=True) == price_of_move(pairs)


def test_effort_spent_in_a_share_is_spent_in_the_total() -> None:
    total = Effort(10)
    share = total.split_off(4)
    share.spend(3)
    assert (share.remaining, total.remaining) == (1, 7)
    assert total.split_off(20).remaining == 7
    assert not total.cut_off
