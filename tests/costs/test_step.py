"""What summing gradients and the optimizer cost: inside the program where it does them, else behind it."""

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
    """Every byte at a round number of bytes per second, all devices in one node."""
    rates = {"link_latency": LATENCY, "link_bandwidth": LINK, "memory_bandwidth": MEMORY}
    efficiency = {"link": 1.0, "memory": 1.0, "launch": LAUNCH}
    return Cluster.from_dict({"devices": f"{devices}xA100-80GB", **rates, "efficiency": efficiency})


def units(model: Model = MODEL, **options: float) -> Units:
    return model_units(model, cluster(), RunOptions(**options))  # type: ignore[arg-type]


def whole_model(made: Units) -> StageCosts:
    """The model as one stage."""
    everything = [[(i, "none") for i in range(len(made.units))]]
    return made.stage_costs(everything, Placement.linear(1))


@pytest.mark.parametrize(
    ("zero", "bytes_per_parameter"), [(0, 2 * 4), (1, 4), (2, 4)], ids=["all-reduce", "ZeRO-1", "ZeRO-2"]
)
def test_gradients_are_summed_over_a_ring_of_the_replicas(zero: int, bytes_per_parameter: int) -> None:
    [time] = whole_model(units(data=4, zero=zero)).gradient_reduce
    assert time == pytest.approx(LATENCY + MODEL.parameters * bytes_per_parameter * 3 / 4 / LINK, rel=1e-9)


def test_tensor_parallel_ranks_sum_their_part_alone() -> None:
    [whole], [half] = (whole_model(units(data=2, zero=2, tensor=t)).gradient_reduce for t in (1, 2))
    assert half - LATENCY == pytest.approx((whole - LATENCY) / 2, rel=1e-9)


def test_adapters_alone_are_summed_and_stepped_with_lora() -> None:
    costs = whole_model(units(data=2, zero=2, lora=8))
    adapters = MODEL.trained_parameters(8)
    assert costs.gradient_reduce[0] == pytest.approx(LATENCY + adapters * 4 / 2 / LINK, rel=1e-9)
    assert costs.optimizer_step[0] == pytest.approx(LAUNCH + 30 * adapters / 2 / MEMORY, rel=1e-9)


def test_experts_that_no_other_rank_has_are_not_summed() -> None:
    moe = models["mixtral-8x7b"]
    [time] = whole_model(units(moe, data=8, zero=2, expert=8)).gradient_reduce
    experts = sum(moe.expert_parameters(layer) for layer in range(moe.layers))
    assert time == pytest.approx(LATENCY + (moe.parameters - experts) * 4 * 7 / 8 / LINK, rel=1e-9)


def test_zero_divides_the_optimizer_step() -> None:
    [whole], [divided] = (whole_model(units(data=4, zero=zero)).optimizer_step for zero in (0, 1))
    assert whole == pytest.approx(LAUNCH + 30 * MODEL.parameters / MEMORY, rel=1e-9)
    assert divided == pytest.approx(LAUNCH + 30 * MODEL.parameters / 4 / MEMORY, rel=1e-9)


def chronos(name: str = "chronos") -> Schedule:
    return schedules[name](devices=2, micro_batches=8, chunks=2)


ALIKE = StageCosts.of(stages=4, optimizer_step=1, gradient_reduce=1)


def step_tail(options: RunOptions, *, model: Model = MODEL, pipeline: int = 2) -> StepTail:
    return StepTail(model=model, cluster=cluster(), options=options, pipeline=pipeline)


def tail(schedule: Schedule | None = None, costs: StageCosts = ALIKE, **options: int | str) -> float:
    whole = step_tail(RunOptions(**options))  # type: ignore[arg-type]
    return whole.after() if schedule is None else whole.of_schedule(schedule, costs)


def test_experts_of_one_rank_are_not_exchanged_in_the_tail() -> None:
    moe = models["mixtral-8x7b"]
    experts = sum(moe.expert_parameters(layer) for layer in range(moe.layers))
    dense = moe.parameters - experts
    seconds = step_tail(RunOptions(data=8, zero=1, expert=8), model=moe, pipeline=1).after()
    stepped = 30 * moe.parameters / 8 / MEMORY
    assert seconds == pytest.approx(LATENCY + (4 + 2) * dense * 7 / 8 / LINK + LAUNCH + stepped, rel=1e-9)


def test_gradients_that_the_program_sums_are_not_in_the_tail() -> None:
    on_device = MODEL.parameters / 2
    gathered, stepped = 2 * on_device * 3 / 4 / LINK, 30 * on_device / 4 / MEMORY
    assert tail(chronos("chronos-zero2"), data=4, zero=2) == pytest.approx(LATENCY + gathered + LAUNCH + stepped)
    assert tail(chronos("chronos-zero2"), data=4) == pytest.approx(LAUNCH + 4 * stepped)


def test_a_schedule_without_g_sums_all_in_the_tail() -> None:
    scattered = 4 * MODEL.parameters / 2 * 3 / 4 / LINK
    more = tail(chronos(), data=4, zero=1) - tail(chronos("chronos-zero2"), data=4, zero=1)
    assert more == pytest.approx(scattered, rel=1e-9)
    assert tail(chronos(), data=4, zero=1) == tail(data=4, zero=1)


@pytest.mark.parametrize("zero", [2, 3])
def test_divided_gradients_are_summed_after_every_backward_not_in_the_tail(zero: int) -> None:
    gathered = 2 * MODEL.parameters / 2 * 3 / 4 / LINK + LATENCY
    stepped = 30 * MODEL.parameters / 2 / 4 / MEMORY
    assert tail(data=4, zero=zero) == pytest.approx(LAUNCH + stepped + (gathered if zero == 2 else 0.0))


def test_stages_that_the_device_steps_are_in_the_tail() -> None:
    hosted = offload_states(chronos(), chunks=[1])
    assert tail(hosted) - LAUNCH == pytest.approx((tail(chronos()) - LAUNCH) / 2, rel=1e-9)


def test_the_step_of_a_larger_stage_takes_more_of_the_tail() -> None:
    hosted = offload_states(chronos(), chunks=[1])
    larger = StageCosts.of(stages=4, optimizer_step=[3, 1, 1, 1])
    assert tail(hosted, larger) - LAUNCH == pytest.approx(3 / 4 * (tail() - LAUNCH), rel=1e-9)


def test_a_step_of_every_stage_inside_the_program_leaves_no_tail() -> None:
    made = chronos()
    orders = tuple(
        (*order, *(Op(Kind.S, stage, 7) for stage in held))
        for order, held in zip(made.orders, made.placement.stages_of, strict=True)
    )
    assert tail(replace(made, orders=orders)) == 0


@pytest.mark.parametrize(("zero", "summed"), [(2, True), (1, False)])
def test_chronos_sums_inside_the_step_where_that_makes_room(zero: int, summed: bool) -> None:
    made = plan(
        models["llama-tiny"], Cluster.parse("4xA100-80GB"), micro_batches=4, planner="chronos", data=2, zero=zero,
        sequence_length=128, effort=0.2,
    )  # fmt: skip
    assert any(op.kind is Kind.G for op in made.schedule.operations) == summed
    assert all(time > 0 for time in made.costs.gradient_reduce)
    assert tail_of(made) > 0


def test_a_units_file_keeps_what_the_step_costs() -> None:
    made = units(data=2, zero=1)
    read = units_from_dict(units_to_dict(made))
    assert whole_model(read).gradient_reduce == pytest.approx(whole_model(made).gradient_reduce)
    assert whole_model(read).optimizer_step == pytest.approx(whole_model(made).optimizer_step)
    assert not read.reduces_inside


@pytest.mark.parametrize(("zero", "shards"), [(0, 1), (2, 4)])
def test_copies_that_take_updates_back_are_planned_for(zero: int, shards: int) -> None:
    """The fp32 parameter and two moments, where the optimizer's states are."""
    plain, copying = (units(data=4, zero=zero, post_validation=choice) for choice in (False, True))
    more = sum(c.static - p.static for c, p in zip(copying.units, plain.units, strict=True))
    assert more == pytest.approx(12 * MODEL.parameters / shards, rel=1e-9)
    [step] = whole_model(copying).optimizer_step
    assert step == pytest.approx(LAUNCH + 54 * MODEL.parameters / shards / MEMORY, rel=1e-9)


def test_the_host_copies_what_it_steps_whatever_the_devices_do() -> None:
    """It reads and writes the 12 bytes of states and those of their copies, and moves gradient and parameter."""
    for plain, copying in zip(units().units, units(post_validation=True).units, strict=True):
        assert plain.on_host is not None
        assert plain.on_host == copying.on_host
        assert plain.on_host.step == pytest.approx(
            (2 * 12 + 2 * 12 + 4 + 2) * plain.on_host.parameters / 2 / HOST_MEMORY_BANDWIDTH
        )


def test_a_profile_leaves_the_copies_and_the_sharded_states_counted() -> None:
    measured = {"model": dict(MODEL.config), "dtype": "bf16", "sequence_length": 4096, "micro_batch_size": 1, "lora": 0,
                "device": "cpu"}  # fmt: skip
    profile = {"measured": measured, **units_to_dict(units())}
    options = RunOptions(data=4, zero=1, post_validation=True)
    planned = model_units(MODEL, cluster(), options)
    taken = with_profile(planned, profile, model=MODEL, options=options)
    assert [unit.static for unit in taken.units] == [unit.static for unit in planned.units]


@pytest.mark.parametrize("validated_after", [False, True])
def test_a_post_validated_step_takes_the_span(validated_after: bool) -> None:
    options = RunOptions(post_validation=validated_after)
    timeline = simulate(schedules["zb-h2"](devices=4, micro_batches=8), StageCosts.of(stages=4))
    assert (timeline.makespan, timeline.span) == (27, 24)
    assert pipeline_time(timeline, options) == (24 if validated_after else 27)


def test_hosts_step_their_share_of_the_states_beside_the_devices() -> None:
    own = MODEL.parameters / 4 / 2

    def tail(share: float) -> float:
        options = RunOptions(data=2, zero=1, host_optimizer=share)
        return step_tail(options, pipeline=4).after()

    on_devices, half, whole = map(tail, (0.0, 0.5, 1.0))
    assert whole - half == pytest.approx(30 * own / 2 / HOST_MEMORY_BANDWIDTH, rel=1e-9)
    assert half > on_devices


def test_states_of_hosts_take_no_memory_of_devices() -> None:
    whole, half = (units(data=2, zero=1, host_optimizer=share) for share in (0, 0.5))

    first, second = whole.units[1], half.units[1]
    assert first.states is not None
    assert first.static - second.static == pytest.approx(first.states.optimizer / 2)
    assert second.on_host is None
