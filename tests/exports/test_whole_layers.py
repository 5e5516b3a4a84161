from __future__ import annotations

from dataclasses import replace

import pytest

import debubble as db
from debubble.costs import Cluster, model_units
from debubble.exports import exports
from debubble.exports.prices import to_whole_layers
from debubble.ir import ExportError, RunOptions
from debubble.models import Model
from debubble.plans import ModelOnCluster, Plan
from tests.exports.hand_plans import LLAMA


def plan(first_stage: int, *, memory_limit: float | None = None) -> Plan:
    """Two devices under 1F1B; the first has this many of the ten units (embedding, eight half-layers, head)."""
    model, cluster = Model.from_hf(LLAMA), Cluster.parse("2xA100-80GB")
    units = model_units(model, cluster, RunOptions(), pipeline=2)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4)
    partition = [[(i, "none") for i in range(first_stage)], [(i, "none") for i in range(first_stage, 10)]]
    return Plan(
        planner="hand",
        schedule=schedule,
        costs=units.stage_costs(partition, schedule.placement).with_limit(memory_limit),
        lower_bound=0,
        partition=units.planned(partition),
        model_on_cluster=ModelOnCluster(model, cluster),
    )


def test_layer_shared_by_two_stages_moves_to_one() -> None:
    """The first stage has two and a half layers; the head makes the second stage the slower one."""
    made = exports["megatron"](plan(6))

    assert "--pipeline-model-parallel-layout 'Et*3|tL'" in made.files["megatron-arguments.sh"]
    assert made.losses[0].startswith("One stage ends within a layer; with whole layers the step is predicted to take ")


def test_shared_layer_moves_to_the_faster_side() -> None:
    shared = plan(6)
    moved, _ = to_whole_layers(shared)

    assert moved.simulate().makespan == min(plan(n).simulate().makespan for n in (5, 7))
    assert len(moved.partition[0]) in (5, 7)
    assert to_whole_layers(plan(5)) == (plan(5), ())


def test_shared_layer_never_moves_beyond_memory() -> None:
    """Device 0 has two micro-batches in flight and memory for two and a half layers, but not for three."""
    limit = float(max(plan(6).simulate().peak_memory))
    assert max(plan(5).simulate().peak_memory) <= limit < max(plan(7).simulate().peak_memory)

    moved, _ = to_whole_layers(plan(6, memory_limit=limit))

    assert len(to_whole_layers(plan(6))[0].partition[0]) == 7
    assert len(moved.partition[0]) == 5


def test_measured_costs_are_not_repartitioned_by_computed_ones() -> None:
    shared = plan(6)
    measured = replace(shared, costs=shared.costs.replace(forward=[1.0, 2.0]))

    with pytest.raises(ExportError, match="Stage 0 holds only the attention half of layer 2"):
        exports["megatron"](measured)
