from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError
from debubble.planners.analysis.explanation import Explanation, explanation
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import ModelOnCluster, Plan
from debubble.views.memory_table import PARTS


def explained(planner: str = "dapple", cluster: str | db.Cluster = "4xA100-80GB", **more: Any) -> Explanation:
    plan = db.plan("llama2-7b", cluster, planner=planner, **{"micro_batches": 8, "effort": 0.1, **more})
    timeline = plan.simulate()
    found = explanation(plan, timeline, seconds_per_step(plan, timeline))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("planner", "options"),
    [
        ("dapple", {"data": 2, "pipeline": 2, "zero": 3}),
        ("dapple+", {"tensor": 2, "pipeline": 2}),
        ("dapple", {"post_validation": True}),
        ("pipeoffload", {"memory_limit": "40GiB"}),
        ("chronos", {"memory_limit": "36GiB"}),
    ],
)
def test_causes_sum_to_the_step_and_parts_to_the_peak(planner: str, options: dict[str, Any]) -> None:
    why = explained(planner, **options)
    assert sum(each.seconds for each in why.causes) == pytest.approx(why.step_time)
    assert [parts.total for parts in why.memory] == pytest.approx([float(p) for p in why.timeline.peak_memory])
    assert all(getattr(parts, part) >= 0 for parts in why.memory for part in PARTS)


def test_weights_beside_cpu_optimizers_have_the_computing_dtype() -> None:
    why = explained("chronos", data=4, zero=3, framework="torchtitan", memory_limit="40GiB")
    (parts,), hosted = why.memory, why.plan.schedule.host_steps
    units = iter(why.units.units)
    counts = [sum(float(next(units).static) / 16 for _ in stage) for stage in why.plan.partition]
    weights = sum((2 if stage in hosted else 4) * count for stage, count in enumerate(counts))

    assert 0 < len(hosted) < len(counts)
    assert parts.weights == pytest.approx(weights)
    assert parts.gradients == pytest.approx(4 * sum(counts))


def test_a_plan_of_another_models_units_is_refused() -> None:
    why = explained()
    assert why.plan.model_on_cluster is not None
    model, cluster = why.plan.model_on_cluster
    unknown = db.Model.from_hf({**model.config, "model_type": "unknown"})
    plan = replace(why.plan, model_on_cluster=ModelOnCluster(unknown, cluster))
    found = explanation(plan, why.timeline, why.step_time)
    assert found is not None
    with pytest.raises(InputError, match="does not list the units of its model: make the plan again"):
        _ = found.memory


def seconds(why: Explanation) -> dict[str, float]:
    return {each.cause: each.seconds for each in why.causes}


def test_collectives_and_recomputation_are_named() -> None:
    assert "collectives" not in seconds(explained())
    parted = seconds(explained("dapple+", tensor=2, pipeline=2))
    assert parted["collectives"] > 0
    assert parted["recomputation"] > 0


def test_few_micro_batches_bind_by_filling_and_draining() -> None:
    said = explained(micro_batches=4).binding
    assert "filling and draining the pipeline" in said
    assert "which more micro-batches or fewer pipeline devices would shorten" in said


def test_zero_is_not_advised_where_nothing_can_be_divided() -> None:
    alone = explained(cluster="1xH200-141GB", micro_batches=1, sequence_length=256)
    assert alone.advice == "more micro-batches per step"


def test_a_single_device_binds_by_computing() -> None:
    assert explained(cluster="1xH200-141GB", micro_batches=64, sequence_length=2048).binding.startswith(
        "Computing binds"
    )


def test_states_are_in_megatrons_shares() -> None:
    [parts] = {(p.gradients / p.weights, p.optimizer / p.weights) for p in explained().memory}
    assert parts == pytest.approx((2, 6))


def test_abstract_costs_are_not_explained() -> None:
    costs = db.StageCosts.of(stages=2)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    plan = Plan(planner="none", schedule=schedule, costs=costs, lower_bound=0, partition=((), ()))
    assert explanation(plan, plan.simulate(), 1.0) is None


def test_a_limit_above_a_devices_memory_leaves_no_reserve() -> None:
    roomy = db.Cluster.from_dict({"devices": "4xA100-80GB", "memory_limit": "100TiB"})

    assert explained(cluster=roomy).reserve == 0


def test_the_reserve_of_mixed_devices_is_that_of_the_fullest() -> None:
    mixed = db.Cluster.parse("2xA100-40GB+2xRTX3090-24GB")
    plan = db.plan("llama3.2-1b", mixed, planner="adapipe", micro_batches=4, sequence_length=1024)
    found = explanation(plan, plan.simulate(), plan.step_time)
    assert found is not None
    left = [limit - peak for limit, peak in zip(mixed.memory_limits, plan.peak_memory, strict=True)]
    fullest = left.index(min(left))
    assert found.reserve == mixed.types[fullest].memory - mixed.memory_limits[fullest]
    assert found.reserve != mixed.types[0 if fullest > 1 else 3].memory - mixed.memory_limits[0 if fullest > 1 else 3]
