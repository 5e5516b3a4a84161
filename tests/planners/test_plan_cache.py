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


def told(**arguments: Any) -> tuple[Plan, list[Improvement]]:
    said: list[Any] = []
    plan = db.plan(**{**QUESTION, **arguments}, progress=said.append)
    return plan, [each for each in said if isinstance(each, Improvement)]


def test_a_question_asked_again_begins_with_its_answer(folder: Path) -> None:
    first, _ = told(planner="joint")
    assert not folder.exists()
    first, _ = told(cache=True, planner="joint")
    again, said = told(cache=True, planner="joint")
    assert said[0].step_time == pytest.approx(float(first.simulate().makespan), rel=0.2)
    assert float(again.simulate().makespan) <= float(first.simulate().makespan)
    assert [place.name[-11:] for place in folder.iterdir()] == ["000002.json"]


def test_another_question_has_no_answer_yet(folder: Path) -> None:
    told(cache=True, planner="dapple")
    told(cache=True, planner="dapple", micro_batches=6)
    assert len(list(folder.iterdir())) == 2


def test_an_interrupted_question_has_the_known_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = told(cache=True, planner="dapple")

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("debubble.planners.plan_model._plan_of_problem", interrupted)
    assert told(cache=True, planner="dapple")[0].schedule == known.schedule


def test_a_damaged_answer_is_no_answer(folder: Path) -> None:
    told(cache=True, planner="dapple")
    (place,) = folder.iterdir()
    place.write_text("{")
    plan, _ = told(cache=True, planner="dapple")
    assert plan.micro_batches == 4
