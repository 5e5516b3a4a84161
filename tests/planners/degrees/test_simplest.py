from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import Kind, Op, RunOptions
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.simplest import PlannedChoice, simplest
from debubble.planners.degrees.space import Job, configurations
from debubble.planners.degrees.usual import usual_choices
from debubble.targets.orders import accumulated


def job(*, cluster: str = "4xA100-80GB", batch: int = 8, **settings: Any) -> Job:
    return Job(
        model=db.models["llama-tiny"], cluster=db.Cluster.parse(cluster), global_batch=batch, effort=0.2,
        options=RunOptions(sequence_length=128), **settings,
    )  # fmt: skip


def planned(degrees: Degrees, step: float) -> PlannedChoice:
    return PlannedChoice(degrees=degrees, solution=quick_step(job().problem(degrees))[1], step=step)


PLAIN = planned(Degrees(data=4, zero=1, micro_batches=2), 1.015)
PIPELINE = planned(Degrees(pipeline=2, data=2, zero=1, micro_batches=4, chunks=1), 1.01)
BOTH = planned(Degrees(pipeline=2, tensor=2, micro_batches=8, chunks=1), 1.0)


def test_levers_are_named() -> None:
    assert [plan.levers for plan in (PLAIN, PIPELINE, BOTH)] == [(), ("pipeline 2",), ("pipeline 2", "tensor 2")]


def chunked(zero: int) -> PlannedChoice:
    """A choice of two stages on one pipeline device."""
    degrees = Degrees(data=4, zero=zero, micro_batches=2)
    problem = replace(job().problem(degrees), chunks=2)
    return PlannedChoice(degrees=degrees, solution=quick_step(problem)[1], step=1.0)


def test_chunks_on_one_device_are_a_lever_unless_gathered() -> None:
    assert chunked(zero=1).levers == ("2 chunks",)
    assert chunked(zero=3).levers == ()


@pytest.mark.parametrize(("zero", "levers"), [(1, ("pipeline 2",)), (3, ("pipeline 2", "ZeRO-3 with a pipeline"))])
def test_divided_gradients_with_a_pipeline_are_a_lever(zero: int, levers: tuple[str, ...]) -> None:
    degrees = Degrees(pipeline=2, data=2, zero=zero, micro_batches=4, chunks=1)
    assert planned(degrees, 1.0).levers == levers


def test_the_fewest_levers_within_the_tolerance_are_chosen() -> None:
    assert simplest([BOTH, PIPELINE, PLAIN], tolerance=0.02) is PLAIN
    assert simplest([BOTH, PIPELINE, PLAIN], tolerance=0.012) is PIPELINE
    assert simplest([BOTH, PIPELINE, PLAIN], tolerance=0.001) is BOTH


def test_a_plan_that_a_target_runs_precedes_a_simpler_one() -> None:
    plans = [BOTH, PIPELINE, PLAIN]

    assert simplest(plans, tolerance=0.02, support=lambda plan: plan is not PLAIN) is PIPELINE
    assert simplest(plans, tolerance=0.02, support=lambda _: False) is PLAIN


@pytest.mark.slow
def test_offload_of_a_target_counts_as_a_lever() -> None:
    """Without context parallelism, recomputation and offload are needed to fit."""
    options: dict[str, Any] = {"tensor": 1, "pipeline": 4, "expert": 8, "zero": 1, "sequence_length": 8192}
    plan = db.plan("mixtral-8x7b", "64xH100-80GB", global_batch=256, target="megatron", **options)

    assert (plan.options.context, plan.schedule.offloaded) == (2, frozenset())


def test_the_fastest_of_equally_simple_plans_is_chosen() -> None:
    slower = replace(PLAIN, degrees=replace(PLAIN.degrees, zero=3), step=1.019)
    assert simplest([slower, PLAIN, BOTH], tolerance=0.02) is PLAIN


def test_the_smallest_of_equally_fast_plans_is_chosen() -> None:
    """Both run two micro-batches on one device: all forwards first, or one micro-batch after the other."""
    choice = chunked(zero=3)
    gpipe = db.schedules["gpipe"](devices=1, micro_batches=2)
    order = tuple(
        Op(op.kind, s, op.micro_batch) for op in gpipe.orders[0] for s in ((0, 1) if op.kind is Kind.F else (1, 0))
    )
    larger = replace(
        choice, solution=replace(choice.solution, schedule=replace(choice.solution.schedule, orders=(order,)))
    )
    smaller = replace(choice, solution=replace(choice.solution, schedule=accumulated(choice.solution.schedule)))

    assert simplest([larger, smaller], tolerance=0.02) is smaller
    assert simplest([smaller, larger], tolerance=0.02) is smaller


def test_less_context_parallelism_comes_before_a_faster_step() -> None:
    context, some = Degrees(context=4, zero=3, micro_batches=8), Degrees(context=2, data=2, zero=3, micro_batches=4)
    more, less = planned(context, 1.0), planned(some, 1.01)
    assert simplest([more, less], tolerance=0.02) is less
    assert simplest([more, less], tolerance=0.005) is more


def test_usual_choices_have_no_model_parallelism() -> None:
    usual = usual_choices(configurations(job()))
    assert list(usual) == ["FSDP (ZeRO-3)", "data parallel (ZeRO-1)"]
    assert {(d.devices, d.data, d.zero) for d in usual["FSDP (ZeRO-3)"]} == {(4, 4, 3)}
    assert [d.micro_batch_size for d in usual["FSDP (ZeRO-3)"]] == [1, 2]


@pytest.mark.slow
def test_the_recommended_plan_is_the_first_configuration() -> None:
    best = search_degrees(job(tolerance=0.5)).search
    assert best.configurations[0].degrees.data == 4
    assert best.fastest is not None
    assert best.fastest.configuration.step_time < best.configurations[0].step_time
    assert best.fastest.levers


def test_without_a_tolerance_the_fastest_plan_is_the_answer() -> None:
    best = search_degrees(job(), planner="pipedream")
    assert best.search.fastest is None
    steps = [configuration.step_time for configuration in best.search.configurations]
    assert steps == sorted(steps)


@pytest.mark.slow
def test_usual_choices_are_shown_with_steps_or_with_reasons() -> None:
    fits = search_degrees(job()).search.usual
    assert [choice.configuration is not None for choice in fits] == [True, True]
    large = Job(
        model=db.models["llama2-13b"], cluster=db.Cluster.parse("8xA100-40GB"), global_batch=8, effort=0.1,
        options=RunOptions(sequence_length=1024),
    )  # fmt: skip
    fsdp, data = search_degrees(large).search.usual
    assert fsdp.configuration is not None
    assert data.configuration is None
    assert data.reason is not None
    assert data.reason.startswith("The model's states alone need 72.73 GiB")


@pytest.mark.slow
def test_plain_fsdp_is_faster_than_its_quick_plan() -> None:
    lora = Job(
        model=db.models["qwen2.5-14b"], cluster=db.Cluster.parse("4xRTX4090-24GB"), global_batch=32, effort=1.0,
        options=RunOptions(lora=16),
    )  # fmt: skip
    fsdp, _ = search_degrees(lora).search.usual
    plain = lora.problem(Degrees(data=4, zero=3, micro_batches=8))
    assert fsdp.configuration is not None
    assert fsdp.configuration.step_time < 0.9 * quick_step(plain)[0]
