"""Activation memory of the runtime matches the plan for any recomputation."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs import model_units
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import RunOptions
from debubble.models import ModelConfig
from debubble.plans import Plan
from tests.support.model_cases import on_cpus
from tests.support.runtime_cases import peaks_of, run_threads, slow_unless, tokens_of
from tests.support.schedule_cases import explicit, fused
from tests.support.tiny_models import GEMMA2, GEMMA3, GPT2, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE

SIZES = {"hidden_size": 256, "intermediate_size": 352, "num_hidden_layers": 2, "vocab_size": 256}
FAMILIES = {
    "llama": {**LLAMA, **SIZES},
    "qwen3": {**QWEN3, **SIZES, "head_dim": 64},
    "gemma2": {**GEMMA2, **SIZES, "head_dim": 64},
    "gemma3": {**GEMMA3, **SIZES, "head_dim": 64, "layer_types": GEMMA3["layer_types"][1:3]},
    "mixtral": {**MIXTRAL, **SIZES},
    "qwen3-moe": {**QWEN3_MOE, **SIZES, "head_dim": 64, "moe_intermediate_size": 120},
    "gpt2": {
        **GPT2, "n_embd": 256, "n_layer": 2, "vocab_size": 256,
        "attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1,
    },
}  # fmt: skip
ROWS, LENGTH, MICRO_BATCHES = 4, 32, 4
RUN = RunOptions(dtype="fp32", sequence_length=LENGTH, micro_batch_size=ROWS)


def activations_of(config: Any, run: RunOptions = RUN) -> Units:
    """Units without the bytes that are not counted as activations."""
    units = model_units(ModelConfig.from_hf(config), db.Cluster.parse("2xCPU"), run)
    bare = tuple(replace(unit, workspace=0, static=0) for unit in units.units)
    return replace(units, units=bare, memory_limit=None)


@st.composite
def plans(draw: Any, config: Any) -> Any:
    """Plans for two devices with any cut and any recomputation of every unit."""
    units = activations_of(config)
    schedule = db.schedules[draw(st.sampled_from(["1f1b", "gpipe", "interleaved"]))](
        devices=2, micro_batches=MICRO_BATCHES
    )
    cuts = st.sets(st.integers(2, len(units.units) - 1), min_size=schedule.stages - 1, max_size=schedule.stages - 1)
    # Half of the units recompute in full, so that both halves of a layer often do.
    names = [draw(st.one_of(st.just("full"), st.sampled_from(sorted(unit.strategies)))) for unit in units.units]
    known = [name if name in unit.strategies else "none" for unit, name in zip(units.units, names, strict=True)]
    ways = [*enumerate(known)]
    partition = Partition(ways[a:b] for a, b in pairwise((0, *sorted(draw(cuts)), len(ways))))
    schedule = draw(st.sampled_from([fused, explicit]))(schedule)
    return Plan(
        planner="test", schedule=schedule, costs=units.stage_costs(partition, schedule.placement), lower_bound=0,
        partition=units.planned(partition), model_on_cluster=on_cpus(config), options=RUN,
    )  # fmt: skip


@pytest.mark.parametrize("family", slow_unless(FAMILIES, "qwen3-moe", "gpt2"))
def test_counted_activation_peak_matches_the_prediction(family: str) -> None:
    """Within 1%: numbers per token, such as scales of norms, matter most in a narrow layer."""
    config = FAMILIES[family]

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(plans(config))
    def check(plan: Plan) -> None:
        predicted = [float(size) for size in plan.simulate().peak_memory]
        actual = peaks_of(plan, tokens_of(config, rows=MICRO_BATCHES * ROWS, length=LENGTH))
        assert actual == pytest.approx(predicted, rel=0.01)

    check()


def divided(family: str, strategy: str, slices: int, *, more: float = 1.0) -> Plan:
    """Half of the model on each of two devices; units recompute by the strategy if they have it."""
    run = replace(RUN, slices=slices)
    units = activations_of(FAMILIES[family], run)
    entries: dict[str, Any] = {"slices": slices} if slices > 1 else {}
    schedule = db.schedules["seq1f1b" if entries else "1f1b"](devices=2, micro_batches=MICRO_BATCHES, **entries)
    ways = [*enumerate(strategy if strategy in unit.strategies else "none" for unit in units.units)]
    partition = Partition([ways[: len(ways) // 2], ways[len(ways) // 2 :]])
    costs = units.stage_costs(partition, schedule.placement)
    names = "activation", "activation_recomputed", "recompute_workspace"
    larger = {name: [more * size for size in sizes] for name in names if (sizes := getattr(costs, name)) is not None}
    return Plan(
        planner="test", schedule=fused(schedule), costs=costs.replace(**larger), lower_bound=0,
        partition=units.planned(partition), model_on_cluster=on_cpus(FAMILIES[family]), options=run,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "strategy", "slices"), [("llama", "projections", 4), ("gpt2", "full", 2), ("qwen3", "core", 2)]
)
def test_slices_keep_at_most_the_predicted_bytes(family: str, strategy: str, slices: int) -> None:
    """Plans count the gradients of keys and values of a full stage, which arrive layer by layer."""
    plan = divided(family, strategy, slices)

    actual = peaks_of(plan, tokens_of(plan.model, rows=MICRO_BATCHES * ROWS, length=LENGTH))
    gradients = (slices - 1) * max(plan.costs.key_value_gradient)
    for measured, predicted in zip(actual, plan.simulate().peak_memory, strict=True):
        assert 0.99 * (predicted - gradients) <= measured <= 1.01 * predicted


@pytest.mark.parametrize(
    ("family", "strategy", "slices"),
    [("llama", "core", 2), ("gpt2", "full", 1), ("gemma2", "none", 1), ("mixtral", "full", 2), ("qwen3", "core", 1)],
)
def test_an_arena_with_a_percent_more_is_large_enough(family: str, strategy: str, slices: int) -> None:
    plan = divided(family, strategy, slices, more=1.01)

    def fits(pipeline: Any) -> Any:
        pipeline.step(tokens_of(plan.model, rows=MICRO_BATCHES * ROWS, length=LENGTH))
        return pipeline.measured.peak_activation <= pipeline.measured.activations.arena.size

    assert run_threads(plan, fits, arena=True) == [True, True]
