"""The Python API refuses arguments of a wrong type with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import debubble as db
from debubble.argument_types import with_checked_types

API: Any = db
"""Typed so that mypy accepts the wrong calls."""
SCHEDULE = db.schedules["1f1b"](devices=2, micro_batches=4)
COSTS = db.StageCosts.of(stages=2)
PLACEMENT = db.Placement.linear(1)


def planned(**arguments: Any) -> db.Plan:
    return db.plan("llama-tiny", "2xA100-80GB", planner="dapple", micro_batches=4, **arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: API.show(), "There is nothing to show: give a plan, a timeline or a sweep."),
        (lambda: API.show(3), "sources must be a Plan, a Timeline or a Sweep, not 3."),
        (lambda: API.simulate(3, 4), "schedule must be a Schedule or a Program, not 3."),
        (lambda: API.simulate(SCHEDULE, 4), "costs must be a StageCosts, not 4."),
        (lambda: API.lower(SCHEDULE, None), "costs must be a StageCosts, not None."),
        (lambda: API.schedules["1f1b"](devices=4.5, micro_batches=8), "devices must be a whole number, not 4.5."),
        (lambda: planned(effort="a"), "effort must be a number, not 'a'."),
        (lambda: planned(robust="yes"), "robust must be True or False, not 'yes'."),
        (lambda: planned(host_optimizer="half"), "host_optimizer must be a number, not 'half'."),
        (lambda: planned(progress=3), "progress must be a function, not 3."),
        (lambda: API.explain(SCHEDULE), "plan must be a Plan, not a Schedule."),
        (lambda: API.Plan.load(3), "path must be a text or a path, not 3."),
        (lambda: API.Model.from_hf(None), "source must be a text, a path or a mapping, not None."),
        (lambda: API.Schedule.of("mine", PLACEMENT, 1, 3), "orders must be a list, not 3."),
        (lambda: API.Placement.linear("x"), "devices must be a whole number, not 'x'."),
        (lambda: API.Op.parse(3), "'3' is not an operation: write stage, kind and micro-batch, such as 2F5."),
        (lambda: API.planners["dapple"](3), "problem must be a Problem, not 3."),
        (lambda: API.exports["torch"](3), "plan must be a Plan, not 3."),
    ],
)
def test_a_wrong_type_is_refused_with_a_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(db.InputError) as refused:
        call()
    assert str(refused.value) == message


def test_a_sweep_is_shown_alone() -> None:
    sweep = db.sweep("llama-tiny", "2xA100-80GB", micro_batches=[2, 4], planner="dapple")
    with pytest.raises(db.InputError, match="A sweep is shown alone"):
        db.show(sweep, planned())


@with_checked_types(but=("free",))
def taking(
    count: int,
    share: float = 1,
    *paths: str | Path,
    word: Literal["a"] = "a",
    free: int = 0,
    **options: object,
) -> int:
    return count


def test_values_of_the_annotated_types_pass() -> None:
    assert taking(np.int64(3), 2, "a", Path("b"), free="x", word=3, more={}) == 3  # type: ignore[arg-type]


def test_errors_of_python_are_not_replaced() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'count'"):
        taking()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((True,), "count must be a whole number, not True."),
        ((1, "x"), "share must be a number, not 'x'."),
        ((1, 1, "a", 3), "paths must be a text or a path, not 3."),
        ((1, [1] * 99), "share must be a number, not a list."),
    ],
)
def test_every_argument_is_checked(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(db.InputError) as refused:
        taking(*arguments)
    assert str(refused.value) == message
