from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import CandidateSummary, InputError, RunOptions
from debubble.ir.plan_entries import PlannedUnit
from debubble.models.runtime_limits import beyond_runtime
from debubble.planners.analysis.remarks import OTHER_COSTS, plan_remarks, timeline_remarks
from debubble.plans import ModelOnCluster, Plan
from debubble.views import Scene, views
from debubble.views.summary import as_dict


def planned(cluster: str = "4xA100-80GB", *, model: str = "llama-tiny", **options: Any) -> Plan:
    return db.plan(
        db.models[model], db.Cluster.parse(cluster), planner="dapple", micro_batches=16, sequence_length=128,
        **options,
    )  # fmt: skip


def remarks(plan: Plan) -> tuple[str, ...]:
    return plan_remarks(plan, plan.simulate())


def test_an_ordinary_plan_has_no_remarks() -> None:
    assert remarks(planned()) == ()


def test_a_remark_says_how_mixed_devices_are_timed() -> None:
    assert remarks(planned("2xH100-80GB+2xA100-40GB")) == (
        "H100-80GB and A100-40GB are mixed: a pipeline device has the pace of its slowest and the memory limit of its"
        " smallest device; links, and gradients and optimizer after the pipeline, are timed as on A100-40GB.",
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (
            {"data": 2, "zero": 1, "optimizer": "muon"},
            "ZeRO leaves every replica rows of each parameter and Muon needs",
        ),
        ({"dtype": "fp16", "post_validation": True}, "fp16 skips steps, so it cannot update before the norm is known"),
    ],
)
def test_a_plan_that_the_runtime_cannot_run_has_a_remark(options: dict[str, Any], reason: str) -> None:
    [remark] = remarks(planned(**options))
    assert remark.startswith(f"The runtime cannot run this plan, because {reason}")


def test_a_plan_for_a_framework_needs_no_runtime() -> None:
    planned_for = replace(planned(data=2, zero=1, host_optimizer=1.0), target="deepspeed")
    assert not any("runtime" in remark for remark in remarks(planned_for))


def test_expert_parallel_ranks_are_beyond_the_runtime() -> None:
    assert beyond_runtime(RunOptions(data=2), db.models["mixtral-8x7b"]) is None
    assert "experts of its own units alone" in str(beyond_runtime(RunOptions(data=2, expert=2), None))


def test_a_large_bubble_has_a_remark_with_what_would_help() -> None:
    costs = db.StageCosts.of(stages=8)
    few, many = (db.simulate(db.schedules["1f1b"](devices=8, micro_batches=m), costs) for m in (4, 16))
    assert timeline_remarks(many) == ()
    assert timeline_remarks(few) == (
        "The devices are idle for 63.6% of the pipeline's time, mostly while it fills and drains: 4 micro-batches are"
        " few for 8 pipeline devices; use more micro-batches, or fewer pipeline devices with data parallelism.",
    )


def test_a_bubble_of_slow_links_is_attributed_to_transfers() -> None:
    slow_links = db.StageCosts.of(stages=2, communication=20)
    [remark] = timeline_remarks(db.simulate(db.schedules["1f1b"](devices=2, micro_batches=16), slow_links))
    assert remark.endswith("most of it by transfer: see the shares of each device.")


def test_the_page_and_the_summary_have_the_remarks() -> None:
    plan = planned(data=2, zero=1, optimizer="muon")
    scene = Scene.predicted(plan)
    assert as_dict(scene)["remarks"] == list(remarks(plan))
    assert "ZeRO leaves every replica rows" in views["html"]([scene]).decode()
    assert "ZeRO leaves every replica rows" not in views["html"]([replace(scene, remarks=())]).decode()


def test_a_planner_whose_program_failed_is_named() -> None:
    plan = planned()
    failed = CandidateSummary(planner="mine", status="failed", rejected="It failed at mine.py, line 3: IndexError.")
    first, *_ = plan_remarks(replace(plan, candidates=(failed,)), plan.simulate())
    assert first == (
        "The planner 'mine' failed, which is an error in its program: It failed at mine.py, line 3: IndexError."
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"target": "megatron"}, {"lora": 8}, {"slices": 2, "planner": "seq1f1b"}, {"zero": 3, "data": 2}],
    ids=["plain", "megatron", "lora", "slices", "zero"],
)
def test_an_unedited_plan_has_no_remark_on_its_costs(options: dict[str, Any]) -> None:
    plan = db.plan("llama-tiny", "2xL40S-48GB", **{"planner": "merak", "micro_batches": 4, **options})
    assert OTHER_COSTS not in plan_remarks(plan, plan.simulate())


@pytest.mark.parametrize("edited", ["strategy", "length", "cluster"])
def test_an_edited_plan_has_a_remark_that_its_costs_differ(edited: str) -> None:
    plan = db.plan("llama-tiny", "2xL40S-48GB", planner="merak", micro_batches=4)
    assert plan.model_on_cluster is not None
    model, _ = plan.model_on_cluster
    changes: dict[str, dict[str, Any]] = {
        "strategy": {"partition": _recomputing(plan, "full")},
        "length": {"options": replace(plan.options, sequence_length=8192)},
        "cluster": {"model_on_cluster": ModelOnCluster(model, db.Cluster.parse("2xH100-80GB"))},
    }
    changed = replace(plan, **changes[edited])
    assert OTHER_COSTS in plan_remarks(changed, changed.simulate())


def test_a_plan_with_an_unknown_strategy_is_refused() -> None:
    plan = db.plan("llama-tiny", "2xL40S-48GB", planner="merak", micro_batches=4)
    changed = replace(plan, partition=_recomputing(plan, "fulll"))
    with pytest.raises(InputError, match="There is no recomputation strategy 'fulll'; did you mean 'full'"):
        plan_remarks(changed, changed.simulate())


def _recomputing(plan: db.Plan, strategy: str) -> tuple[tuple[PlannedUnit, ...], ...]:
    return tuple(tuple(replace(unit, strategy=strategy) for unit in stage) for stage in plan.partition)
