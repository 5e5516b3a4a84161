"""Schedules of users, named as a file and a function."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import InputError, ScheduleError
from debubble.schedules import schedules
from debubble.schedules.from_file import named_schedule

FILE = """
import debubble as db
from debubble.schedules import schedule

def plain(devices, micro_batches, costs=None):
    return db.schedules["gpipe"](devices=devices, micro_batches=micro_batches)

@schedule("decorated-{stem}", paper="none", bubble="all", memory="m", default_chunks=2)
def decorated(*, devices, micro_batches, costs=None, chunks=2):
    return db.schedules["interleaved"](devices=devices, micro_batches=micro_batches, chunks=chunks)

def without_costs(devices, micro_batches):
    return plain(devices, micro_batches)

def untyped(*, devices, micro_batches, costs=None, name="gpipe"):
    return db.schedules[name](devices=devices, micro_batches=micro_batches)

def nothing(devices, micro_batches, costs=None):
    return None

def gpipe(devices, micro_batches, costs=None):
    return plain(devices, micro_batches)

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    stem = f"file{abs(hash(tmp_path))}"
    path = tmp_path / f"{stem}.py"
    path.write_text(FILE.replace("{stem}", stem))
    before = dict(schedules)
    yield path
    for name in [*schedules]:
        if name not in before:
            del schedules._members[name]


def test_a_function_is_registered_under_its_name(file: Path) -> None:
    assert named_schedule(f"{file}:plain") == "plain"
    assert schedules["plain"](devices=2, micro_batches=4) == schedules["gpipe"](devices=2, micro_batches=4)
    assert named_schedule(f"{file}:plain") == "plain"


def test_a_decorated_function_has_the_name_of_its_decorator(file: Path) -> None:
    assert named_schedule(f"{file}:decorated:4") == f"decorated-{file.stem}:4"
    assert schedules[f"decorated-{file.stem}"].default_chunks == 2


def test_names_of_schedules_are_returned_unchanged() -> None:
    assert named_schedule("interleaved:4") == "interleaved:4"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("without_costs", "is no schedule, which is a function of devices, micro_batches and costs"),
        ("NUMBER", "is no schedule, which is a function of devices, micro_batches and costs"),
        ("missing", "has no function 'missing'"),
        ("gpipe", "There is a schedule 'gpipe' already: give the function in .* another name"),
    ],
)
def test_other_functions_are_refused_as_schedules(file: Path, function: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        named_schedule(f"{file}:{function}")


def test_a_function_that_returns_no_schedule_is_refused(file: Path) -> None:
    with pytest.raises(ScheduleError, match=r"The schedule 'nothing' returns None, which is no db\.Schedule"):
        schedules[named_schedule(f"{file}:nothing")](devices=2, micro_batches=4)


def test_a_file_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.py cannot be read: No such file"):
        named_schedule(f"{tmp_path}/missing.py:order")
    (tmp_path / "broken.py").write_text("raise ValueError('too late')")
    with pytest.raises(InputError, match=r"broken\.py cannot be run: ValueError: too late\."):
        named_schedule(f"{tmp_path}/broken.py:order")


def test_simulate_compares_a_function_of_a_file(run: Any, file: Path) -> None:
    code, out, _ = run("simulate", "--schedule", f"gpipe,{file}:plain", "--devices", "2", "--json")

    gpipe, plain = json.loads(out)["schedules"]
    assert code == 0
    assert plain["step_time"] == gpipe["step_time"]


def test_an_option_without_a_type_takes_any_value(run: Any, file: Path) -> None:
    call = ("--devices", "4", "--micro-batches", "8", "--option", "name=1f1b", "--json")
    code, out, _ = run("simulate", "--schedule", f"{file}:untyped", *call)

    assert code == 0
    assert json.loads(out)["step_time"] == 33
