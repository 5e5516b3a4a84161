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
    result = explanation(plan, timeline, seconds_per_step(plan, timeline))
    assert result is not None
    return result


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
def test_causes_add_up_to_the_step_and_memory_to_the_peak(planner: str, options: dict[str, Any]) -> None:
    why = explained(planner, **options)
    assert sum(cause.seconds for cause in why.causes) == pytest.approx(why.step_time)
    assert [memory.total for memory in why.memory] == pytest.approx([float(p) for p in why.timeline.peak_memory])
    assert all(getattr(memory, name) >= 0 for memory in why.memory for name in PARTS)


def test_weights_with_cpu_optimizers_have_the_compute_dtype() -> None:
    why = explained("chronos", data=4, zero=3, framework="torchtitan", memory_limit="40GiB")
    (parts,), hosted = why.memory, why.plan.schedule.host_steps
    units = iter(why.units.units)
    counts = [sum(float(next(units).static) / 16 for _ in stage) for stage in why.plan.partition]
    weights = sum((2 if stage in hosted else 4) * count for stage, count in enumerate(counts))

    assert 0 < len(hosted) < len(counts)
    assert parts.weights == pytest.approx(weights)
    assert parts.gradients == pytest.approx(4 * sum(counts))


def test_a_plan_with_units_of_another_model_is_refused() -> None:
    why = explained()
    assert why.plan.model_on_cluster is not None
    model, cluster = why.plan.model_on_cluster
    unknown = db.Model.from_hf({**model.config, "model_type": "unknown"})
    plan = replace(why.plan, model_on_cluster=ModelOnCluster(unknown, cluster))
    result = explanation(plan, why.timeline, why.step_time)
    assert result is not None
    with pytest.raises(InputError, match="does not list the units of its model: make the plan again"):
        _ = result.memory


def seconds(why: Explanation) -> dict[str, float]:
    return {cause.cause: cause.seconds for cause in why.causes}


def test_collectives_and_recomputation_are_named() -> None:
    assert "collectives" not in seconds(explained())
    causes = seconds(explained("dapple+", tensor=2, pipeline=2))
    assert causes["collectives"] > 0
    assert causes["recomputation"] > 0


def test_few_micro_batches_bind_by_filling_and_draining() -> None:
    binding = explained(micro_batches=4).binding
    assert "filling and draining the pipeline" in binding
    assert "which more micro-batches or fewer pipeline devices would shorten" in binding


def test_zero_is_not_advised_on_a_single_device() -> None:
    single = explained(cluster="1xH200-141GB", micro_batches=1, sequence_length=256)
    assert single.advice == "more micro-batches per step"


def test_a_single_device_binds_by_computing() -> None:
    assert explained(cluster="1xH200-141GB", micro_batches=64, sequence_length=2048).binding.startswith(
        "Computing binds"
    )


def test_states_have_the_proportions_of_megatron() -> None:
    [ratios] = {(p.gradients / p.weights, p.optimizer / p.weights) for p in explained().memory}
    assert ratios == pytest.approx((2, 6))


def test_abstract_costs_are_not_explained() -> None:
    costs = db.StageCosts.of(stages=2)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    plan = Plan(planner="none", schedule=schedule, costs=costs, lower_bound=0, partition=((), ()))
    assert explanation(plan, plan.simulate(), 1.0) is None


def test_a_limit_above_a_devices_memory_leaves_no_reserve() -> None:
    cluster = db.Cluster.from_dict({"devices": "4xA100-80GB", "memory_limit": "100TiB"})

    assert explained(cluster=cluster).reserve == 0


def test_mixed_devices_have_the_reserve_of_the_fullest_device() -> None:
    mixed = db.Cluster.parse("2xA100-40GB+2xRTX3090-24GB")
    plan = db.plan("llama3.2-1b", mixed, planner="adapipe", micro_batches=4, sequence_length=1024)
    result = explanation(plan, plan.simulate(), plan.step_time)
    assert result is not None
    free = [limit - peak for limit, peak in zip(mixed.memory_limits, plan.peak_memory, strict=True)]
    fullest = free.index(min(free))
    assert result.reserve == mixed.types[fullest].memory - mixed.memory_limits[fullest]
    assert result.reserve != mixed.types[0 if fullest > 1 else 3].memory - mixed.memory_limits[0 if fullest > 1 else 3]
