"""Typical mistakes of users: values, names, and combinations that a framework refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.imports.test_megatron import SCRIPT
from tests.support import imported_jobs

TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 8192
local_batch_size = 8
[parallelism]
pipeline_parallel_degree = 4
[activation_checkpoint]
mode = "selective"
"""
AUTOMODEL = """
model: {pretrained_model_name_or_path: meta-llama/Llama-3.1-8B}
distributed: {strategy: fsdp2, pp_size: 1}
step_scheduler: {local_batch_size: 1, global_batch_size: 8}
dataset: {seq_len: 4096}
"""


def titan(folder: Path, old: str = "", new: str = "") -> Any:
    return imported_jobs.job("torchtitan", folder, "a.toml", TITAN.replace(old, new), cluster="8xH100-80GB")


def deepspeed(folder: Path, **config: Any) -> Any:
    return imported_jobs.job(
        "deepspeed", folder, "a.json", json.dumps(config), model=db.models["llama2-7b"], sequence_length=4096
    )


def automodel(folder: Path, old: str, new: str) -> Any:
    return imported_jobs.job("automodel", folder, "a.yaml", AUTOMODEL.replace(old, new), cluster="8xH100-80GB")


def megatron(folder: Path, more: str) -> Any:
    return imported_jobs.job("megatron", folder, "a.sh", SCRIPT.replace("EXTRA", more))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"selective"', '"selective"\nselective_ac_option = "banana"', "selective_ac_option is 'banana', and"),
        ('"selective"', '"selective"\n[compile]\nenable = "yes"', "compile.enable is 'yes', which is neither true nor"),
        ('"selective"', '"selective"\n[compile]\ncomponents = ["modle"]', "compile.components has 'modle', and"),
        ("= 4", '= 4\nenable_async_tensor_parallel = "banana"', "enable_async_tensor_parallel is 'banana', which is"),
        ("seq_len = 8192", "seq_len = '8192'", "training.seq_len is '8192', which is no whole number"),
        ('flavor = "8B"', 'flavor = "9B"', "'llama3' '9B', which is not known here; known flavors are debugmodel, 8B"),
        ("pipeline_parallel_degree = 4", "pipeline_parallel_degree = {}", "pipeline_parallel_degree is {}, which is"),
        ("= 4", "= 4\ntensor_parallel_degree = {x = 1}", "tensor_parallel_degree is a table, with x, and it has one"),
        ("= 4", "= 4\npipeline_parallel_schedule = '1F1BB'", "'1F1BB', which is not known here (did you mean 1f1b?)"),
    ],
)  # fmt: skip
def test_torchtitan_refuses_a_wrong_value(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        titan(tmp_path, old, new)

    assert message in str(refusal.value)


def test_a_misspelt_degree_is_asked_for_first(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        titan(tmp_path, "pipeline_parallel_degree = 4", "pipline_parallel_degree = 2\ndata_parallel_shard_degree = 4")

    assert str(refusal.value) == (
        f"{tmp_path / 'a.toml'} has parallelism.pipline_parallel_degree (did you mean"
        f" parallelism.pipeline_parallel_degree?).  {tmp_path / 'a.toml'}: data_parallel_shard_degree 4 makes 4 ranks,"
        " and --cluster has 8 devices: change a degree, or give the cluster that the job has."
    )


def test_a_near_name_is_a_warning(tmp_path: Path) -> None:
    assert titan(tmp_path, "seq_len", "seq_length").rest.warnings == (
        "Not known to torchtitan, misspelt or of a fork, and not in the prediction: training.seq_length (did you mean"
        " training.seq_len?).",
    )


def test_torchtitans_offload_is_a_warning(tmp_path: Path) -> None:
    [warning] = titan(tmp_path, "seq_len = 8192", "seq_len = 8192\nenable_cpu_offload = true").warnings

    assert warning.startswith("training.enable_cpu_offload is not in the prediction: parameters, gradients")


def test_selective_checkpointing_needs_no_mode(tmp_path: Path) -> None:
    ways = titan(tmp_path, 'mode = "selective"', 'selective_ac_option = "1"').strategies

    assert ways == {layer: ("full", "full") for layer in range(32)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": -1}}, "stage is -1, and DeepSpeed has the levels 0, 1, 2 and 3"),
        ({"zero_optimization": {"stage": 7}}, "stage is 7, and DeepSpeed has the levels 0, 1, 2 and 3"),
        ({"bf16": True}, "bf16 is true, and it is a table, as in bf16.bf16_master_weights_and_grads"),
        ({"bf16": {"enabled": None}}, "bf16.enabled is null, which is neither true nor false"),
        ({"bf16": {"enabled": "banana"}}, "bf16.enabled is 'banana', which is neither true nor false"),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "gpuu"}}},
            "offload_optimizer.device is 'gpuu', which is none of none, cpu, nvme",
        ),
        ({"train_batch_size": "8"}, "train_batch_size is '8', which is no whole number"),
    ],
)
def test_deepspeed_refuses_a_wrong_value(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        deepspeed(tmp_path, train_micro_batch_size_per_gpu=1, **config)

    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "dtype", "zero"),
    [
        ({"bf16": {"enabled": "yes"}}, "bf16", 1),
        ({"bf16": {"enabled": "true"}, "zero_optimization": {"stage": "3"}}, "bf16", 3),
        ({"fp16": {"enabled": 1}, "zero_optimization": True}, "fp16", 1),
        ({"bfloat16": {"enabled": True}, "zero_optimization": {"stage": 2.0}}, "bf16", 2),
    ],
)
def test_deepspeed_values_are_converted(config: dict[str, Any], dtype: str, zero: int, tmp_path: Path) -> None:
    options = deepspeed(tmp_path, train_micro_batch_size_per_gpu=1, **config).options

    assert (options.dtype, options.zero) == (dtype, zero)


def test_deepspeed_needs_a_batch(tmp_path: Path) -> None:
    assert deepspeed(tmp_path).warnings[0] == (
        "DeepSpeed does not start without train_batch_size or train_micro_batch_size_per_gpu: predicted are"
        " micro-batches of one sequence."
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fsdp2", "banana", "distributed.strategy is 'banana', which is none of fsdp2, megatron_fsdp"),
        ("pp_size: 1", "pp_size: 1, activation_checkpointing: maybe", "checkpointing is 'maybe', which is none"),
        ("pp_size: 1", "pp_size: 1, sequence_parallel: 'yes'", "sequence_parallel is 'yes', which is neither true"),
        ("pp_size: 1", "pp_size: 1, dp_size: 4", "dp_size 4 makes 4 ranks, and --cluster has 8 devices"),
    ],
)  # fmt: skip
def test_automodel_refuses_a_wrong_value(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        automodel(tmp_path, old, new)

    assert message in str(refusal.value)


def test_automodel_values_are_converted_like_its_loader(tmp_path: Path) -> None:
    job = automodel(tmp_path, "pp_size: 1", "pp_size: '2', dp_size: none, activation_checkpointing: 'true'")

    assert (job.pipeline, job.options.data, len(job.strategies)) == (2, 4, 32)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--bf16 --fp16", "has --bf16 and --fp16, of which Megatron-LM takes one"),
        ("--bf16 banana", "--bf16 is 'banana', and takes no value"),
        ("--recompute-num-layers -1", "--recompute-num-layers is -1, and must be at least"),
        ("--context-parallel-size", "--context-parallel-size has no value after it"),
    ],
)
def test_megatron_refuses_a_wrong_value(more: str, message: str, tmp_path: Path) -> None:
    text = f"{more} --recompute-granularity full --recompute-method block"
    with pytest.raises(InputError) as refusal:
        megatron(tmp_path, text if more.startswith("--rec") else more)

    assert message in str(refusal.value)


def test_a_misspelt_argument_is_asked_for_first(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        megatron(tmp_path, "--expert-model-paralel-size 2 --context-parallel-size 3")

    assert str(refusal.value).startswith(
        f"{tmp_path / 'a.sh'} has --expert-model-paralel-size (did you mean --expert-model-parallel-size?).  "
    )


def test_full_recomputation_needs_a_method(tmp_path: Path) -> None:
    assert megatron(tmp_path, "--recompute-granularity full").warnings == (
        "Megatron-LM does not start: --recompute-granularity full needs --recompute-method, uniform or block: predicted"
        " is that every layer recomputes.",
    )


def test_megatron_deepspeed_writes_norms_in_small_letters(tmp_path: Path) -> None:
    small = megatron(tmp_path, "--swiglu --position-embedding-type rope --normalization rmsnorm")

    assert (small.model.family, small.warnings) == ("llama", ())


@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("true", True)])
def test_switches_of_primus_may_be_numbers(value: str, is_on: bool, tmp_path: Path) -> None:
    overrides = (
        f"{{tensor_model_parallel_size: 2, micro_batch_size: 1, global_batch_size: 8, sequence_parallel: {value}}}"
    )
    text = f"modules: {{pre_trainer: {{framework: megatron, model: llama3_8B.yaml, overrides: {overrides}}}}}"

    assert imported_jobs.job("primus", tmp_path, "a.yaml", text).options.sequence_parallel == is_on


def test_an_entry_of_another_section_is_not_near(tmp_path: Path) -> None:
    assert automodel(tmp_path, "dataset:", "processor: {trust_remote_code: true}\ndataset:").rest.warnings == ()


def test_no_position_embedding_is_read(tmp_path: Path) -> None:
    job = megatron(tmp_path, "--no-position-embedding")

    assert "--no-position-embedding" not in (*job.rest.unknown, *job.rest.free)


def test_a_block_of_no_layers_recomputes_none(tmp_path: Path) -> None:
    block = "--recompute-granularity full --recompute-method block --recompute-num-layers 0"

    assert megatron(tmp_path, block).strategies == {}


@pytest.mark.parametrize(
    ("words", "heads"),
    [("--num-key-value-heads 2", 2), ("--attention-head-type multiquery", 1), ("--attention-head-type multihead", 32)],
)
def test_kv_head_arguments_of_forks_are_read(tmp_path: Path, words: str, heads: int) -> None:
    script = SCRIPT.replace("--group-query-attention --num-query-groups 8", words)

    assert imported_jobs.job("megatron", tmp_path, "a.sh", script).model.kv_heads == heads


def test_a_word_that_costs_nothing_may_stay_open(tmp_path: Path) -> None:
    assert megatron(tmp_path, "--ckpt-format $FORMAT").warnings == ()


def test_model_option_replaces_model_sizes(tmp_path: Path) -> None:
    text = "python train.py ${MODEL_ARGS[@]} --bf16 --micro-batch-size 1 --seq-length 64"

    with pytest.raises(InputError, match=r"and \$\{MODEL_ARGS\[@\]\} is not told; .*, or the model with --model"):
        imported_jobs.job("megatron", tmp_path, "a.sh", text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--attention-backend flash", "--attention-backend flash is predicted as any fused attention; a plan"),
        ("--rotary-percent 0.5", "--rotary-percent 0.5: it costs nothing, and a model that is exported rotates whole"),
        (
            "--apply-layernorm-1p",
            "--apply-layernorm-1p: it costs nothing, and a model that is exported has other norms",
        ),
    ],
)
def test_losses_of_an_exported_model_are_reported(tmp_path: Path, words: str, message: str) -> None:
    assert any(line.startswith(message) for line in megatron(tmp_path, words).unread)
    assert not any("rotary" in line for line in megatron(tmp_path, "--rotary-percent 1.0").unread)


PRIMUS_OVERRIDES = "{micro_batch_size: 1, global_batch_size: 8, seq_length: 512}"


def primus(folder: Path, model: str, more: str = "") -> ImportedJob:
    text = f"{more}\nmodules: {{pre_trainer: {{framework: megatron, model: {model}, overrides: {PRIMUS_OVERRIDES}}}}}"
    return imported_jobs.job("primus", folder, "a.yaml", text)


def test_an_experiment_of_primus_may_extend_another(tmp_path: Path) -> None:
    primus(tmp_path, "llama3_8B.yaml")
    (tmp_path / "a.yaml").rename(tmp_path / "base.yaml")

    read = imported_jobs.job("primus", tmp_path, "a.yaml", "extends: [base.yaml]\nmicro_batch_size: 4\n")

    assert (read.model.layers, read.options.micro_batch_size) == (32, 1)
    assert "micro_batch_size" in read.rest.unknown


def test_a_base_of_primus_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"extends lost\.yaml, which is not there"):
        primus(tmp_path, "llama3_8B.yaml", "extends: [lost.yaml]")


def test_primus_models_inherit_dropout_from_their_base(tmp_path: Path) -> None:
    sizes = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 128"
    (tmp_path / "mine.yaml").write_text(f"{{extends: [language_model.yaml], {sizes}}}")

    assert primus(tmp_path, "mine.yaml").model.attention_dropout == 0.1
    assert primus(tmp_path, "llama3_8B.yaml").model.attention_dropout == 0


@pytest.mark.parametrize("turbo", [True, False])
def test_primus_turbo_sends_tokens_once(turbo: bool, tmp_path: Path) -> None:
    overrides = PRIMUS_OVERRIDES.replace("{", f"{{enable_primus_turbo: {turbo}, use_turbo_deepep: true, ")
    text = f"modules: {{pre_trainer: {{framework: megatron, model: mixtral_8x7B_v0.1, overrides: {overrides}}}}}"

    read = imported_jobs.job("primus", tmp_path, "a.yaml", text)

    assert ("dispatches_once=true" in read.options.framework) == turbo


def test_null_in_primus_removes_the_base_entry(tmp_path: Path) -> None:
    sizes = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 128, kv_channels: 32"
    kinds = "swiglu: true, normalization: RMSNorm, position_embedding_type: rope"
    (tmp_path / "mine.yaml").write_text(f"{{{sizes}, {kinds}}}")
    text = "modules: {{pre_trainer: {{framework: megatron, model: mine, overrides: {{{}seq_length: 64}}}}}}"

    both = [imported_jobs.job("primus", tmp_path, "a.yaml", text.format(e)) for e in ("", "kv_channels: null, ")]

    assert [job.model.head_dim for job in both] == [32, 16]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [("", (32, 128)), ("--group-query-attention --num-query-groups 4", (4, 128)), ("--kv-channels 64", (32, 64))],
)
def test_a_gpt_may_share_keys_or_have_other_heads(tmp_path: Path, words: str, sizes: tuple[int, int]) -> None:
    script = SCRIPT.replace("--position-embedding-type rope --normalization RMSNorm --swiglu", "")
    script = script.replace("--group-query-attention --num-query-groups 8", words)

    model = imported_jobs.job("megatron", tmp_path, "a.sh", script).model

    assert (model.kv_heads, model.head_dim) == sizes
