"""Costs of gradient reduction and the optimizer step, in the program or after it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.costs import Cluster, StepTail, model_units, with_profile
from debubble.costs.files import units_from_dict, units_to_dict
from debubble.costs.step import HOST_MEMORY_BANDWIDTH
from debubble.costs.units import Units
from debubble.ir import Kind, Op, Placement, RunOptions, Schedule, StageCosts
from debubble.models import Model, models
from debubble.papers.chronospipe.offload import offload_states
from debubble.planners.plan_model import plan
from debubble.planners.plan_step import pipeline_time, tail_of
from debubble.schedules import schedules
from debubble.simulator import simulate

MODEL = models["llama2-7b"]
LATENCY, LINK, MEMORY = 1e-5, 1e11, 1e12
LAUNCH = 2e-6


def cluster(devices: int = 8) -> Cluster:
    """A cluster of one node with round bandwidths."""
    rates = {"link_latency": LATENCY, "link_bandwidth": LINK, "memory_bandwidth": MEMORY}
    efficiency = {"link": 1.0, "memory": 1.0, "launch": LAUNCH}
    return Cluster.from_dict({"devices": f"{devices}xA100-80GB", **rates, "efficiency": efficiency})


def units(model: Model = MODEL, **options: float) -> Units:
    return model_units(model, cluster(), RunOptions(**options))  # type: ignore[arg-type]


def model_costs(model: Units) -> StageCosts:
    """The costs of the model as one stage."""
    partition = [[(i, "none") for i in range(len(model.units))]]
    return model.stage_costs(partition, Placement.linear(1))


@pytest.mark.parametrize(
    ("zero", "bytes_per_parameter"), [(0, 2 * 4), (1, 4), (2, 4)], ids=["all-reduce", "ZeRO-1", "ZeRO-2"]
)
def test_gradients_are_reduced_over_a_ring_of_the_replicas(zero: int, bytes_per_parameter: int) -> None:
    [time] = model_costs(units(data=4, zero=zero)).gradient_reduce
    assert time == pytest.approx(LATENCY + MODEL.parameters * bytes_per_parameter * 3 / 4 / LINK, rel=1e-9)


def test_tensor_parallel_ranks_reduce_their_slice() -> None:
    [undivided], [half] = (model_costs(units(data=2, zero=2, tensor=t)).gradient_reduce for t in (1, 2))
    assert half - LATENCY == pytest.approx((undivided - LATENCY) / 2, rel=1e-9)


def test_only_adapters_are_reduced_and_stepped_with_lora() -> None:
    costs = model_costs(units(data=2, zero=2, lora=8))
    adapters = MODEL.trained_parameters(8)
    assert costs.gradient_reduce[0] == pytest.approx(LATENCY + adapters * 4 / 2 / LINK, rel=1e-9)
    assert costs.optimizer_step[0] == pytest.approx(LAUNCH + 30 * adapters / 2 / MEMORY, rel=1e-9)


def test_experts_without_replicas_are_not_reduced() -> None:
    moe = models["mixtral-8x7b"]
    [time] = model_costs(units(moe, data=8, zero=2, expert=8)).gradient_reduce
    experts = sum(moe.expert_parameters(layer) for layer in range(moe.layers))
    assert time == pytest.approx(LATENCY + (moe.parameters - experts) * 4 * 7 / 8 / LINK, rel=1e-9)


def test_zero_divides_the_optimizer_step() -> None:
    [undivided], [divided] = (model_costs(units(data=4, zero=zero)).optimizer_step for zero in (0, 1))
    assert undivided == pytest.approx(LAUNCH + 30 * MODEL.parameters / MEMORY, rel=1e-9)
    assert divided == pytest.approx(LAUNCH + 30 * MODEL.parameters / 4 / MEMORY, rel=1e-9)


def chronos(name: str = "chronos") -> Schedule:
    return schedules[name](devices=2, micro_batches=8, chunks=2)


EQUAL_STAGES = StageCosts.of(stages=4, optimizer_step=1, gradient_reduce=1)


def step_tail(options: RunOptions, *, model: Model = MODEL, pipeline: int = 2) -> StepTail:
    return StepTail(model=model, cluster=cluster(), options=options, pipeline=pipeline)


def tail(schedule: Schedule | None = None, costs: StageCosts = EQUAL_STAGES, **options: int | str) -> float:
    model_tail = step_tail(RunOptions(**options))  # type: ignore[arg-type]
    return model_tail.after() if schedule is None else model_tail.of_schedule(schedule, costs)


def test_experts_of_one_rank_are_not_exchanged_in_the_tail() -> None:
    moe = models["mixtral-8x7b"]
    experts = sum(moe.expert_parameters(layer) for layer in range(moe.layers))
    dense = moe.parameters - experts
    seconds = step_tail(RunOptions(data=8, zero=1, expert=8), model=moe, pipeline=1).after()
    stepped = 30 * moe.parameters / 8 / MEMORY
    assert seconds == pytest.approx(LATENCY + (4 + 2) * dense * 7 / 8 / LINK + LAUNCH + stepped, rel=1e-9)


def test_gradients_reduced_by_the_program_are_not_in_the_tail() -> None:
    on_device = MODEL.parameters / 2
    gathered, stepped = 2 * on_device * 3 / 4 / LINK, 30 * on_device / 4 / MEMORY
    assert tail(chronos("chronos-zero2"), data=4, zero=2) == pytest.approx(LATENCY + gathered + LAUNCH + stepped)
    assert tail(chronos("chronos-zero2"), data=4) == pytest.approx(LAUNCH + 4 * stepped)


def test_a_schedule_without_g_reduces_gradients_in_the_tail() -> None:
    scattered = 4 * MODEL.parameters / 2 * 3 / 4 / LINK
    more = tail(chronos(), data=4, zero=1) - tail(chronos("chronos-zero2"), data=4, zero=1)
    assert more == pytest.approx(scattered, rel=1e-9)
    assert tail(chronos(), data=4, zero=1) == tail(data=4, zero=1)


@pytest.mark.parametrize("zero", [2, 3])
def test_divided_gradients_are_not_reduced_in_the_tail(zero: int) -> None:
    gathered = 2 * MODEL.parameters / 2 * 3 / 4 / LINK + LATENCY
    stepped = 30 * MODEL.parameters / 2 / 4 / MEMORY
    assert tail(data=4, zero=zero) == pytest.approx(LAUNCH + stepped + (gathered if zero == 2 else 0.0))


def test_stages_that_the_device_steps_are_in_the_tail() -> None:
    hosted = offload_states(chronos(), chunks=[1])
    assert tail(hosted) - LAUNCH == pytest.approx((tail(chronos()) - LAUNCH) / 2, rel=1e-9)


def test_the_step_of_a_larger_stage_takes_longer() -> None:
    hosted = offload_states(chronos(), chunks=[1])
    larger = StageCosts.of(stages=4, optimizer_step=[3, 1, 1, 1])
    assert tail(hosted, larger) - LAUNCH == pytest.approx(3 / 4 * (tail() - LAUNCH), rel=1e-9)


def test_a_program_that_steps_every_stage_has_no_tail() -> None:
    schedule = chronos()
    orders = tuple(
        (*order, *(Op(Kind.S, stage, 7) for stage in stages))
        for order, stages in zip(schedule.orders, schedule.placement.stages_of, strict=True)
    )
    assert tail(replace(schedule, orders=orders)) == 0


@pytest.mark.parametrize(("zero", "reduced"), [(2, True), (1, False)])
def test_chronos_reduces_in_the_program_if_that_frees_memory(zero: int, reduced: bool) -> None:
    planned = plan(
        models["llama-tiny"], Cluster.parse("4xA100-80GB"), micro_batches=4, planner="chronos", data=2, zero=zero,
        sequence_length=128, effort=0.2,
    )  # fmt: skip
    assert any(op.kind is Kind.G for op in planned.schedule.operations) == reduced
    assert all(time > 0 for time in planned.costs.gradient_reduce)
    assert tail_of(planned) > 0


def test_a_units_file_has_the_costs_of_the_step() -> None:
    model = units(data=2, zero=1)
    read = units_from_dict(units_to_dict(model))
    assert model_costs(read).gradient_reduce == pytest.approx(model_costs(model).gradient_reduce)
    assert model_costs(read).optimizer_step == pytest.approx(model_costs(model).optimizer_step)
    assert not read.reduces_inside


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (2, 4)])
def test_copies_for_rollback_take_memory_and_time(zero: int, shards: int) -> None:
    """The copies are the fp32 parameter and two moments, divided as the optimizer states."""
    plain, copying = (units(data=4, zero=zero, post_validation=choice) for choice in (False, True))
    more = sum(c.static - p.static for c, p in zip(copying.units, plain.units, strict=True))
    assert more == pytest.approx(12 * MODEL.parameters / shards, rel=1e-9)
    [step] = model_costs(copying).optimizer_step
    assert step == pytest.approx(LAUNCH + 54 * MODEL.parameters / shards / MEMORY, rel=1e-9)


def test_the_host_always_copies_the_states_that_it_steps() -> None:
    """The host reads and writes 12 bytes of states and 12 of copies, and moves gradient and parameter."""
    for plain, copying in zip(units().units, units(post_validation=True).units, strict=True):
        assert plain.on_host is not None
        assert plain.on_host == copying.on_host
        assert plain.on_host.step == pytest.approx(
            (2 * 12 + 2 * 12 + 4 + 2) * plain.on_host.parameters / 2 / HOST_MEMORY_BANDWIDTH
        )


def test_a_profile_keeps_copies_and_sharded_states() -> None:
    measured = {"model": dict(MODEL.config), "dtype": "bf16", "sequence_length": 4096, "micro_batch_size": 1, "lora": 0,
                "device": "cpu"}  # fmt: skip
    profile = {"measured": measured, **units_to_dict(units())}
    options = RunOptions(data=4, zero=1, post_validation=True)
    planned = model_units(MODEL, cluster(), options)
    profiled = with_profile(planned, profile, model=MODEL, options=options)
    assert [unit.static for unit in profiled.units] == [unit.static for unit in planned.units]


@pytest.mark.parametrize("validated_after", [False, True])
def test_a_post_validated_step_takes_the_span(validated_after: bool) -> None:
    options = RunOptions(post_validation=validated_after)
    timeline = simulate(schedules["zb-h2"](devices=4, micro_batches=8), StageCosts.of(stages=4))
    assert (timeline.makespan, timeline.span) == (27, 24)
    assert pipeline_time(timeline, options) == (24 if validated_after else 27)


def test_hosts_step_their_share_of_the_states() -> None:
    parameters = MODEL.parameters / 4 / 2

    def tail(share: float) -> float:
        options = RunOptions(data=2, zero=1, host_optimizer=share)
        return step_tail(options, pipeline=4).after()

    on_devices, half, full = map(tail, (0.0, 0.5, 1.0))
    assert full - half == pytest.approx(30 * parameters / 2 / HOST_MEMORY_BANDWIDTH, rel=1e-9)
    assert half > on_devices


def test_host_states_take_no_device_memory() -> None:
    on_device, half = (units(data=2, zero=1, host_optimizer=share) for share in (0, 0.5))

    first, second = on_device.units[1], half.units[1]
    assert first.states is not None
    assert first.static - second.static == pytest.approx(first.states.optimizer / 2)
    assert second.on_host is None
