"""Configurations as users of other frameworks write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import debubble as db
from debubble.exports import exports
from debubble.imports import imports
from debubble.ir import InputError
from tests.imports.test_forms import Form, value_of
from tests.support.imported_jobs import job

TITAN = """
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 8
seq_len = 8192

[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
"""
AUTOMODEL = """
model:
  pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B
distributed:
  pp_size: 4
  activation_checkpointing: true
  pipeline: {pp_schedule: 1f1b, pp_microbatch_size: 2}
step_scheduler: {local_batch_size: 16}
dataset: {seq_length: 2048}
"""
MINDFORMERS = """
model:
  model_config: {num_layers: 32, hidden_size: 4096, num_heads: 32, n_kv_heads: 8, intermediate_size: 14336,
    vocab_size: 128256, seq_length: 8192, offset: [1, 0, 0, -1], compute_dtype: bfloat16}
parallel_config: {data_parallel: 1, model_parallel: 1, pipeline_stage: 4, micro_batch_num: 16}
runner_config: {batch_size: 1}
recompute_config: {recompute: [3, 2, 1, 0]}
"""


LLAMA3_8B = db.models["llama3-8b"].parameters
LOCAL_BATCHES = """
model: {pretrained_model_name_or_path: meta-llama/Meta-Llama-3-8B}
distributed: {strategy: fsdp2}
step_scheduler: {local_batch_size: 2, global_batch_size: 32}
dataset: {seq_length: 2048}
"""
TOKENS = """
[model]
name = "llama3"
flavor = "8B"

[training]
num_tokens_per_microbatch_per_dp_rank = 16384
num_tokens_per_train_step = 262144
max_context_length = 8192

[parallelism]
fsdp_reshard_after_forward = "never"
"""
READ = {
    "torchtitan": Form(
        "torchtitan", "llama3.toml", TITAN,
        {
            "parameters": LLAMA3_8B, "pipeline": 4, "tensor": 2, "data": 2, "zero": 1, "micro_batches": 8,
            "micro_batch_size": 1, "sequence_length": 8192, "order": "interleaved",
            # 34 layers with embedding and head over eight stages.
            "layers": (4, 5, 4, 4, 4, 4, 4, 3), "recomputed": list(range(1, 32, 2)),
        },
        devices=16,
    ),
    "torchtitan's loss of whole logits": Form(
        "torchtitan", "llama3.toml", TITAN.replace("[parallelism]", "[parallelism]\ndisable_loss_parallel = true"),
        {"framework": "torchtitan,compiled=false,fused_activation=false,fused_loss=false,loss_parallel=false"},
        devices=16,
    ),
    "torchtitan without a pipeline": Form(
        "torchtitan", "llama3.toml",
        TITAN.replace("pipeline_parallel_degree = 4", "").replace("_len = 8192", "_len = 8192\nglobal_batch_size = 64"),
        {
            "pipeline": 1, "tensor": 2, "data": 4, "zero": 3, "micro_batch_size": 8, "micro_batches": 2,
            "order": "1f1b", "layers": (32,),
        },
        devices=8,
    ),
    "torchtitan's batch in tokens": Form(
        "torchtitan", "llama3.toml", TOKENS,
        {"data": 8, "zero": 2, "sequence_length": 8192, "micro_batch_size": 2, "micro_batches": 2}, devices=8,
    ),
    "automodel": Form(
        "automodel", "recipe.yaml", AUTOMODEL,
        {
            "parameters": LLAMA3_8B, "micro_batches": 8, "micro_batch_size": 2, "sequence_length": 2048,
            "layers": (8, 8, 8, 8), "recomputed": list(range(32)), "framework": "automodel",
        },
    ),
    "automodel's replicas left out": Form(
        "automodel", "recipe.yaml", AUTOMODEL.replace("pp_size: 4", "pp_size: 4\n  dp_size: none"), {"data": 2},
        devices=8,
    ),
    "automodel without DeepEP": Form(
        "automodel", "recipe.yaml", AUTOMODEL.replace("model:", "model:\n  backend: {dispatcher: torch}"),
        {"framework": "automodel,dispatches_once=false"},
    ),
    "automodel without a pipeline": Form(
        "automodel", "recipe.yaml", LOCAL_BATCHES,
        {"pipeline": 1, "data": 4, "zero": 3, "micro_batch_size": 2, "micro_batches": 4},
    ),
    "automodel's policy without a dtype computes as it stores": Form(
        "automodel", "recipe.yaml",
        LOCAL_BATCHES.replace("3-8B", "3-8B, torch_dtype: float32").replace(
            "fsdp2", "fsdp2, mp_policy: {reduce_dtype: float32}"
        ),
        {"dtype": "fp32"},
    ),
    "mindformers": Form(
        "mindformers", "run.yaml", MINDFORMERS,
        {"parameters": LLAMA3_8B, "layers": (9, 8, 8, 7), "recomputed": [0, 1, 2, 9, 10, 17]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(READ))
def test_a_configuration_is_read(name: str, tmp_path: Path) -> None:
    job = READ[name].job(tmp_path)

    assert {entry: value_of(job, entry) for entry in READ[name].read} == READ[name].read


@pytest.mark.parametrize(
    ("written", "priced"),
    [
        ("", "torchtitan,compiled=false,fused_activation=false,fused_loss=false"),
        ("[compile]\nenable = true\n", "torchtitan"),
        (
            '[compile]\nenable = true\ncomponents = ["loss"]\nenable_async_tensor_parallel = true\n',
            "torchtitan,compiled=false,fused_activation=false,tensor_overlap=true",
        ),
    ],
)
def test_torchtitan_compile_is_priced(written: str, priced: str, tmp_path: Path) -> None:
    read = job("torchtitan", tmp_path, "llama3.toml", TITAN + written, cluster="16xH100-80GB")

    assert read.options.framework == priced
    assert ("no torch.compile (default of torchtitan)" in read.summary) == (not written)


FULL_BF16 = "weights, gradients and moments stored in bf16"


def test_torchtitans_training_dtype_is_that_of_all_states(tmp_path: Path) -> None:
    texts = (TITAN.replace("seq_len", f'dtype = "{dtype}"\nseq_len') for dtype in ("float32", "bfloat16"))
    mixed, full = (job("torchtitan", tmp_path, "llama3.toml", text, cluster="16xH100-80GB") for text in texts)
    assert (mixed.options.master_dtype, full.options.master_dtype) == ("fp32", "bf16")
    assert (FULL_BF16 in mixed.summary, FULL_BF16 in full.summary) == (False, True)


@pytest.mark.parametrize(
    ("model", "optimizer", "masters", "moments"),
    [
        ("", "torch.optim.AdamW", "bf16", "fp32"),
        (", torch_dtype: float32", "torch.optim.AdamW", "fp32", "fp32"),
        ("", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam", "fp32", "fp32"),
        (
            "",
            "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam, exp_avg_dtype: torch.bfloat16,"
            " exp_avg_sq_dtype: torch.bfloat16",
            "fp32",
            "bf16",
        ),
        ("", "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam, master_weights: false", "bf16", "fp32"),
    ],
)
def test_automodel_steps_the_weights_that_it_loads(
    model: str, optimizer: str, masters: str, moments: str, tmp_path: Path
) -> None:
    """Checkpoints are in bf16; Transformer Engine's Adam keeps fp32 masters."""
    text = LOCAL_BATCHES.replace("3-8B", f"3-8B{model}") + f"optimizer: {{_target_: {optimizer}}}\n"
    options = job("automodel", tmp_path, "recipe.yaml", text).options
    assert (options.dtype, options.master_dtype, options.moment_dtype) == ("bf16", masters, moments)


@pytest.mark.parametrize(("flavor", "known"), [("deepseek_v3/671B", "deepseek-v3"), ("llama4/17bx16e", "llama4-scout")])
def test_torchtitan_model_flavors_are_known(flavor: str, known: str, tmp_path: Path) -> None:
    name, size = flavor.split("/")
    text = f'[model]\nname = "{name}"\nflavor = "{size}"\n[training]\nseq_len = 4096\n'

    read = job("torchtitan", tmp_path, "a.toml", text).model
    assert read.layers == db.models[known].layers
    assert (read.vision, read.mtp_layers) == (None, 0)


def test_automodel_keeps_full_gradients_until_the_last_pass(tmp_path: Path) -> None:
    """Gradients are summed in fp32, and a rank's quarter is then kept in 16 bits."""

    def states(more: str) -> float:
        text = LOCAL_BATCHES.replace("fsdp2", f"fsdp2, dp_size: 4{more}")
        plan = job("automodel", tmp_path, "recipe.yaml", text).plan(db.Cluster.parse("4xA100-80GB"))
        return float(plan.costs.static[0])

    difference = states("") - states(", defer_fsdp_grad_sync: false")
    assert difference == pytest.approx((4 - 2 / 4) * db.models["llama3-8b"].parameters)


def test_automodels_gradients_are_exported_as_they_are_summed(tmp_path: Path) -> None:
    text = LOCAL_BATCHES.replace("fsdp2", "fsdp2, dp_size: 4, mp_policy: {reduce_dtype: bfloat16}")
    plan = job("automodel", tmp_path, "recipe.yaml", text).plan(db.Cluster.parse("4xA100-80GB"))
    made = yaml.safe_load(exports["automodel"](plan).files["plan.yaml"])["distributed"]
    assert (made["defer_fsdp_grad_sync"], made["mp_policy"]["reduce_dtype"]) == (True, "bfloat16")


SAVED = {
    "model_spec": {"name": "llama3", "flavor": "8B", "model": {"dim": 4096}},
    "training": {"seq_len": 4096, "local_batch_size": 8, "mixed_precision_param": "bfloat16"},
    "parallelism": {"pipeline_parallel_degree": 4, "pipeline_parallel_microbatch_size": 2},
}
POLICIES = {
    "none": (None, 0),
    "full": ({"preserve_rng_state": True, "debug": False}, 32),
    "selective": ({"preserve_rng_state": True, "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"]}, 32),
    "budget": ({"preserve_rng_state": True, "memory_budget": 0.5}, 0),
}


@pytest.mark.parametrize("name", list(POLICIES))
def test_saved_torchtitan_checkpoint_policy_is_read(name: str, tmp_path: Path) -> None:
    policy, layers = POLICIES[name]
    read = job("torchtitan", tmp_path, "config.json", json.dumps({**SAVED, "activation_checkpoint": policy}))

    assert read.model.parameters == db.models["llama3.1-8b"].parameters
    assert (read.micro_batches, read.options.micro_batch_size, read.options.sequence_length) == (4, 2, 4096)
    assert len(read.strategies) == layers
    assert any("predicted to be kept" in sentence for sentence in read.unread) == (name in ("selective", "budget"))


OWN_CELLS = {("none", "activation+multiply")}


@pytest.mark.parametrize(
    ("value", "layers", "ways"),
    [
        ("true", 32, OWN_CELLS),
        ("[3, 2, 1, 0]", 6, OWN_CELLS),
        ("['feed_forward\\.mul']", 32, {("none", "multiply")}),
        ("{'feed_forward\\.mul': true}", 32, {("none", "multiply")}),
        ("false", 0, set()),
    ],
)
def test_mindformers_select_recompute_is_read(
    value: str, layers: int, ways: set[tuple[str, str]], tmp_path: Path
) -> None:
    text = MINDFORMERS.replace("recompute: [3, 2, 1, 0]", f"select_recompute: {value}")
    read = job("mindformers", tmp_path, "run.yaml", text)

    assert (len(read.strategies), set(read.strategies.values())) == (layers, ways)


UNREAD = {
    "torchtitan": (
        "a.toml", TITAN + "[fault_tolerance]\nenable = true\n[metrics]\nlog_freq = 1\n", "fault_tolerance.enable",
        "metrics.log_freq",
    ),
    "automodel": ("a.yaml", AUTOMODEL + "compile: {enabled: true}\nseed: 1\n", "compile.enabled", "seed"),
    "mindformers": (
        "a.yaml", MINDFORMERS + "swap_config: {swap: true}\nseed: 1\n", "swap_config.swap", "seed",
    ),
    "deepspeed": (
        "a.json", '{"zero_optimization": {"overlap_comm": false}, "steps_per_print": 9}',
        "zero_optimization.overlap_comm", "steps_per_print",
    ),
    "primus": (
        "a.yaml",
        "modules: {pre_trainer: {model: llama3_8b.yaml, overrides: {seq_length: 2048, pipeline_model_parallel_size: 4,"
        " tp_comm_overlap_ag: true, log_interval: 1}}}",
        "--tp-comm-overlap-ag", "--log-interval",
    ),
}  # fmt: skip
"""Framework -> file name, text, a setting in it that may cost something, and one that is free."""


@pytest.mark.parametrize("framework", list(UNREAD))
def test_every_setting_that_is_not_read_is_named(framework: str, tmp_path: Path) -> None:
    name, text, costly, free = UNREAD[framework]
    facts: dict[str, Any] = {"model": db.models["llama3-8b"], "pipeline": 4, "sequence_length": 2048}
    cluster = "8xA100-80GB" if framework == "torchtitan" else "4xA100-80GB"

    unread = job(framework, tmp_path, name, text, cluster=cluster, **facts).unread

    [not_read] = [sentence for sentence in unread if sentence.startswith("Not in the prediction: ")]
    [taken] = [sentence for sentence in unread if sentence.startswith("Known to cost neither time nor memory: ")]
    assert costly in not_read
    assert free in taken


def test_csv_reports_that_only_its_order_is_given(tmp_path: Path) -> None:
    read = job("torch", tmp_path, "a.csv", "0F0,0B0\n", cluster="1xA100-80GB", model=db.models["llama-tiny"],
               sequence_length=128)  # fmt: skip

    assert [sentence.split()[0] for sentence in read.unread] == ["What", "There", "Micro-batches"]


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"pipeline": 2}, "a.csv has 1 where --pipeline says 2: leave --pipeline out."),
        ({"micro_batches": 8}, "a.csv has 1 where --micro-batches says 8: leave --micro-batches out."),
    ],
)
def test_options_that_contradict_the_order_are_refused(facts: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job("torch", tmp_path, "a.csv", "0F0,0B0\n", model=db.models["llama-tiny"], sequence_length=128, **facts)


def test_a_csv_of_more_devices_than_the_cluster_has_is_refused(tmp_path: Path) -> None:
    rows = "0F0,,,0B0\n,1F0,1B0,\n"
    with pytest.raises(InputError, match="which do not divide the cluster's 1"):
        job("torch", tmp_path, "a.csv", rows, cluster="1xA100-80GB", model=db.models["llama-tiny"],
            sequence_length=128)  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "name", "text", "message"),
    [
        ("torchtitan", "a.toml", "[model]\nname = 'mine'\n", "give it with --model"),
        ("torchtitan", "a.toml", "not toml", "is no TOML"),
        (
            "torchtitan",
            "a.py",
            "import os\n",
            "only debubble's own plan.py is read: start the job once with --debug.save-config",
        ),
        ("automodel", "a.yaml", "model: {}\n", "names no model: give it with --model"),
        ("automodel", "a.yaml", "[1, 2]\n", "has no settings by name"),
        ("deepspeed", "a.json", "{}", "does not say the model and the length of sequences: add --model llama3-8b"),
        (
            "automodel",
            "a.yaml",
            "distributed: {pp_size: auto}\nmodel: {pretrained_model_name_or_path: x/gpt2-tiny}",
            "your trainer",
        ),
        ("mindformers", "a.yaml", "runner_config: {batch_size: 1}\n", "give it with --model"),
        ("automodel", "a.ini", "", "no configuration that is read here"),
        ("automodel", "a.slurm", "", "is a script: give the configuration that it names"),
        ("torchtitan", "a.sh", "", "is a script: give the TOML that its CONFIG_FILE or --job.config_file names"),
        ("torchtitan", "a.ini", "", "there are: .json, .toml, .yaml, .yml, .py."),
        ("automodel", "a.yaml", AUTOMODEL.replace("2048", "long"), "dataset.seq_length is 'long', which is no whole"),
        (
            "torchtitan",
            "a.toml",
            TITAN.replace("local_batch_size = 8", "num_tokens_per_microbatch_per_dp_rank = 'many'").replace(
                "tensor_parallel_degree = 2", ""
            ),
            "per_dp_rank is 'many', which is no whole number",
        ),
        (
            "torchtitan",
            "a.toml",
            TITAN.replace("local_batch_size = 8", "local_batch_size = 8\nmixed_precision_param = 'float8'").replace(
                "tensor_parallel_degree = 2", ""
            ),
            "mixed_precision_param is 'float8', and only bfloat16, float32 are priced",
        ),
        (
            "torchtitan",
            "a.toml",
            TITAN.replace("tensor_parallel_degree = 2", "pipeline_parallel_microbatch_size = 3"),
            "local_batch_size is 8, which is no multiple of 3",
        ),
        ("automodel", "a.yaml", AUTOMODEL.replace("local_batch_size: 16", "local_batch_size: 15"), "no multiple of 2"),
        ("mindformers", "a.yaml", MINDFORMERS.replace("bfloat16", "bfloat8"), "compute_dtype is 'bfloat8', and only"),
    ],
)
def test_missing_entries_are_one_sentence(framework: str, name: str, text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job(framework, tmp_path, name, text)


def test_unknown_automodel_optimizer_is_reported(tmp_path: Path) -> None:
    read = job("automodel", tmp_path, "a.yaml", AUTOMODEL + "optimizer: {_target_: torch.optim.Adagrad}\n")
    assert "optimizer._target_ is Adagrad, and the prediction counts on AdamW." in read.warnings


@pytest.mark.parametrize(("ranks", "experts"), [(1, (1, None)), (4, (4, 1))])
def test_torchtitan_expert_ranks_have_full_experts(ranks: int, experts: tuple[int, int | None], tmp_path: Path) -> None:
    text = TITAN.replace("pipeline_parallel_degree = 4", f"expert_parallel_degree = {ranks}")
    read = job("torchtitan", tmp_path, "a.toml", text, model=db.models["qwen3-30b-a3b"])
    assert (read.options.expert, read.options.expert_tensor) == experts


@pytest.mark.parametrize(
    ("framework", "name", "text", "other"),
    [
        ("deepspeed", "recipe.yaml", AUTOMODEL, "automodel"),
        ("automodel", "llama3.toml", TITAN, "torchtitan"),
        ("torchtitan", "llama.yaml", MINDFORMERS, "mindformers"),
        ("mindformers", "ds.json", '{"train_micro_batch_size_per_gpu": 1}', "deepspeed"),
    ],
)
def test_the_importer_of_another_frameworks_file_is_named(
    framework: str, name: str, text: str, other: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"is no configuration of {framework}: `debubble import {other} "):
        job(framework, tmp_path, name, text, model=db.models["llama3-8b"], sequence_length=4096)


@pytest.mark.parametrize("framework", list(imports))
def test_missing_file_is_one_sentence(framework: str) -> None:
    with pytest.raises(InputError):
        imports[framework].settings(Path(""))
