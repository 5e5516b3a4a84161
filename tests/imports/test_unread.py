"""Entries that the importers do not read: known to be free, or reported as not predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from debubble import models
from debubble.imports import imports
from debubble.imports.harmless import is_harmless
from tests.support import imported_jobs

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
def test_costly_entries_are_not_listed_as_free(framework: str) -> None:
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
def test_harmless_entries_are_free(framework: str, name: str, value: Any) -> None:
    assert is_harmless(name, value, imports[framework].harmless)


@pytest.mark.parametrize("name", ["--overlap-grad-reduce", "--ddp-bucket-size", "reshard_after_forward"])
def test_disabling_a_costly_entry_is_not_harmless(name: str) -> None:
    assert not is_harmless(name, False, imports["megatron"].harmless)


TITAN: dict[str, Any] = {
    "model": {"name": "llama3", "flavor": "8B"}, "training": {"local_batch_size": 4, "seq_len": 2048},
    "activation_checkpoint": {"mode": "none"},
}  # fmt: skip
DEEPSPEED: dict[str, Any] = {
    "bf16": {"enabled": True},
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
}


def unread(framework: str, config: dict[str, Any], folder: Path, **overrides: Any) -> tuple[str, ...]:
    facts = {"model": models["llama3-8b"], "sequence_length": 2048, "cluster": "8xA100-80GB", **overrides}
    return tuple(imported_jobs.job(framework, folder, "job.json", json.dumps(config), **facts).rest.sentences())


@pytest.mark.parametrize("section", ["float8", "mx", "compile", "comm", "parallelism", "training", "mine"])
def test_unknown_torchtitan_entries_are_reported(section: str, tmp_path: Path) -> None:
    remarks = unread("torchtitan", {**TITAN, section: {**TITAN.get(section, {}), "zork": 7}}, tmp_path)

    assert f"Not known to torchtitan, and not in the prediction: {section}.zork." in remarks


def test_typo_in_a_harmless_section_is_reported(tmp_path: Path) -> None:
    job = imported_jobs.job(
        "torchtitan", tmp_path, "job.json", json.dumps({**TITAN, "checkpoint": {"enable_checkpiont": True}}),
        cluster="8xA100-80GB",
    )  # fmt: skip

    assert "checkpoint.enable_checkpiont (did you mean checkpoint.enable_checkpoint?)" in job.rest.warnings[0]


def test_entries_of_float8_cost_nothing_without_it(tmp_path: Path) -> None:
    remarks = unread("torchtitan", {**TITAN, "float8": {"recipe_name": "rowwise"}}, tmp_path)

    assert "Known to cost neither time nor memory: float8.recipe_name." in remarks


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ({"zork": 7}, "zork"),
        ({"zero_optimization": {"stage": 1, "zork": 7}}, "zero_optimization.zork"),
    ],
)
def test_unknown_deepspeed_entries_are_reported(entry: dict[str, Any], name: str, tmp_path: Path) -> None:
    remarks = unread("deepspeed", {**DEEPSPEED, **entry}, tmp_path)

    assert f"Not known to DeepSpeed, and not in the prediction: {name}." in remarks


@pytest.mark.parametrize(
    "entry",
    [
        {"aio": {"block_size": 7}},
        {"zero_optimization": {"zenflow": {"topk_ratio": 0.2}}},
        {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    ],
)
def test_entries_that_deepspeed_has_are_not_called_unknown(entry: dict[str, Any], tmp_path: Path) -> None:
    remarks = unread("deepspeed", {**DEEPSPEED, **entry}, tmp_path)

    assert not any(sentence.startswith("Not known") for sentence in remarks)


def test_an_argument_of_the_trainer_is_no_entry(tmp_path: Path) -> None:
    remarks = unread("deepspeed", DEEPSPEED, tmp_path, args="--neftune_noise_alpha 5")

    assert "Not in the prediction: --neftune_noise_alpha." in remarks


def test_the_head_line_counts_entries_of_the_file_alone(tmp_path: Path) -> None:
    read = imported_jobs.job(
        "deepspeed", tmp_path, "job.json", json.dumps(DEEPSPEED), model=models["llama3-8b"], sequence_length=2048,
        cluster="8xA100-80GB",
    )  # fmt: skip

    assert read.left_out == "2 remarks below"
