"""`plan --for` and `plan --targets` as a user calls them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from debubble.targets import targets

TINY = ("plan", "llama-tiny", "--cluster", "2xA100-80GB", "--micro-batches", "4", "--planner", "adapipe")


def test_plan_names_its_target_and_where_it_runs(run: Any) -> None:
    code, out, _ = run(*TINY, "--for", "megatron", "--json")
    answer = json.loads(out)

    assert code == 0
    assert answer["target"] == "megatron"
    assert {"megatron", "debubble", "torch"} <= set(answer["runs_in"])
    assert [candidate["runs_in"] for candidate in answer["candidates"]] == [["megatron"]]


def test_screen_shows_where_plans_run(run: Any) -> None:
    _, out, _ = run(*TINY)

    assert "Runs in      debubble, torch" in out
    assert "Plans run in these frameworks: " in run(*TINY, "--details")[1]
    assert "adapters are configured by hand elsewhere" in " ".join(run(*TINY, "--lora", "8")[1].split())
    assert json.loads(run(*TINY, "--post-validation", "--json")[1])["runs_in"] == ["debubble"]


def test_targets_option_shows_the_cost_of_other_frameworks(run: Any) -> None:
    _, out, _ = run(*TINY, "--targets", "--json")
    rows = json.loads(out)["targets"]

    assert {row["target"] for row in rows} == set(targets)
    assert [row["step_time"] for row in rows] == sorted(row["step_time"] for row in rows)
    alone = json.loads(run(*TINY, "--for", "torchtitan", "--json")[1])
    assert next(row["step_time"] for row in rows if row["target"] == "torchtitan") == alone["step_time"]


@pytest.mark.parametrize("option", [("--for", "megatron"), ("--targets",)])
def test_targets_are_of_models_alone(run: Any, option: tuple[str, ...], tmp_path: Any) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text('{"stages": 2, "forward": 1}')
    code, _, error = run("plan", "--costs", str(costs), "--devices", "2", *option)

    assert code == 2
    assert f"{option[0]} is an option of a MODEL" in error


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            ("--pipeline", "1", "--tensor", "2"),
            "DeepSpeed's pipeline has no tensor parallelism inside it; plan again with --tensor 1.",
        ),
        (
            ("--post-validation",),
            "DeepSpeed waits for the norm of all gradients; plan again without --post-validation.",
        ),
    ],
)
def test_missing_features_are_refused_with_a_remedy(run: Any, options: tuple[str, ...], sentence: str) -> None:
    code, _, error = run(*TINY, "--for", "deepspeed", *options)

    assert code == 2
    assert sentence in error
