from collections.abc import Iterator
from dataclasses import replace

import pytest

import debubble as db
from debubble.planners import FixedStages, Problem
from debubble.planners.analysis.remarks import plan_remarks
from debubble.planners.auto import fastest_of
from debubble.planners.problem import Solution
from debubble.planners.progress import Improvement, Progress, progress_listener
from debubble.planners.registry import PlannerEntry

COSTS = db.StageCosts.of(stages=2, communication=1)
PROBLEM = Problem(workload=FixedStages(COSTS), devices=2, micro_batches=4)


def answer(name: str) -> Solution:
    return Solution(schedule=db.schedules[name](devices=2, micro_batches=4), costs=COSTS)


def interrupted(_: Problem) -> Iterator[Solution]:
    yield answer("zb-h1")
    raise KeyboardInterrupt


def failing(_: Problem) -> Iterator[Solution]:
    yield answer("zb-h1")
    raise ZeroDivisionError


def improving(_: Problem) -> Iterator[Solution]:
    yield answer("gpipe")
    yield answer("1f1b")
    yield answer("zb-h1")


def entry(name: str, find: object) -> PlannerEntry:
    return PlannerEntry(name, find, paper="none", searches=True)  # type: ignore[arg-type]


def test_the_last_plan_of_a_stream_is_the_answer() -> None:
    assert entry("improving", improving)(PROBLEM).solution.schedule.name == "zb-h1"


def test_a_listener_gets_every_plan_with_its_step_and_gap() -> None:
    reports: list[Progress | Improvement] = []
    with progress_listener(reports.append):
        best = entry("improving", improving)(PROBLEM)
    plans = [report for report in reports if isinstance(report, Improvement)]
    assert [plan.schedule for plan in plans] == ["gpipe", "1f1b", "zb-h1"]
    assert plans[-1].step_time == best.time
    assert plans[-1].gap == best.gap


def test_ctrl_c_keeps_the_best_plan_so_far() -> None:
    best = entry("interrupted", interrupted)(PROBLEM).solution
    assert (best.schedule.name, best.cut_off) == ("zb-h1", True)
    assert best.interrupted


def test_ctrl_c_before_any_plan_ends_the_search() -> None:
    def nothing(_: Problem) -> Iterator[Solution]:
        raise KeyboardInterrupt
        yield answer("gpipe")

    with pytest.raises(KeyboardInterrupt):
        entry("nothing", nothing)(PROBLEM)


def test_ctrl_c_in_auto_keeps_the_best_of_all_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("debubble.planners.joint.orders.last_search", lambda problem, *_, **__: interrupted(problem))
    *_, best = fastest_of(PROBLEM, ["dapple", "joint"])
    assert best.schedule.name == "zb-h1"
    assert [(c.planner, c.status) for c in best.candidates] == [("joint", "cut off"), ("dapple", "found")]


def test_a_planner_that_fails_after_a_plan_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("debubble.planners.joint.orders.last_search", lambda problem, *_, **__: failing(problem))
    *_, best = fastest_of(PROBLEM, ["dapple", "joint"])
    assert best.schedule.name == "zb-h1"
    plan = solution_plan(best)
    (failure,) = (remark for remark in plan_remarks(plan, plan.simulate()) if "failed" in remark)
    assert "'joint'" in failure
    assert "ZeroDivisionError" in failure


def solution_plan(solution: Solution) -> db.Plan:
    return db.Plan(
        planner="auto", schedule=solution.schedule, costs=solution.costs, lower_bound=0, partition=((), ()),
        candidates=solution.candidates,
    )  # fmt: skip


def test_a_plans_gap_is_to_the_best_bound_of_all_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    def bounding(_: Problem) -> Solution:
        return replace(answer("1f1b"), lower_bound=16)

    first = PlannerEntry("bounding", bounding, paper="none", searches=False)
    monkeypatch.setattr("debubble.planners.auto.planners", {**db.planners, "bounding": first})
    monkeypatch.setattr("debubble.planners.joint.orders.last_search", lambda problem, *_, **__: improving(problem))
    reports: list[Progress | Improvement] = []
    with progress_listener(reports.append):
        [*_] = fastest_of(PROBLEM, ["bounding", "joint"])
    plans = {report.step_time: report.gap for report in reports if isinstance(report, Improvement)}
    assert plans == {19.0: 3 / 19, 17.0: 1 / 17}
