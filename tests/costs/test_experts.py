"""Costs of mixtures of experts: permutation, dispatch and grouped matrix products."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from debubble.costs import MEGATRON, Cluster, Framework
from debubble.costs.analytical.half_layers import DEEPEP_EFFICIENCY, mlp
from debubble.costs.analytical.operators import TENSOR_OVERLAP_SLOWDOWN, Operator, Shapes, collectives
from debubble.costs.devices.speed import Speed
from debubble.ir import RunOptions
from debubble.models import models
from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig

MIXTRAL = models["mixtral-8x7b"]
LENGTH = 4096
SIZE = 2 * LENGTH * MIXTRAL.hidden
"""Bytes of a micro-batch's tokens."""


def shapes(cluster: str, *, framework: Framework = MEGATRON, model: ModelConfig = MIXTRAL, **options: Any) -> Shapes:
    speed = Speed.from_hardware(Cluster.parse(cluster).slowest, "bf16")
    return Shapes(
        model=model, options=RunOptions(sequence_length=LENGTH, **options), framework=framework, speed=speed
    )  # fmt: skip


def dispatch(inputs: Shapes) -> Operator:
    return next(op for op in mlp(inputs, 0) if op.name == "dispatch")


def sorting(inputs: Shapes) -> float:
    """Seconds of sorting tokens into copies for two experts each, and back."""
    hw = inputs.speed.hardware
    return 2 * (hw.efficiency.launch + 3 * SIZE / inputs.options.tensor / (hw.memory_bandwidth * hw.efficiency.permute))


def test_experts_on_one_device_only_sort_their_tokens() -> None:
    single = shapes("8xH100-80GB")
    assert dispatch(single).forward == pytest.approx(sorting(single), rel=1e-12)


def test_dispatch_within_a_node_takes_its_links_or_is_hidden() -> None:
    alongside = shapes("8xH100-80GB", data=8, expert=8)
    hw = alongside.speed.hardware
    travel = hw.link_latency + 2 * SIZE * 7 / 8 / (hw.link_bandwidth * hw.efficiency.link)
    assert dispatch(alongside).forward == pytest.approx(sorting(alongside) + 2 * travel, rel=1e-12)
    hidden = shapes("8xH100-80GB", data=8, expert=8, framework=replace(MEGATRON, dispatch_overlap=True))
    assert dispatch(hidden).forward == pytest.approx(sorting(hidden), rel=1e-12)


def test_dispatch_to_other_nodes_takes_one_network_card() -> None:
    across = shapes("16xA10G", data=16, expert=8)
    two_nodes = replace(
        across, speed=Speed(replace(across.speed.hardware, devices_per_node=4, link_bandwidth=1e15), 2)
    )  # fmt: skip
    hw = two_nodes.speed.hardware
    travel = hw.network_latency + 2 * SIZE / 2 / (hw.network_bandwidth * hw.efficiency.network)
    assert dispatch(two_nodes).forward == pytest.approx(sorting(two_nodes) + 2 * travel, rel=1e-9)


def test_deduplicated_tokens_reach_a_node_once() -> None:
    once = shapes("16xA10G", data=16, expert=8, framework=replace(MEGATRON, dispatches_once=True))
    two_nodes = replace(once, speed=Speed(replace(once.speed.hardware, devices_per_node=4, link_bandwidth=1e15), 2))
    hw = two_nodes.speed.hardware
    nodes = 2 * (1 - (1 - 1 / 2) ** 2)
    travel = hw.network_latency + SIZE * nodes / 2 / (hw.network_bandwidth * DEEPEP_EFFICIENCY)
    assert dispatch(two_nodes).forward == pytest.approx(sorting(two_nodes) + 2 * travel, rel=1e-9)


def test_group_limited_routing_reaches_fewer_nodes() -> None:
    assert isinstance(experts := models["deepseek-v3"].per_layer[-1].mlp, Experts)
    assert experts.reach == 0.5


def test_experts_are_grouped_matrix_products() -> None:
    inputs = shapes("8xH100-80GB")
    up = next(op for op in mlp(inputs, 0) if op.name == "mlp")
    tokens, columns = 2 * LENGTH / 8, 2 * 14336
    assert up.forward == inputs.speed.matmul(tokens, 4096, columns, count=8)
    gradients = inputs.speed.matmul(4096, tokens, columns, count=8, added=2 * 4 * 8 * 4096 * columns)
    assert up.backward_weight == pytest.approx(gradients / inputs.speed.hardware.efficiency.grouped_weight)


def test_undivided_experts_get_tokens_without_a_gather() -> None:
    divided, undivided = (shapes("8xH100-80GB", tensor=4, expert_tensor=shards) for shards in (None, 1))
    gathered = divided.speed.gather(2 * SIZE, 4, alongside=4)
    assert dispatch(divided).forward == pytest.approx(sorting(divided) + 2 * gathered, rel=1e-12)
    assert dispatch(undivided).forward == pytest.approx(sorting(undivided), rel=1e-12)


def test_overlapped_collectives_are_exposed_in_part() -> None:
    exposed = shapes("8xH100-80GB", tensor=4)
    hidden = replace(exposed, framework=replace(MEGATRON, tensor_overlap=True))
    slowdown = TENSOR_OVERLAP_SLOWDOWN * 3 / 4
    assert collectives(hidden).forward == pytest.approx(collectives(exposed).forward * (1 / 4 + slowdown))
