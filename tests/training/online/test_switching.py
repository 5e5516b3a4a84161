"""Ranks with an online schedule compute what they would compute without."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim import AdamW

import debubble as db
from debubble.ir import StageCosts
from debubble.training.online.controller import OnlineScheduler, Policy
from debubble.training.online.memory_variants import recomputation_variants
from tests.support import online_cases, runtime_cases
from tests.support.online_cases import STEPS, Finished, events_of, traced, trained
from tests.support.runtime_cases import assert_same_run, plan_of, run_threads, tokens_of, with_layers

LLAMA, GPT2 = with_layers(runtime_cases.LLAMA, 2), with_layers(runtime_cases.GPT2, 2)
QUICK = Policy(settling=1, window=2)
COSTS = StageCosts.of(stages=4, activation=2, memory_limit=20, offload=1)


controlled = partial(online_cases.controlled, policy=QUICK)


def bad_plan(config: Any, dtype: Any, *, costs: Any = COSTS, **options: Any) -> Any:
    """GPipe under a limit that leaves more memory than 1F1B needs."""
    schedule = db.schedules["gpipe"](devices=costs.stages, micro_batches=4)
    return plan_of(schedule, config, costs=costs, dtype=dtype, sequence_length=12, **options)


def assert_order_changes(plan: Any, controller: Any) -> Any:
    """Check that the run switches to the searched order and no bit changes; returns that order."""
    losses, plans, parameters = trained(plan, controller=controller)
    assert [running.schedule.name for running in plans] == ["gpipe"] * 3 + ["searched"] * 4
    expected, _, weights = trained(plan)
    assert_same_run((losses, parameters), (expected, weights))
    return plans[-1].schedule


@pytest.mark.parametrize(
    ("config", "dtype"), [(LLAMA, "fp32"), pytest.param(GPT2, "bf16", marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_a_better_order_is_adopted_and_no_bit_changes(config: Any, dtype: str, tmp_path: Path) -> None:
    plan = bad_plan(config, dtype)
    controller = controlled(plan, tmp_path)
    assert_order_changes(plan, controller)
    assert events_of(controller) == [(3, "search"), (3, "adopted"), (6, "kept")]
    assert (plan.simulate().makespan, controller.plan.simulate().makespan) == (21, 15)


def recomputing_plan(devices: int, **options: Any) -> Any:
    """A plan that recomputes everything although memory suffices for everything."""
    cluster = db.Cluster.parse(f"{devices}xA100-80GB")
    plan = db.plan(
        db.Model.from_hf(LLAMA), cluster, micro_batches=4, planner="dapple", dtype="fp32", sequence_length=12, **options
    )
    return next(recomputation_variants(plan))


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_dropping_recomputation_changes_no_bit(devices: int, tmp_path: Path) -> None:
    plan = recomputing_plan(devices)
    assert len(plan.schedule.fused_recompute) == devices
    controller = controlled(plan, tmp_path)
    losses, plans, parameters = trained(plan, controller=controller)
    assert [event for _, event in events_of(controller)][:3] == ["search", "adopted", "kept"]
    assert not plans[-1].schedule.fused_recompute
    assert {unit.strategy for stage in controller.plan.partition for unit in stage} == {"none"}
    expected, _, weights = trained(plan)
    assert_same_run((losses, parameters), (expected, weights))


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_host_steps_remain_after_a_switch(devices: int, tmp_path: Path) -> None:
    costs = StageCosts.of(
        stages=devices, activation=2, memory_limit=20, host_step=1, gradient_offload=0.5, parameter_load=0.5
    )
    plan = bad_plan(LLAMA, "fp32", costs=costs)
    plan = replace(plan, schedule=plan.schedule.with_host_steps({*range(devices)}))
    assert assert_order_changes(plan, controlled(plan, tmp_path)).host_steps == {*range(devices)}


def test_post_validated_steps_continue_with_a_shorter_span(tmp_path: Path) -> None:
    costs = StageCosts.of(stages=2, activation=2, memory_limit=20)
    plan = bad_plan(LLAMA, "fp32", costs=costs, post_validation=True)
    controller = controlled(plan, tmp_path)

    def one(pipeline: Any) -> Any:
        online = OnlineScheduler(pipeline, None if pipeline.ranks.transport.rank else controller)
        results = []
        for step in range(STEPS):
            results.append(pipeline.post_validated_step(tokens_of(LLAMA, rows=4, seed=step), max_norm=1.0))
            online.after_step(step + 1, 1.0, traced(pipeline.plan, plan.costs))
        return [*results, pipeline.finish_update()]

    answers = run_threads(plan, one, optimizer=partial(AdamW, lr=0.01))
    assert events_of(controller)[:2] == [(3, "search"), (3, "adopted")]
    assert controller.plan.simulate().span < plan.simulate().span
    # The switch settles the previous update, whose result the next step then does not report.
    losses = {result.step: result.loss for result in answers[0] if result is not None}
    expected = trained(replace(plan, options=replace(plan.options, post_validation=False)))[0]
    assert [losses[step] for step in sorted(losses)] == [expected[step] for step in sorted(losses)]


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 3])
def test_replicas_switch_together(zero: int, tmp_path: Path) -> None:
    gathers: Any = {"gathered": 1, "static": 2} if zero == 3 else {}
    costs = StageCosts.of(stages=2, activation=2, memory_limit=20, **gathers)
    plan = bad_plan(LLAMA, "fp32", costs=costs, data=2, zero=zero)
    assert_order_changes(plan, controlled(plan, tmp_path))


def test_run_measures_the_costs_of_its_operations(tmp_path: Path) -> None:
    """The controller uses the pipeline's traces."""
    plan = bad_plan(LLAMA, "fp32")
    controller = controlled(plan, tmp_path, search=lambda p, _: Finished(p))

    def one(pipeline: Any) -> None:
        online = OnlineScheduler(pipeline, None if pipeline.device else controller)
        for step in range(QUICK.settling + QUICK.window):
            pipeline.step(tokens_of(LLAMA, rows=4, seed=step))
            online.after_step(step + 1, 1.0, pipeline.measured.gather_trace().steps[-1])

    run_threads(plan, one)
    [searched, *_] = controller.journal.entries
    assert searched.event == "search"
    assert (searched.drift or 0) > 0
