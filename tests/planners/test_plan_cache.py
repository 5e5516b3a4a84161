from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.planners.progress import Improvement
from debubble.plans import Plan

QUESTION: dict[str, Any] = {"model": "llama-tiny", "cluster": "2xA100-80GB", "micro_batches": 4, "effort": 0.1}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "debubble" / "answers"


def ask(**arguments: Any) -> tuple[Plan, list[Improvement]]:
    reports: list[Any] = []
    plan = db.plan(**{**QUESTION, **arguments}, progress=reports.append)
    return plan, [report for report in reports if isinstance(report, Improvement)]


def test_a_repeated_question_begins_with_its_answer(folder: Path) -> None:
    first, _ = ask(planner="joint")
    assert not folder.exists()
    first, _ = ask(cache=True, planner="joint")
    second, improvements = ask(cache=True, planner="joint")
    assert improvements[0].step_time == pytest.approx(float(first.simulate().makespan), rel=0.2)
    assert float(second.simulate().makespan) <= float(first.simulate().makespan)
    assert [place.name[-11:] for place in folder.iterdir()] == ["000002.json"]


def test_another_question_has_no_answer_yet(folder: Path) -> None:
    ask(cache=True, planner="dapple")
    ask(cache=True, planner="dapple", micro_batches=6)
    assert len(list(folder.iterdir())) == 2


def test_an_interrupted_question_returns_the_cached_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = ask(cache=True, planner="dapple")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("debubble.planners.plan_model._plan_of_problem", interrupted)
    assert ask(cache=True, planner="dapple")[0].schedule == known.schedule


def test_a_damaged_cache_file_is_ignored(folder: Path) -> None:
    ask(cache=True, planner="dapple")
    (place,) = folder.iterdir()
    place.write_text("{")
    plan, _ = ask(cache=True, planner="dapple")
    assert plan.micro_batches == 4
