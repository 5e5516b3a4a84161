"""Import of DeepSpeed configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.costs import DEEPSPEED
from debubble.costs.step import parameter_bytes
from debubble.imports import imports
from debubble.imports.figures import Figures
from debubble.ir import InputError
from tests.support.imported_jobs import job


def test_a_deepspeed_configuration_is_priced_in_fp8(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], sequence_length=4096, dtype="fp8")
    assert read.options.dtype == "fp8"
    assert "up to 1.05 GiB per device may be added" in read.unread[1]


def test_a_deepspeed_configuration_with_zero_3_has_no_pipeline(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}'
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], sequence_length=4096)

    assert (read.pipeline, read.options.data, read.options.zero) == (1, 4, 3)
    assert read.unread == (
        "Recomputation is your script's: predicted is none; if it checkpoints layers, give --recompute full.",
        "zero_optimization.stage3_max_live_parameters is 1,000,000,000 by default, and the prediction counts on two"
        " gathered layers, 436,224,000 parameters: up to 1.05 GiB per device may be added, which a lower value saves.",
    )


def test_deepspeed_bucket_sizes_count_two_bytes_a_number(tmp_path: Path) -> None:
    zero = '{"stage": 2, "reduce_bucket_size": 5e9, "allgather_bucket_size": "auto"}'
    text = f'{{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {zero}, "bf16": {{"enabled": true}}}}'
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], sequence_length=4096)
    assert read.options.framework == "deepspeed,bucket_bytes=11000000000"


@pytest.mark.parametrize(("batch", "pipeline", "data"), [("", 1, 4), ('"train_batch_size": 8,', 2, 2)])
def test_pipeline_follows_from_the_deepspeed_batch(batch: str, pipeline: int, data: int, tmp_path: Path) -> None:
    text = f'{{{batch} "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}}'
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], sequence_length=4096)

    assert (read.pipeline, read.options.data) == (pipeline, data)


def test_deepspeed_stages_follow_the_partition_method(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8, "bf16": {"enabled": true}}'
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], pipeline=4, sequence_length=4096)

    assert (read.micro_batches, read.options.micro_batch_size, read.options.dtype) == (8, 2, "bf16")
    assert read.layers == (7, 9, 9, 7)
    assert read.unread[1] == "Stages are your script's: predicted is partition_method 'parameters'."


@pytest.mark.parametrize(
    ("config", "size", "number"),
    [
        ({"train_batch_size": 32}, 8, 1),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}, 2, 4),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 4}, 2, 4),
        ({"gradient_accumulation_steps": 4}, 1, 4),
    ],
)
def test_missing_deepspeed_batch_entries_are_derived(
    config: dict[str, int], size: int, number: int, tmp_path: Path
) -> None:
    text = json.dumps({**config, "zero_optimization": {"stage": 2}})
    read = job("deepspeed", tmp_path, "a.json", text, model=db.models["llama-tiny"], sequence_length=128)
    assert (read.options.micro_batch_size, read.micro_batches) == (size, number)
    assert not any("train_batch_size" in sentence for sentence in read.unread)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "of which DeepSpeed takes one"),
        ({"train_batch_size": 30}, "is 30, which is no multiple of 4, .* use a multiple of 4, such as 28 or 32"),
        (
            {"train_batch_size": 24, "gradient_accumulation_steps": 4},
            "is 24, which is no multiple of 16, .* such as 16 or 32",
        ),
    ],
)
def test_configurations_that_deepspeed_refuses_are_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        job(
            "deepspeed", tmp_path, "a.json", json.dumps({**config, "zero_optimization": {"stage": 2}}),
            model=db.models["llama-tiny"], sequence_length=128,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "pipeline", "is_noted"), [('"train_batch_size": 8', 2, True), ('"pipeline": {"stages": 4}', 4, False)]
)
def test_pipeline_derived_from_the_batch_is_noted(entry: str, pipeline: int, *, is_noted: bool, tmp_path: Path) -> None:
    text = f'{{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, {entry}}}'
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama-tiny"], sequence_length=128)

    assert read.pipeline == pipeline
    assert any("predicted is a pipeline of 2" in remark for remark in read.rest.remarks) == is_noted


def test_deepspeed_runs_no_pipeline_with_divided_gradients(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="ZeRO-2, with which DeepSpeed runs no pipeline"):
        job(
            "deepspeed", tmp_path, "a.json", '{"zero_optimization": {"stage": 2}}',
            model=db.models["llama-tiny"], sequence_length=128, pipeline=2,
        )  # fmt: skip


def test_deepspeed_script_asks_for_the_missing_file(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("deepspeed train.py --deepspeed_config ds.json\n")

    with pytest.raises(InputError, match=r"has its configuration in ds\.json, which is not next to it: put it there"):
        imports["deepspeed"].read(tmp_path / "run.sh", None)


OFFLOADS = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {
    "stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 0.5}, "offload_param": {"device": "cpu"}
}}"""


def test_deepspeed_offload_is_predicted_or_warned_about(tmp_path: Path) -> None:
    read = job("deepspeed", tmp_path, "ds.json", OFFLOADS, model=db.models["llama3-8b"], sequence_length=4096)

    assert read.options.host_optimizer == 1
    parameters, nvme, ratio = read.warnings
    assert parameters.startswith("zero_optimization.offload_param is not in the prediction")
    assert nvme == "zero_optimization.offload_optimizer is on NVMe, and predicted as if it were in the host's memory."
    assert ratio.endswith("ratio is not 1: all optimizer states are predicted on the host.")


def test_states_larger_than_host_memory_do_not_fit(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"model": db.models["llama3-8b"], "sequence_length": 4096}
    read = job("deepspeed", tmp_path, "ds.json", OFFLOADS, **facts)
    comparisons = [
        Figures.from_plan(read.plan(db.Cluster.from_dict({"devices": "4xA100-80GB", "host_memory": host})))
        for host in ("24GiB", "32GiB")
    ]

    assert [comparison.fits for comparison in comparisons] == [False, True]
    assert "29.92 GiB of 24.00 GiB of host memory per GPU, which does not fit" in str(comparisons[0])


def test_offload_of_states_under_zero_0_is_warned_of(tmp_path: Path) -> None:
    config = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}"""
    read = job("deepspeed", tmp_path, "ds.json", config, model=db.models["llama3-8b"], sequence_length=4096)

    assert read.options.host_optimizer == 0
    assert read.warnings[-1] == (
        "zero_optimization.offload_optimizer needs ZeRO-1 or more, and has no effect in the prediction under ZeRO-0."
    )


@pytest.mark.parametrize(("pipeline", "gradients", "warned"), [(1, "bf16", True), (2, "fp32", False)])
def test_deepspeed_without_zero_sums_gradients_in_bf16(
    pipeline: int, gradients: str, *, warned: bool, tmp_path: Path
) -> None:
    """A pipeline keeps them twice, which takes as much memory as fp32."""
    config = """{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}"""
    facts: dict[str, Any] = {"model": db.models["llama3-8b"], "sequence_length": 4096, "pipeline": pipeline}
    read = job("deepspeed", tmp_path, "ds.json", config, **facts)

    assert read.gradients == gradients
    assert any("from 0.17.6 on" in warning for warning in read.warnings) is warned


@pytest.mark.parametrize(("at_once", "warnings"), [(False, 1), (True, 0)])
def test_gradients_in_two_dtypes_are_warned_about(at_once: bool, warnings: int, tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True, "immediate_grad_update": at_once},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1},
    }
    facts: dict[str, Any] = {"model": db.models["llama3-8b"], "sequence_length": 4096}
    read = job("deepspeed", tmp_path, "ds.json", json.dumps(config), **facts)

    assert sum("bf16.immediate_grad_update saves them" in warning for warning in read.warnings) == warnings
    assert not any("immediate_grad_update" in sentence for sentence in read.unread)


def test_all_that_deepspeed_leaves_open_is_asked_for_at_once(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}'
    with pytest.raises(InputError) as refused:
        job("deepspeed", tmp_path, "a.json", text)
    assert str(refused.value) == (
        f"{tmp_path / 'a.json'} does not say the model and the length of sequences and leaves bf16.enabled and"
        " train_micro_batch_size_per_gpu to your trainer ('auto'): add --model llama3-8b --sequence-length 4096 --dtype"
        " bf16 --args '--train_micro_batch_size_per_gpu 1', with your values, or your trainer's own arguments in"
        " --args."
    )


def test_live_parameters_that_may_exceed_the_limit_are_warned_of(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}'
    read = job("deepspeed", tmp_path, "a.json", text, model=db.models["llama3-8b"], sequence_length=1024)
    assert read.more_memory is not None
    assert read.more_memory.size == 2 * (10**9 - 2 * 218_112_000)
    assert [len(read.all_warnings(peak=peak, limit=70e9)) for peak in (68.8e9, 68.9e9, 70.1e9)] == [0, 1, 0]
    assert read.all_warnings(peak=69e9, limit=70e9) == (
        "The fullest device may need 65.31 GiB of 65.19 GiB with what zero_optimization.stage3_max_live_parameters lets"
        " it keep: give that a lower value.",
    )


def test_invalid_offload_is_removed_under_another_zero_stage() -> None:
    names = {
        "zero_optimization.stage": 3, "zero_optimization.offload_optimizer.device": "cpu",
        "zero_optimization.offload_param.device": "cpu",
    }  # fmt: skip

    assert [*imports["deepspeed"].conflicts(names, {"zero_optimization.stage": 2})] == [
        "zero_optimization.offload_param.device"
    ]
    assert len([*imports["deepspeed"].conflicts(names, {"zero_optimization.stage": 0})]) == 2


def test_user_option_checkpoints_all_layers(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"model": db.models["llama3-8b"], "sequence_length": 4096}

    read = job("deepspeed", tmp_path, "ds.json", OFFLOADS, **facts, recompute="full")

    assert set(read.strategies.values()) == {("full", "full")}
    assert not any("Recomputation" in sentence for sentence in read.unread)
    with pytest.raises(InputError, match=r"--recompute is 'some'; it must be one of: none, full\."):
        job("deepspeed", tmp_path, "ds.json", OFFLOADS, **facts, recompute="some")


def test_moments_in_bf16_need_masters_in_bf16(tmp_path: Path) -> None:
    text = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true, "bf16_optimizer_states": true}}'
    with pytest.raises(InputError, match=r"bf16_optimizer_states is on without bf16\.bf16_master_weights_and_grads"):
        job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], sequence_length=4096)


@pytest.mark.parametrize(("moments", "remarks"), [(True, 0), (False, 1)])
def test_deepspeed_may_step_weights_in_bf16(moments: bool, remarks: int, tmp_path: Path) -> None:
    """A parameter has a weight, a gradient, a copy and two moments of 2 bytes each."""
    text = json.dumps(
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": moments},
            "zero_optimization": {"stage": 1},
        }
    )
    read = job("deepspeed", tmp_path, "ds.json", text, model=db.models["llama3-8b"], sequence_length=4096)

    assert read.options.master_dtype == "bf16"
    assert sum("moments are predicted in bf16" in remark for remark in read.unread) == remarks
    states = parameter_bytes(read.options, shards=4, framework=DEEPSPEED)
    assert (states.weight, states.gradient, states.optimizer) == (2, 2, 6 / 4)
