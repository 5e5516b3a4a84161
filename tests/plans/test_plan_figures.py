"""The figures of a plan in Python are those of `plan --json`."""

from __future__ import annotations

from typing import Any

import pytest

import debubble as db


def test_a_plan_has_the_figures_of_its_json(json_of: Any) -> None:
    answer = json_of("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--micro-batches", "4", "--planner", "dapple")
    plan = db.plan("llama-tiny", "2xA100-80GB", micro_batches=4, planner="dapple")

    for name in ("step_time", "tokens_per_second", "mfu"):
        assert getattr(plan, name) == pytest.approx(answer[name])
    assert plan.peak_memory == tuple(answer["peak_memory"])


def test_the_package_lists_only_its_public_names() -> None:
    assert dir(db) == sorted(db.__all__)
