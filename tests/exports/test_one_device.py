"""Plans without a pipeline whose stages only gather parameters: frameworks run them as one stage."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import debubble as db
from debubble.exports import exports
from debubble.ir import ExportError, Placement, Schedule
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.targets.orders import undivided
from tests.exports.hand_plans import priced

CHUNKED = Schedule.of(
    "1f1b", Placement((0, 0)), 4, [[name for j in range(4) for name in (f"0F{j}", f"1F{j}", f"1B{j}", f"0B{j}")]]
)
FSDP = priced(layers=(2, 2), schedule=CHUNKED, data=4, zero=3)


def test_chunks_of_one_device_are_gathered_unit_by_unit() -> None:
    made = exports["torch"](FSDP)
    (modules,) = json.loads(made.files["modules.json"])

    assert made.files["schedule.csv"].strip() == "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3"
    assert [name for name in modules if "layers" in name] == [f"model.layers.{layer}" for layer in range(4)]


def test_accumulating_plan_runs_in_all_frameworks_with_fsdp() -> None:
    assert {"debubble", "torch", "torchtitan", "automodel", "deepspeed"} <= set(plan_runs_in(FSDP))


def test_custom_order_of_one_device_is_kept() -> None:
    (order,) = CHUNKED.orders
    other = replace(CHUNKED, orders=((order[4], *order[:4], *order[5:]),))

    assert undivided(other) is other
    with pytest.raises(ExportError, match="runs its own 1f1b order"):
        exports["deepspeed"](priced(layers=(2, 2), schedule=other, data=4, zero=3))


def test_export_reports_the_step_with_framework_kernels() -> None:
    one_stage = priced(layers=(2,), schedule=db.schedules["1f1b"](devices=1, micro_batches=4), data=4, zero=3)
    remark = exports["torchtitan"](one_stage).own_kernels
    assert remark is not None
    assert remark.startswith("The plan prices no framework's kernels; with those of torchtitan the step is predicted")
    assert exports["torchtitan"](priced(layers=(2,), data=4, zero=3, framework="torchtitan")).own_kernels is None


def test_export_reports_if_framework_kernels_do_not_fit() -> None:
    limit = float(max(FSDP.simulate().peak_memory))
    near = replace(FSDP, costs=FSDP.costs.with_limit(limit))
    remark = exports["deepspeed"](near).own_kernels
    assert remark is not None
    assert "does not fit: plan again with --for deepspeed" in remark
