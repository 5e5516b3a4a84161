"""Host memory limits offloaded activations and the optimizer states that hosts step."""

from __future__ import annotations

from typing import Any

import pytest

import debubble as db
from debubble.costs import Unit, Units, model_units
from debubble.costs.host_memory import check_host_memory, host_peaks, states_on_host
from debubble.costs.partition import Partition
from debubble.costs.unit import HostStates, StateBytes, Strategy
from debubble.errors import HostMemoryError
from debubble.ir import InfeasibleError, Op, Placement, RunOptions, Schedule
from debubble.planners.problem import closest


def units(**entries: Any) -> Units:
    """Four units with 10 bytes of activation and 100 bytes of optimizer states that the host may take."""
    one = Unit(
        type="dense", layer=None, forward=1, backward_input=1, backward_weight=1, static=200,
        strategies={"none": Strategy(10)}, states=StateBytes(weights=40, gradients=60, optimizer=100),
        on_host=HostStates(static=100, gradients=30, parameters=20, step=1),
    )  # fmt: skip
    return Units(units=(one,) * 4, offload_bandwidth=10, **entries)


def timeline(model: Units, orders: list[str]) -> tuple[Partition, db.Timeline]:
    partition = Partition.cut(model, [2, 2])
    placement = Placement.linear(2)
    schedule = Schedule.of("by hand", placement, 2, [[Op.parse(name) for name in order.split()] for order in orders])
    return partition, db.simulate(schedule, model.stage_costs(partition, placement, on_host=schedule.host_steps))


OFFLOADING = ["0F0 0O0 0F1 0O1 0L0 0B0 0L1 0B1", "1F0 1B0 1F1 1B1"]


def test_activations_are_on_the_host_from_offload_to_reload() -> None:
    partition, run = timeline(units(), OFFLOADING)

    assert host_peaks(units(), partition, run) == [40, 0]


def test_states_of_hosted_stages_are_on_the_host_throughout() -> None:
    partition, run = timeline(units(), ["0F0 0F1 0B0 0B1 0D0 0S0 0P0", "1F0 1B0 1F1 1B1"])

    assert host_peaks(units(), partition, run) == [2 * (100 + 30 + 20), 0]


def test_states_of_host_optimizers_are_on_the_host_throughout() -> None:
    """An fp32 master copy, two moments and a gradient per parameter are divided over two replicas."""
    model, options = db.models["llama-tiny"], RunOptions(host_optimizer=1.0, zero=1, data=2, sequence_length=64)
    hosted = model_units(model, db.Cluster.parse("2xA100-80GB"), options, pipeline=1)
    schedule = db.schedules["1f1b"](devices=1, micro_batches=2)
    partition = Partition.cut(hosted, [len(hosted.units)])
    run = db.simulate(schedule, hosted.stage_costs(partition, schedule.placement))

    assert host_peaks(hosted, partition, run) == [pytest.approx((4 + 8 + 4) * model.parameters / 2)]


@pytest.mark.parametrize(("zero", "device", "host"), [(1, 2 + 4, (12 + 4 + 2) / 2), (3, (2 + 4) / 2, (8 + 4 + 4) / 2)])
def test_a_device_keeps_the_weights_of_a_hosted_stage(zero: int, device: float, host: float) -> None:
    """ZeRO-3 divides fp32 weights, which stay on a host that steps them; the device has them in bf16."""
    model, options = db.models["llama-tiny"], RunOptions(zero=zero, data=2, sequence_length=64)
    unit = model_units(model, db.Cluster.parse("2xA100-80GB"), options, pipeline=1).units[1]
    assert unit.on_host is not None

    count = model.attention_parameters(0)
    assert (unit.on_host.static, states_on_host([unit])) == pytest.approx((count * device, count * host))


def test_a_host_that_is_too_small_reports_the_missing_bytes() -> None:
    partition, run = timeline(units(), OFFLOADING)
    check_host_memory(units(host_memory=40), partition, run)

    with pytest.raises(InfeasibleError, match="Device 0 needs 40 of its host's memory, which has 39 for it") as refusal:
        check_host_memory(units(host_memory=39), partition, run)
    assert refusal.value.missing == 1


@pytest.mark.slow
def test_plans_that_exceed_host_memory_are_refused() -> None:
    cluster = {"devices": "4xA100-80GB", "memory_limit": "8GiB"}
    options: dict[str, Any] = {"micro_batches": 8, "sequence_length": 4096, "planner": "chronos", "effort": 0.1}
    model = db.models["llama3.2-1b"]
    db.plan(model, db.Cluster.from_dict(cluster), **options)

    with pytest.raises(InfeasibleError, match="of its host's memory, which has"):
        db.plan(model, db.Cluster.from_dict({**cluster, "host_memory": "1GiB"}), **options)


def test_missing_host_memory_is_the_reported_reason() -> None:
    device, host = InfeasibleError("of the device", missing=1), HostMemoryError("of the host", missing=2)

    assert closest([device, host]) is host
