"""ChronosPipe ALL: two chunks, recomputation, activations and optimizer states on the host, under a limit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.costs.partition import Partition
from debubble.ir import Kind, Lane, Placement
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.steps.post_validation import StepResult
from debubble.training.checks import validates_after
from debubble.training.training_run import post_validated_step, synchronous_step
from tests.runtime.test_pipeline import ADAMW, reference_losses
from tests.support import gloo_ranks
from tests.support.run_cases import (
    LENGTH,
    LLAMA8,
    batch_for,
    kinds_of,
    on_lanes,
    overlapping,
    peak_of,
    plan_for,
    units_of,
)
from tests.support.runtime_cases import run_threads, tokens_of

STATES, ON_DEVICE = 16, 8
"""Bytes per fp32 parameter: parameter, gradient and two moments; the first two."""

STEPS = 3


@pytest.fixture(scope="module")
def units() -> Any:
    return units_of(LLAMA8, dtype=torch.float32, states=STATES, hosted=ON_DEVICE)


@pytest.fixture(scope="module")
def limit(units: Any) -> Any:
    return peak_of(plan_for("dapple", LLAMA8, units=units, dtype="fp32")) * 5 // 10


@pytest.fixture(scope="module")
def plan(units: Any, limit: Any) -> Any:
    return plan_for("chronos", LLAMA8, units=units, limit=limit, chunks=2, dtype="fp32")


def train(plan: Any) -> Any:
    """Results of `one` by rank."""
    return run_threads(plan, one, optimizer=ADAMW)


def one(pipeline: Any) -> Any:
    """Losses, counted peak of the last step, parameters, and the trace of the last step."""
    losses = []
    for step in range(STEPS):
        losses.append(float(pipeline.step(batch_for(pipeline.plan, seed=step))))
        peak = pipeline.measured.static_bytes + gradients_of_hosted(pipeline) + pipeline.measured.peak_activation
        pipeline.optimizer_step()
    return losses, peak, pipeline.state_dict(), pipeline.measured.gather_trace()


def gradients_of_hosted(pipeline: Any) -> Any:
    """They are on the device until D; after the step none are counted."""
    hosted = {op.stage for op in pipeline.plan.schedule.operations if op.kind is Kind.D}
    stages = [stage for s, stage in pipeline.stages.items() if s in hosted]
    return sum(p.nbytes for stage in stages for unit in stage.units for p in unit.parameters())


@pytest.fixture(scope="module")
def trained(plan: Any) -> Any:
    return train(plan)


def test_1f1b_and_interleaved_break_the_limit(units: Any, limit: Any) -> None:
    with pytest.raises(db.InfeasibleError):
        plan_for("dapple", LLAMA8, units=units, limit=limit, dtype="fp32")
    schedule = db.schedules["interleaved"](devices=4, micro_batches=8, chunks=2)
    costs = replace(units, memory_limit=(limit,)).stage_costs(
        Partition.cut(units, [3, 2, 2, 2, 2, 2, 2, 3]), Placement.looped(4, 2)
    )
    with pytest.raises(db.OutOfMemoryError):
        db.simulate(schedule, costs)


def test_the_plan_combines_all_means(plan: Any) -> None:
    assert plan.schedule.placement.chunks == 2
    assert {Kind.R, Kind.O, Kind.L, Kind.P, Kind.D, Kind.S} <= kinds_of(plan)


def test_plan_trains_with_the_losses_of_one_process(plan: Any, trained: Any) -> None:
    expected = reference_losses(LLAMA8, micro_batches=plan.micro_batches, steps=STEPS, length=LENGTH)
    for losses, *_ in trained:
        assert losses == pytest.approx(expected, rel=1e-5)


def test_the_plans_counted_peaks_are_within_the_limit(plan: Any, trained: Any, limit: Any) -> None:
    # How close the peak gets to the limit depends on when transfers end.
    for (_, peak, _, _), static in zip(trained, plan.costs.static, strict=True):
        assert static < peak <= limit


def test_host_steps_all_chunks_during_compute(plan: Any, trained: Any) -> None:
    assert on_lanes(trained[0][3], (Lane.HOST,)) == {f"{stage}S7" for stage in range(8)}
    assert overlapping(plan, lanes=(Lane.HOST,))


@pytest.mark.slow
def test_host_steps_match_device_steps_bitwise(plan: Any, trained: Any) -> None:
    orders = tuple(tuple(op for op in order if op.kind not in (Kind.P, Kind.D)) for order in plan.schedule.orders)
    on_device = replace(
        plan, schedule=replace(plan.schedule, orders=orders), costs=plan.costs.replace(memory_limit=None)
    )
    for (losses, _, parameters, _), (expected, _, on_host, _) in zip(train(on_device), trained, strict=True):
        assert losses == expected
        assert all(torch.equal(parameters[name], on_host[name]) for name in parameters)


TINY_LIMIT, TINY_LENGTH = 20 * 2**20, 64


@pytest.fixture(scope="module")
def tiny() -> Any:
    """ChronosPipe under a limit that leaves no memory for copies of its devices' states."""
    return db.plan(
        db.models["llama-tiny"], db.Cluster.parse("4xCPU"), planner="chronos", chunks=2, memory_limit=TINY_LIMIT,
        sequence_length=TINY_LENGTH, dtype="fp32", micro_batches=4,
    )  # fmt: skip


def stepped_afterwards(plan: Any) -> Any:
    """The same plan with every stage stepped on its device at the end."""
    orders = tuple(tuple(o for o in order if o.kind not in (Kind.P, Kind.D, Kind.S)) for order in plan.schedule.orders)
    return replace(plan, schedule=replace(plan.schedule, orders=orders), costs=plan.costs.replace(memory_limit=None))


def updated(plan: Any, *, clip: Any) -> Any:
    """By rank, the result of two steps of `debubble train`: results, largest counted peak, and parameters."""

    def one(pipeline: Any) -> Any:
        take_step = post_validated_step if validates_after(None, plan) else synchronous_step
        results: list[StepResult] = []
        peaks: list[int] = []
        for step in range(2):
            tokens = tokens_of(plan.model, rows=plan.micro_batches, length=TINY_LENGTH, seed=step)
            results += take_step(
                pipeline, tokens, lambda: peaks.append(pipeline.measured.peak_memory), clip=clip, finish=True
            )
        return results, max(peaks), pipeline.state_dict()

    return run_threads(plan, one, optimizer=ADAMW)


@pytest.mark.slow
def test_clipped_run_with_host_steps_stays_within_its_limit(tiny: Any) -> None:
    clip = 0.1
    assert {Kind.P, Kind.D, Kind.S} <= kinds_of(tiny)
    expected = updated(stepped_afterwards(tiny), clip=clip)
    actual = updated(tiny, clip=clip)
    for (results, peak, parameters), (synchronous, _, reference) in zip(actual, expected, strict=True):
        assert [(r.loss, r.norm) for r in results] == [(r.loss, r.norm) for r in synchronous]
        assert all(r.norm > clip for r in results)
        # A host that was wrong once waits for the norm in the next step.
        assert [r.rolled_back for r in results] == [4, 0]
        assert peak <= TINY_LIMIT
        assert all(torch.equal(parameters[name], reference[name]) for name in reference)


def over_gloo(rank: Any, folder: Any, path: Any) -> None:
    torch.save(one(Pipeline(None, Plan.load(path), optimizer=ADAMW))[:3], folder / f"rank{rank}.pt")


@pytest.mark.slow
def test_the_plan_runs_over_gloo(plan: Any, trained: Any, limit: Any, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    answers = gloo_ranks.spawn(4, over_gloo, tmp_path / "plan.json")
    for rank, (expected, _, on_threads, _) in enumerate(trained):
        losses, peak, parameters = torch.load(answers / f"rank{rank}.pt")
        assert losses == expected
        assert peak <= limit
        assert all(torch.equal(parameters[name], on_threads[name]) for name in parameters)
