"""Plan files: they round-trip, and errors are one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import debubble as db
from debubble.ir import InputError, Origin, Placement, PlannedUnit, Schedule, StageCosts, WhatIf
from debubble.plans import Plan
from debubble.plans.plan_file import ScheduleFile
from tests.support.schedule_cases import offloading, on_one_link, schedule_of


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    """A valid plan file of two devices."""
    schedule = Schedule.of("test", Placement.linear(2), 1, [["0F0", "0B0"], ["1F0", "1B0"]])
    units = tuple((PlannedUnit("stage", stage),) for stage in range(2))
    plan = Plan(
        planner="test", schedule=schedule, costs=StageCosts.of(stages=2), lower_bound=0, partition=units,
        what_ifs=(WhatIf(change="no offload", lever=True, step_time=None, seconds_per_sequence=None),),
        other_targets={"megatron": 1.25},
        origin=Origin(command="debubble plan", date="2026-11-22T17:00:00+00:00", version="0.1.0"),
    )  # fmt: skip
    plan.save(tmp_path / "valid.json")
    assert Plan.load(tmp_path / "valid.json") == plan
    read: dict[str, Any] = json.loads((tmp_path / "valid.json").read_text())
    return read


def test_the_orders_of_shared_links_are_written_and_read() -> None:
    schedule = offloading(schedule_of("1f1b", devices=2))
    written = ScheduleFile.from_schedule(on_one_link(schedule))
    assert written.link_orders == ["1O0 1O1 1O2 1O3 0O0 0O1 0O2 0O3", "1L0 0L0 1L1 0L1 1L2 0L2 1L3 0L3"]
    assert written.schedule() == on_one_link(schedule)


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        (
            {"recompute_fraction": {"a": 0.5}},
            "a key of `schedule.recompute_fraction` must be a whole number, not a text",
        ),
        ({"recompute_fraction": {"0": 7}}, "'recompute_fraction' of stage 0 must be between 0 and 1, not 7"),
        ({"recompute_fraction": {"0": [1, 0]}}, "'recompute_fraction' of stage 0 has 2 shares for 1 micro-batches"),
        ({"offload_fraction": {"0": -0.5}}, "'offload_fraction' of stage 0 must be between 0 and 1, not -0.5"),
        ({"deeper": [[2, 0]]}, "'deeper' names micro-batch 0 of stage 2, but the schedule has 2 stages and 1 micro"),
        ({"fused_recompute": [55]}, "'fused_recompute' names stage 55, but the schedule has 2 stages"),
        ({"peers": {"0": 9}}, "'peers' names device 9, but the schedule has 2 devices"),
        ({"asynchronous": [-1]}, "'asynchronous' names the boundary after stage -1"),
        ({"placement": [0, 10**18]}, "Every device from 0 up must hold a stage"),
        ({"micro_batches": 10**18}, "0F1 is missing"),
        ({"orders": ["0F0 0B0", "1F0 1F0 1B0"]}, "1F0 appears twice"),
        ({"orders": ["0F0 0B0"]}, "The schedule has 1 orders for 2 devices"),
    ],
)
def test_an_invalid_schedule_is_refused(
    content: dict[str, Any], tmp_path: Path, entries: dict[str, Any], sentence: str
) -> None:
    content["schedule"].update(entries)
    (tmp_path / "plan.json").write_text(json.dumps(content))

    with pytest.raises(InputError, match=re.escape(sentence)):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("entries", "sentence"),
    [
        ({"debubble_plan": 99}, "has plan version 99; this debubble reads version 1"),
        ({"debubble_plan": None}, "is not a debubble plan"),
        ({"partition": []}, "The plan has 0 partitions for 2 stages"),
        ({"costs": {"stages": 3}}, "The costs are for 3 stages, but 2 are asked for"),
        ({"costs": {"link_groups": 3}}, "'link_groups' must be a list of lists of devices"),
        ({"costs": {"link_groups": [[0, 9]]}}, "'link_groups' names device 9, but there are 2 devices"),
        ({"lower_bound": -1}, "`lower_bound` must be a number >= 0.0"),
        ({"model": {"model_type": "llama"}}, "The plan has a model without a cluster"),
        ({"model": {"model_type": "llama"}, "cluster": {"devices": "2xCPU"}}, "The config has no"),
        ({"model": dict(db.models["llama-tiny"].config), "cluster": {"devices": 2}}, "The cluster is wrong"),
        ({"options": {"sequence_lenght": 9}}, "no option of a run 'sequence_lenght'; did you mean 'sequence_length'"),
    ],
)
def test_an_invalid_entry_is_refused(
    content: dict[str, Any], tmp_path: Path, entries: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**content, **entries}))

    with pytest.raises(InputError, match=re.escape(sentence)):
        Plan.load(tmp_path / "plan.json")


def test_errors_of_a_plan_file_begin_with_its_name(content: dict[str, Any], tmp_path: Path) -> None:
    content["schedule"]["orders"] = ["0F3", ""]
    (tmp_path / "plan.json").write_text(json.dumps(content))

    with pytest.raises(InputError, match=f"^{tmp_path}/plan.json: 0F3 is outside"):
        Plan.load(tmp_path / "plan.json")


def test_a_trace_instead_of_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"debubble_trace": 1}')

    with pytest.raises(InputError, match=f"run.json is a trace, not a plan: .*show PLAN --trace {tmp_path}/run.json"):
        Plan.load(tmp_path / "run.json")


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"debubble_plan": 1}', "\x00", '{"debubble_plan": 1e999}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)

    with pytest.raises(InputError, match="is not a whole plan file: " if text else "is empty: make the plan again"):
        Plan.load(tmp_path / "plan.json")


MODEL_PLAN = Path(__file__).parent / "llama_tiny.json"
"""A plan of db.models["llama-tiny"] on two devices that its cluster describes, as version 0.1.0 saved it."""


def test_a_plan_of_a_model_is_saved_unchanged(tmp_path: Path) -> None:
    Plan.load(MODEL_PLAN).save(tmp_path / "again.json")

    assert (tmp_path / "again.json").read_bytes() == MODEL_PLAN.read_bytes()


def test_a_model_keeps_its_name_if_others_share_its_config(tmp_path: Path) -> None:
    plan = db.plan(db.models["llama3.3-70b"], db.Cluster.parse("32xH100"), tensor=8, planner="dapple", micro_batches=4)
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json").model is db.models["llama3.3-70b"]


def test_a_plan_of_a_model_has_the_model_and_its_cluster() -> None:
    plan = Plan.load(MODEL_PLAN)

    assert plan.model == db.models["llama-tiny"]
    assert plan.cluster is not None
    assert [device.flops for device in plan.cluster.types] == [3e14, 3e14]
    assert plan.cluster.memory_limits == (60 * 2**30,) * 2


@pytest.mark.parametrize(("data", "devices", "needed"), [(64, "2xCPU", "128 devices"), (1, "4xCPU", "2 devices")])
def test_a_plan_of_other_devices_than_its_cluster_is_refused(
    tmp_path: Path, data: int, devices: str, needed: str
) -> None:
    content = json.loads(Path(__file__).with_name("llama_tiny.json").read_text())
    content["options"]["data"], content["cluster"]["devices"] = data, devices
    (tmp_path / "plan.json").write_text(json.dumps(content))

    with pytest.raises(InputError, match=rf"take {needed}, and its cluster has \d+: make the plan again"):
        Plan.load(tmp_path / "plan.json")


def test_a_bound_above_the_step_of_the_plan_is_refused(tmp_path: Path) -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", micro_batches=4, planner="dapple")
    content = msgspec.to_builtins(plan.to_file())
    (tmp_path / "plan.json").write_text(json.dumps({**content, "lower_bound": 1e9}))
    with pytest.raises(InputError, match=r"The plan's lower_bound is 1e\+09, and its own step takes 0\.0180"):
        Plan.load(tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text(json.dumps({**content, "lower_bound": plan.step_time * (1 + 1e-9)}))
    assert Plan.load(tmp_path / "plan.json").gap == 0


def test_costs_edited_below_the_bound_reset_the_bound(tmp_path: Path) -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", micro_batches=4, planner="dapple")
    content = msgspec.to_builtins(plan.to_file())
    for name in ("forward", "backward_input", "backward_weight", "communication"):
        content["costs"][name] = 1e-9
    (tmp_path / "plan.json").write_text(json.dumps(content))
    assert Plan.load(tmp_path / "plan.json").lower_bound == 0


def test_a_bound_without_candidates_is_checked_too(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({**content, "lower_bound": 6}))
    assert Plan.load(tmp_path / "plan.json").lower_bound == 6
    (tmp_path / "plan.json").write_text(json.dumps({**content, "lower_bound": 7}))
    with pytest.raises(InputError, match="lower_bound is 7, and its own step takes 6"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_with_divided_weights_and_offload_is_loaded(tmp_path: Path) -> None:
    plan = db.plan(
        "llama2-7b", cluster="8xRTX4090-24GB", pipeline=2, data=4, zero=3, micro_batches=2, planner="joint", effort=0.1
    )
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").schedule == plan.schedule
