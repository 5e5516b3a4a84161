"""A pipeline switches to another order of its stages, and only the order changes."""

from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError, OutOfMemoryError, StageCosts
from tests.runtime.test_moving_units import trained
from tests.support import tiny_models
from tests.support.generic_cases import GENERIC
from tests.support.model_cases import on_cpus
from tests.support.runtime_cases import assert_same_run, plan_of, run_threads, tokens_of
from tests.support.schedule_cases import offloading
from tests.support.tiny_models import with_layers

LLAMA, LLAMA_TIED, GPT2 = (with_layers(tiny_models.FAMILIES[family], 2) for family in ("llama", "llama-tied", "gpt2"))


@pytest.mark.parametrize(("config", "dtype"), [(LLAMA, "fp32"), (GPT2, "bf16")], ids=["llama", "gpt2"])
def test_orders_with_equal_sums_change_no_bit(config: Any, dtype: str) -> None:
    start = db.schedules["gpipe"](devices=2, micro_batches=4)
    plan = plan_of(start, config, dtype=dtype)
    costs = plan.costs
    orders = [
        db.schedules["zb-h1"](devices=2, micro_batches=4, costs=costs),
        offloading(start.with_split_backwards()),
        db.schedules["1f1b"](devices=2, micro_batches=4),
    ]
    assert_same_run(trained(plan, *(replace(plan, schedule=order) for order in orders)), trained(plan, steps=4))


def keeping(plan: Any, strategy: str, *, offload: Any = None) -> Any:
    """The plan with another strategy in all backwards and another offloaded fraction."""
    partition = tuple(tuple(replace(unit, strategy=strategy) for unit in stage) for stage in plan.partition)
    stages = range(plan.schedule.stages)
    schedule = replace(
        plan.schedule,
        fused_recompute=frozenset(stages if strategy != "none" else ()),
        offload_fraction={} if offload is None else dict.fromkeys(stages, offload),
    )
    return replace(plan, partition=partition, schedule=schedule)


def test_changed_recomputation_and_offload_change_no_bit() -> None:
    plan = plan_of(offloading(db.schedules["1f1b"](devices=2, micro_batches=4)), LLAMA, dtype="fp32")
    later = [keeping(plan, "full"), keeping(plan, "norm+activation", offload=0.5), keeping(plan, "none", offload=0.25)]
    assert_same_run(trained(plan, *later), trained(plan, steps=4))


def test_switch_to_recomputation_frees_activations() -> None:
    plan = plan_of(db.schedules["gpipe"](devices=2, micro_batches=4), LLAMA)

    def one(pipeline: Any) -> Any:
        peaks = []
        for other in (plan, keeping(plan, "full"), plan):
            pipeline.switch_plan(other)
            pipeline.step(tokens_of(LLAMA, rows=4))
            peaks.append(pipeline.measured.peak_activation)
        return peaks

    for saved_bytes, recomputed, saved_again in run_threads(plan, one):
        assert recomputed < saved_bytes == saved_again


def test_modules_without_units_take_no_operator_strategy() -> None:
    plan = plan_of(db.schedules["gpipe"](devices=1, micro_batches=4), GENERIC["olmo2"])
    with pytest.raises(InputError, match="recompute in full or not at all, not 'norm'"):
        run_threads(plan, lambda pipeline: pipeline.switch_plan(keeping(plan, "norm")))


def test_memory_is_counted_against_the_new_order() -> None:
    start = db.schedules["gpipe"](devices=2, micro_batches=4)
    plan = plan_of(start, LLAMA)
    steady = replace(plan, schedule=db.schedules["1f1b"](devices=2, micro_batches=4))

    def one(pipeline: Any) -> Any:
        pipeline.step(tokens_of(LLAMA, rows=4))
        before = pipeline.measured.peak_activation
        pipeline.switch_plan(steady)
        pipeline.step(tokens_of(LLAMA, rows=4))
        return before, pipeline.measured.peak_activation

    # GPipe holds all four micro-batches; 1F1B holds two on the first device and one on the last.
    (first, then_first), (last, then_last) = run_threads(plan, one)
    assert then_first == first // 2
    assert then_last == last // 4


@pytest.mark.parametrize(
    "changed",
    [
        lambda plan: replace(plan, schedule=db.schedules["gpipe"](devices=2, micro_batches=8)),
        lambda plan: replace(plan, model_on_cluster=on_cpus(LLAMA_TIED)),
    ],
    ids=["micro-batches", "model"],
)
def test_plan_with_more_than_a_new_order_is_refused(changed: Any) -> None:
    plan = plan_of(db.schedules["gpipe"](devices=2, micro_batches=4), LLAMA)
    with pytest.raises(InputError, match="another model, other devices or other steps than the one that runs"):
        run_threads(plan, lambda pipeline: pipeline.switch_plan(changed(plan)))


def test_infeasible_order_keeps_the_current_one() -> None:
    costs = StageCosts.of(stages=2, activation=1, memory_limit=2)
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA, costs=costs)
    greedy = replace(plan, schedule=db.schedules["gpipe"](devices=2, micro_batches=4))

    def one(pipeline: Any) -> Any:
        with pytest.raises(OutOfMemoryError):
            pipeline.switch_plan(greedy)
        return pipeline.step(tokens_of(LLAMA, rows=4)), pipeline.plan

    assert run_threads(plan, one)[0][1] is plan


def test_ranks_with_different_new_orders_are_refused() -> None:
    plan = plan_of(db.schedules["gpipe"](devices=2, micro_batches=4), LLAMA)
    other = replace(plan, schedule=db.schedules["1f1b"](devices=2, micro_batches=4))
    with pytest.raises(InputError, match="Rank 1 has another plan"):
        run_threads(plan, lambda pipeline: pipeline.switch_plan(other if pipeline.device else plan))
