"""Entries that nobody asked for: known to cost nothing, or not in the prediction."""

from __future__ import annotations

from typing import Any

import pytest

from debubble.imports import imports
from debubble.imports.harmless import is_harmless

COSTLY = (
    "--recompute-modules", "--overlap-param-gather", "--use-checkpoint-args", "--moe-enable-deepep",
    "--fp8-param-gather", "--heterogeneous-layers-config-path", "--checkpoint-in-cpu", "--mtp-num-layers",
    "--data-parallel-sharding-strategy", "--tp-comm-overlap", "--cuda-graph-scope", "--rampup-batch-size",
    "--hidden-dropout", "--muon-num-ns-steps", "training.enable_cpu_offload",
    "parallelism.enable_async_tensor_parallel", "compile.enable", "float8.recipe_name", "model.converters",
    "fp8.enabled", "model.backend.dispatcher", "distributed.offload_policy", "peft.use_dora",
    "packed_sequence.packed_sequence_size", "zero_optimization.offload_optimizer.device",
    "bf16.immediate_grad_update", "activation_checkpointing.partition_activations", "swap_config.swap",
    "moe_config.capacity_factor", "unheard_of",
)  # fmt: skip


@pytest.mark.parametrize("framework", list(imports))
def test_nothing_that_may_cost_is_taken_to_be_free(framework: str) -> None:
    assert [name for name in COSTLY if is_harmless(name, "x", imports[framework].harmless)] == []


@pytest.mark.parametrize(
    ("framework", "name", "value"),
    [
        ("megatron", "--lr-decay-iters", "100"),
        ("megatron", "--node_rank", "$RANK"),
        ("megatron", "--hidden-dropout", "0.0"),
        ("megatron", "logger.log_interval", "1"),
        ("primus", "--adam-beta2", "0.95"),
        ("torchtitan", "metrics.log_freq", 1),
        ("torchtitan", "float8.enable", False),
        ("automodel", "optimizer.lr", 1e-5),
        ("deepspeed", "optimizer.params.betas", [0.9, 0.95]),
        ("mindformers", "callbacks", []),
    ],
)
def test_what_is_known_to_cost_nothing_is_free(framework: str, name: str, value: Any) -> None:
    assert is_harmless(name, value, imports[framework].harmless)


@pytest.mark.parametrize("name", ["--overlap-grad-reduce", "--ddp-bucket-size", "reshard_after_forward"])
def test_off_is_a_choice_where_it_costs_something(name: str) -> None:
    assert not is_harmless(name, False, imports["megatron"].harmless)
