"""Planners of users, named as a file and a function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import InputError, StageCosts
from debubble.planners import FixedStages, Problem, from_file, planners
from debubble.planners.from_file import named_planner
from debubble.planners.process_pool import _Worker

FILE = """
import debubble as db
from debubble.planners import planners
from debubble.planners.registry import planner

def plain(problem):
    return planners["dapple"].find(problem)

@planner("decorated-{stem}", paper="none", searches=True)
def decorated(problem):
    return plain(problem)

def of_two(problem, more):
    return plain(problem)

def dapple(problem):
    return plain(problem)

def nothing(problem):
    return None
"""
CALL = ("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--json")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    stem = f"file{abs(hash(tmp_path))}"
    path = tmp_path / f"{stem}.py"
    path.write_text(FILE.replace("{stem}", stem))
    monkeypatch.setattr(from_file, "FILE_PLANNERS", [])
    before = dict(planners)
    yield path
    for name in [*planners]:
        if name not in before:
            del planners._members[name]


def test_a_function_is_a_planner_with_its_name(file: Path) -> None:
    assert [named_planner(f"{file}:plain") for _ in range(2)] == ["plain", "plain"]
    assert "plain" in planners


def test_compare_asks_a_planner_of_a_file_and_the_others(file: Path, json_of: Any) -> None:
    answer = json_of(*CALL, "--planner", f"{file}:plain", "--compare", "--micro-batches", "2", "--effort", "0.1")
    assert {"plain", "joint", "megatron-even"} <= {candidate["planner"] for candidate in answer["candidates"]}


def test_a_decorated_planner_has_the_name_of_its_decorator(file: Path) -> None:
    assert named_planner(f"{file}:decorated") == f"decorated-{file.stem}"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("of_two", "is no planner, which is a function of a Problem that returns a Solution"),
        ("missing", "has no function 'missing'"),
        ("dapple", "There is a planner 'dapple' already: give the function in .* another name"),
    ],
)
def test_other_functions_are_refused_as_planners(file: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        named_planner(f"{file}:{function}")


def test_plan_calls_a_planner_of_a_file(run: Any, file: Path) -> None:
    plain, dapple = (
        json.loads(run(*CALL, "--micro-batches", "4", "--planner", planner)[1])
        for planner in (f"{file}:plain", "dapple")
    )

    assert (plain["planner"], plain["step_time"]) == ("plain", dapple["step_time"])


def test_other_processes_know_a_planner_of_a_file(file: Path) -> None:
    costs = StageCosts.of(stages=2)
    task = (named_planner(f"{file}:decorated"), Problem(workload=FixedStages(costs), devices=2, micro_batches=4))
    worker = _Worker()
    answer = worker.ask(task)
    worker.close()

    assert isinstance(answer, tuple)
    assert answer[0].schedule.name == "1f1b"


def test_a_planner_that_returns_nothing_is_refused(file: Path) -> None:
    name = named_planner(f"{file}:nothing")
    costs = StageCosts.of(stages=2, forward=1, backward_input=1)
    problem = Problem(workload=FixedStages(costs), devices=2, micro_batches=2)
    with pytest.raises(InputError, match="The planner 'nothing' returns no Solution, but NoneType"):
        planners[name](problem)
