"""Megatron-LM's arguments in all forms that users have: scripts, quotes, arrays and logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.costs import framework_of_options
from debubble.costs.step import parameter_bytes
from debubble.imports import imports
from debubble.imports.job import ImportedJob
from debubble.imports.registry import UserFacts
from debubble.imports.settings import read_arguments
from debubble.ir import InputError
from tests.support import imported_jobs

SCRIPT = """#!/bin/bash
# Pretrain Llama-3 8B
PP=4
SIZES=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336   # as published
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --vocab-size 128256 --position-embedding-type rope --normalization RMSNorm --swiglu
    --untie-embeddings-and-output-weights
)
GPT_ARGS="
    --seq-length 4096 --pipeline-model-parallel-size $PP
    --micro-batch-size 1 --global-batch-size=16 --bf16 --hidden-dropout 0
"
torchrun --nproc_per_node 4 pretrain_gpt.py "${SIZES[@]}" $GPT_ARGS \\
    --train-iters ${ITERATIONS:-1000} --lr 1e-4 EXTRA
echo done
"""
LOG = """using world size: 4, data-parallel size: 1
------------------------ arguments ------------------------
  bf16 ............................................ True
  global_batch_size ............................... 16
  group_query_attention ........................... True
  hidden_size ..................................... 4096
  ffn_hidden_size ................................. 14336
  micro_batch_size ................................ 1
  normalization ................................... RMSNorm
  num_attention_heads ............................. 32
  num_layers ...................................... 32
  num_query_groups ................................ 8
  padded_vocab_size ............................... 128256
  pipeline_model_parallel_size .................... 4
  position_embedding_type ......................... rope
  recompute_granularity ........................... None
  recompute_modules ............................... ['core_attn']
  seq_length ...................................... 4096
  sequence_parallel ............................... False
  swiglu .......................................... True
  untie_embeddings_and_output_weights ............. True
"""


ENDS_COUNT = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split --num-layers 30"
FIRST_AND_LAST = "--decoder-first-pipeline-num-layers 14 --decoder-last-pipeline-num-layers 18"


def job(folder: Path, text: str, **facts: Any) -> ImportedJob:
    return imported_jobs.job("megatron", folder, "job.sh", text, **facts)


@pytest.mark.parametrize(
    "array",
    [
        "A=(--tensor-model-parallel-size 8 --sequence-parallel)",
        "A=(\n  --tensor-model-parallel-size 8 # one node\n  --sequence-parallel)",
        "A=(--pipeline-model-parallel-layout 'Et|(tt|)*3' --sequence-parallel --tensor-model-parallel-size=8)",
    ],
)
def test_array_is_read_in_any_layout(array: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(f'{array}\ntorchrun pretrain_gpt.py "${{A[@]}}" --bf16\n')

    arguments = dict(read_arguments(tmp_path / "job.sh"))

    assert arguments.pop("--pipeline-model-parallel-layout", "Et|(tt|)*3") == "Et|(tt|)*3"
    assert arguments == {"--tensor-model-parallel-size": "8", "--sequence-parallel": True, "--bf16": True}


@pytest.mark.parametrize(
    "script",
    [
        "TP=8; run --tensor-model-parallel-size $TP --bf16 2>&1 | tee log",
        "export NODES=4 TP=${TP:-8}\nrun --bf16 --tensor-model-parallel-size ${TP} > log 2> errors",
        "NODES=2\nTP=$(( NODES * (1 + 3) ))\nrun --tensor-model-parallel-size $TP --bf16 &",
    ],
)
def test_shell_syntax_around_arguments_is_ignored(script: str, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(script)

    assert read_arguments(tmp_path / "job.sh") == {"--tensor-model-parallel-size": "8", "--bf16": True}


def test_an_open_sum_names_the_variables_that_are_not_set(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text("N=8; run --global-batch-size $((GPUS * N)) --bf16")

    assert read_arguments(tmp_path / "job.sh")["--global-batch-size"] == "$(($GPUS*8))"


@pytest.mark.parametrize("text", [SCRIPT, LOG], ids=["script", "log"])
def test_the_model_and_the_pipeline_are_those_of_the_arguments(text: str, tmp_path: Path) -> None:
    read = job(tmp_path, text)

    assert read.model.parameters == db.models["llama3-8b"].parameters
    assert (read.pipeline, read.micro_batches, read.layers, read.order) == (4, 16, (8, 8, 8, 8), "1f1b")
    assert read.strategies == {}
    assert read.options.dtype == "bf16"


def test_given_model_must_match_the_arguments(tmp_path: Path) -> None:
    read = job(tmp_path, SCRIPT, model=db.models["llama3-8b"])
    assert read.model == db.models["llama3-8b"]
    assert not [sentence for sentence in read.unread if "--swiglu" in sentence]
    with pytest.raises(InputError, match="says --num-layers 32, but the model has 80: give the right one with --model"):
        job(tmp_path, SCRIPT, model=db.models["llama3-70b"])


@pytest.mark.parametrize(
    ("arguments", "layers"),
    [
        (ENDS_COUNT, (7, 8, 8, 7)),
        ("--pipeline-model-parallel-layout 'Et*6|(t*9|)*2t*8L'", (6, 9, 9, 8)),
        ("--num-layers-per-virtual-pipeline-stage 4", (4,) * 8),
        ("--decoder-first-pipeline-num-layers 5 --decoder-last-pipeline-num-layers 7", (5, 10, 10, 7)),
    ],
)
def test_layers_per_stage_are_read(arguments: str, layers: tuple[int, ...], tmp_path: Path) -> None:
    assert job(tmp_path, SCRIPT.replace("EXTRA", arguments)).layers == layers


@pytest.mark.parametrize(
    ("arguments", "recomputed"),
    [
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", {("full", "full"): 32}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", {("full", "full"): 8}),
        ("--recompute-activations", {("core", "none"): 32}),
        ("--recompute-granularity selective --recompute-modules mlp", {("none", "norm+mlp"): 32}),
    ],
)
def test_recomputation_is_read(arguments: str, recomputed: dict[tuple[str, str], int], tmp_path: Path) -> None:
    strategies = list(job(tmp_path, SCRIPT.replace("EXTRA", arguments)).strategies.values())

    assert {way: strategies.count(way) for way in set(strategies)} == recomputed


@pytest.mark.parametrize(
    ("arguments", "dtype"),
    [
        ("--megatron-fsdp-main-grads-dtype bf16", "bf16"),
        ("--megatron-fsdp-main-grads-dtype auto", "bf16"),
        ("--megatron-fsdp-main-grads-dtype fp32", "fp32"),
        ("--fp8-format hybrid --megatron-fsdp-main-grads-dtype auto", "bf16"),
    ],
)
def test_the_gradients_of_fsdp_have_its_dtype(arguments: str, dtype: str, tmp_path: Path) -> None:
    text = SCRIPT.replace("PP=4", "PP=1").replace("EXTRA", f"--use-megatron-fsdp {arguments}")
    assert job(tmp_path, text, cluster="4xH100-80GB").options.gradient_dtype == dtype


@pytest.mark.parametrize(("config", "dtype"), [({}, "bf16"), ({"data_types": {"grad_accum_dtype": "fp32"}}, "fp32")])
def test_deepspeed_sums_gradients_in_its_own_dtype(config: Any, dtype: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, **config}))
    text = SCRIPT.replace("EXTRA", "--deepspeed --deepspeed_config ds.json --zero-stage 1")
    assert job(tmp_path, text).options.gradient_dtype == dtype


def test_fsdp_gradient_dtype_affects_only_fsdp(tmp_path: Path) -> None:
    text = SCRIPT.replace("EXTRA", "--megatron-fsdp-main-grads-dtype bf16")
    assert job(tmp_path, text).options.gradient_dtype == "fp32"


@pytest.mark.parametrize(
    ("arguments", "graphs"),
    [
        ("--cuda-graph-impl local --cuda-graph-modules '[attn mlp]'", "layers"),
        ("--cuda-graph-impl local --cuda-graph-modules full_iteration", "step"),
    ],
)
def test_modules_of_cuda_graphs_are_read(arguments: str, graphs: str, tmp_path: Path) -> None:
    read = job(tmp_path, SCRIPT.replace("EXTRA", arguments))

    assert read.options.framework == f"megatron-lm,graphs={graphs}"
    assert not [sentence for sentence in read.unread if "--cuda-graph-modules" in sentence]


def test_optimizer_instances_are_reported(tmp_path: Path) -> None:
    arguments = "--use-distributed-optimizer --num-distributed-optimizer-instances"
    one, two = (job(tmp_path, SCRIPT.replace("EXTRA", f"{arguments} {number}")).unread for number in (1, 2))

    assert two[0].startswith("--num-distributed-optimizer-instances 2: states are divided within each")
    assert not [sentence for sentence in one if "instances" in sentence]


def test_unpriced_arguments_are_listed(tmp_path: Path) -> None:
    text = SCRIPT.replace(
        "EXTRA",
        "--tensor-model-parallel-size 2 --fine-grained-activation-offloading --offload-modules core_attn attn_norm"
        " --delta-offload-bytes-across-pp-ranks 1000 --my-kernel",
    )
    unread = job(tmp_path, text, cluster="8xA100-80GB").unread

    assert [sentence.split()[0].rstrip(":") for sentence in unread] == [
        "--offload-modules",
        "--delta-offload-bytes-across-pp-ranks",
        "Not",
        "Known",
    ]
    assert unread[0] == "--offload-modules attn_norm is not priced: activations are predicted to stay."
    assert unread[-2] == "Not known to Megatron-LM or its launcher, and not in the prediction: --my-kernel."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello\n", "has no arguments of a training"),
        (
            "python run_recipe.py --recipe a_config model.context_parallel_size=2\n",
            "starts a recipe of Megatron-Bridge, and leaves model.tensor_model_parallel_size, model.pipeline_model",
        ),
        ("pretrain --num-layers 'x\n", "cannot be read as a shell script"),
        (
            SCRIPT.replace("--num-layers 32", "--num-layers $LAYERS"),
            "--num-layers is '[$]LAYERS', which the file does not tell: give it with --args 'LAYERS=1'",
        ),
        (SCRIPT.replace("--vocab-size 128256", ""), "does not say --vocab-size"),
        (SCRIPT.replace("--swiglu", "--glu-activation reglu"), "with the activation reglu, which is not read"),
        (SCRIPT.replace("EXTRA", "--pipeline-model-parallel-layout 'Et|x'"), "no layout of E, t, m, L"),
        (SCRIPT.replace("EXTRA", "--optimizer sgd --sgd-momentum lots"), "is 'lots', which is no share"),
        (SCRIPT.replace("EXTRA", "--optimizer ademamix"), "--optimizer is ademamix, whose states are not priced"),
        (SCRIPT.replace("EXTRA", "--decoder-first-pipeline-num-layers few"), "is 'few', which is no whole number"),
        (
            SCRIPT.replace("PP=4", "PP=1").replace("EXTRA", FIRST_AND_LAST),
            "is for the stages of a pipeline, and --pipeline-model-parallel-size is 1",
        ),
        (SCRIPT.replace("PP=4", "PP=3"), "do not divide the cluster's 4"),
        (SCRIPT.replace("EXTRA", "--tensor-model-parallel-size 3"), "size is 3, which does not divide the model's 32"),
        (SCRIPT.replace("=16", "=15.5"), "--global-batch-size is '15.5'"),
    ],
)
def test_unreadable_scripts_are_refused_in_a_sentence(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        job(tmp_path, text)


def test_layers_that_recompute_wholly_offload_nothing(tmp_path: Path) -> None:
    offload = "--fine-grained-activation-offloading --offload-modules core_attn"
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"

    alone, alongside = (job(tmp_path, SCRIPT.replace("EXTRA", text)) for text in (offload, f"{offload} {full}"))

    assert alone.offload is not None
    assert alongside.offload is None
    assert "--fine-grained-activation-offloading with full recomputation is predicted to move nothing." in (
        alongside.unread
    )


BRIDGE = """
model:
  _target_: megatron.bridge.models.LlamaModelProvider
  num_layers: 32
  hidden_size: 4096
  num_attention_heads: 32
  num_query_groups: 8
  ffn_hidden_size: 14336
  vocab_size: 128256
  gated_linear_unit: true
  normalization: RMSNorm
  position_embedding_type: rope
  share_embeddings_and_output_weights: false
  seq_length: 8192
  pipeline_model_parallel_size: 4
  virtual_pipeline_model_parallel_size: 2
  recompute_granularity: selective
  recompute_modules: [core_attn, mlp]
  fine_grained_activation_offloading: false
train: {micro_batch_size: 1, global_batch_size: 32, train_iters: 100}
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: true}
optimizer: {optimizer: adam, lr: 0.0003}
mixed_precision: bf16_with_fp8_delayed_scaling_mixed
dataset: {path: data}
"""


def bridge_job(folder: Path, text: str, *, devices: int = 8) -> ImportedJob:
    file = folder / "run_config.yaml"
    file.write_text(text)
    facts = UserFacts(cluster=db.Cluster.parse(f"{devices}xH100-80GB"))
    return imports["megatron"].job(imports["megatron"].settings(file), file, facts)


def test_a_configuration_of_megatron_bridge_is_read(tmp_path: Path) -> None:
    read = bridge_job(tmp_path, BRIDGE)

    assert read.model.parameters == db.models["llama3-8b"].parameters
    assert (read.pipeline, read.order, read.layers) == (4, "interleaved", (4,) * 8)
    assert (read.micro_batches, read.options.data, read.options.zero) == (16, 2, 1)
    assert (read.options.dtype, read.options.sequence_length) == ("fp8", 8192)
    assert set(read.strategies.values()) == {("core", "norm+mlp")}
    assert read.unread == ("Known to cost neither time nor memory: --lr --train-iters dataset.path.",)


@pytest.mark.parametrize(
    ("precision", "ddp", "dtype"),
    [("", "false", "bf16"), ("", "true", "fp32"), ("mixed_precision: bf16_mixed", "false", "fp32")],
)
def test_bridges_mixed_precision_overrules_the_gradients_of_ddp(
    tmp_path: Path, precision: str, ddp: str, dtype: str
) -> None:
    text = BRIDGE.replace("mixed_precision: bf16_with_fp8_delayed_scaling_mixed", precision)
    text = text.replace("recompute_granularity", "bf16: true\n  recompute_granularity")
    text = text.replace("ddp: {", f"ddp: {{grad_reduce_in_fp32: {ddp}, ")
    assert bridge_job(tmp_path, text).options.gradient_dtype == dtype


def test_a_layout_of_megatron_bridge_may_be_lists_of_names(tmp_path: Path) -> None:
    stages = "[[embedding, decoder], [decoder, decoder, decoder], [decoder, decoder], [decoder, loss]]"
    text = BRIDGE.replace("num_layers: 32", f"num_layers: 7\n  pipeline_model_parallel_layout: {stages}")
    read = bridge_job(tmp_path, text.replace("  virtual_pipeline_model_parallel_size: 2\n", ""), devices=4)

    assert read.layers == (1, 3, 2, 1)


@pytest.mark.parametrize(
    ("tokenizer", "words"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 50304),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B", 128256),
    ],
)
def test_known_tokenizer_sets_the_vocabulary(tokenizer: str, words: int, tmp_path: Path) -> None:
    read = job(tmp_path, SCRIPT.replace("--vocab-size 128256", tokenizer))

    assert read.model.vocab == words


def test_options_override_arguments(tmp_path: Path) -> None:
    read = job(tmp_path, SCRIPT.replace("EXTRA", ""), pipeline=2, sequence_length=2048)
    assert (read.pipeline, read.options.sequence_length) == (2, 2048)
    assert read.unread == ("Known to cost neither time nor memory: --lr --train-iters.",)


def test_options_must_be_positive(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--pipeline must be at least 1, not -4\."):
        job(tmp_path, SCRIPT, pipeline=-4)


REDUCES = "--overlap-grad-reduce"


@pytest.mark.parametrize(
    ("flags", "framework"),
    [
        ("", "megatron-lm"),
        ("--tp-comm-overlap", "megatron-lm,tensor_overlap=true"),
        (REDUCES, "megatron-lm,gradient_overlap=true"),
        (f"{REDUCES} --use-distributed-optimizer", "megatron-lm,gradient_overlap=true,gather_overlap=false"),
        (f"{REDUCES} --use-distributed-optimizer --overlap-param-gather", "megatron-lm,gradient_overlap=true"),
        ("--moe-enable-deepep --enable-cuda-graph", "megatron-lm,dispatches_once=true,graphs=layers"),
    ],
)
def test_overlaps_and_dtypes_of_arguments_are_priced(tmp_path: Path, flags: str, framework: str) -> None:
    assert job(tmp_path, SCRIPT.replace("EXTRA", flags), cluster="8xA100-80GB").options.framework == framework


@pytest.mark.parametrize(
    ("flag", "warning"),
    [
        (
            "--recompute-granularty full",
            "Not known to Megatron-LM or its launcher, misspelt or of a fork, and not in the prediction:"
            " --recompute-granularty (did you mean --recompute-granularity?).",
        ),
        ("--frobnicate-weights", None),
        (
            "--recompute-granularity fulll",
            "--recompute-granularity fulll is no value that Megatron-LM has had (full selective) (did you mean full?):"
            " the prediction may be of another.",
        ),
    ],
)
def test_a_misspelt_argument_of_megatron_is_warned_of(flag: str, warning: str | None, tmp_path: Path) -> None:
    read = job(tmp_path, SCRIPT.replace("EXTRA", flag))
    assert (*read.warnings, *read.rest.warnings) == ((warning,) if warning else ())


def test_missing_argument_names_the_most_similar_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not say --num-layers, but --num-layer; give it with --args"):
        job(tmp_path, SCRIPT.replace("--num-layers", "--num-layer"))


@pytest.mark.parametrize(
    ("launcher", "warning"),
    [
        ("torchrun --nproc_per_node 4", ""),
        ("torchrun --nproc-per-nod 4", "--nproc-per-nod (did you mean --nproc-per-node?)"),
        ("torchrun --nnodes 1 --rdvz_backend c10d", "--rdvz-backend (did you mean --rdzv-backend?)"),
        ("torchrun --log-dir x --local-addr y --rdzv-conf z", ""),
        ("deepspeed --num_gpu 4", "--num-gpu (did you mean --num-gpus?)"),
        ("deepspeed --hostfil x --force_multi", "--hostfil (did you mean --hostfile?)"),
        ("accelerate launch --num_process 4", "--num-process (did you mean --num-processes?)"),
        ("srun --ntask-per-node 4 python", "--ntask-per-node (did you mean --ntasks-per-node?)"),
        ("torchrun --nproc_per_node four", "--nproc-per-node four is no number that a launcher takes."),
        ("torchrun --nproc_per_node gpu --nnodes 1:4", ""),
        ("torchrun --nproc_per_node $GPUS", ""),
    ],
)
@pytest.mark.parametrize("more", ["", "--deepspeed"])
def test_misspelt_arguments_of_launchers_are_warned_of(tmp_path: Path, launcher: str, warning: str, more: str) -> None:
    script = SCRIPT.replace("torchrun --nproc_per_node 4", launcher).replace("EXTRA", more)
    read = job(tmp_path, script)
    warnings = [warning for warning in (*read.warnings, *read.rest.warnings) if not warning.startswith("Micro-batches")]

    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)


def test_unknown_argument_is_listed_once(tmp_path: Path) -> None:
    unread = job(tmp_path, SCRIPT.replace("EXTRA", "--frobnicate-weights")).unread

    assert unread[0] == "Not known to Megatron-LM or its launcher, and not in the prediction: --frobnicate-weights."
    assert sum("--frobnicate-weights" in sentence for sentence in unread) == 1


GPT2 = SCRIPT.replace(
    "--position-embedding-type rope --normalization RMSNorm --swiglu", "--max-position-embeddings 4096"
).replace("--group-query-attention --num-query-groups 8", "")


@pytest.mark.parametrize(
    ("script", "flags", "dropouts"),
    [
        (GPT2, "", (0.1, 0.0, 0.0)),
        (GPT2, "--attention-dropout 0.0", (0.0, 0.0, 0.0)),
        (GPT2, "--hidden-dropout 0.2", (0.1, 0.2, 0.2)),
        (GPT2.replace("--hidden-dropout 0", ""), "", (0.1, 0.1, 0.1)),
        (SCRIPT, "--attention-dropout 0", (0.0, 0.0, 0.0)),
        (SCRIPT, "", (0.1, 0.0, 0.0)),
        (SCRIPT.replace("--swiglu", "--squared-relu"), "--hidden-dropout 0.2", (0.1, 0.2, 0.0)),
    ],
)
def test_dropout_is_that_of_the_script(tmp_path: Path, script: str, flags: str, dropouts: tuple[float, ...]) -> None:
    model = job(tmp_path, script.replace("EXTRA", flags)).model
    assert (model.attention_dropout, model.residual_dropout, model.embedding_dropout) == dropouts


@pytest.mark.parametrize(
    ("script", "remark_name"),
    [
        (SCRIPT, ""),
        (SCRIPT.replace("--hidden-dropout 0", ""), "--hidden-dropout 0.1 (Megatron-LM's default) is predicted as none"),
        (SCRIPT.replace("EXTRA", "--hidden-dropout 0.2"), "--hidden-dropout 0.2 is predicted as none"),
        (GPT2.replace("EXTRA", "--hidden-dropout 0.2"), ""),
    ],
)
def test_dropout_unlike_the_models_is_reported(tmp_path: Path, script: str, remark_name: str) -> None:
    remarks = [remark for remark in job(tmp_path, script).rest.remarks if "dropout" in remark]
    assert [remark.partition(":")[0] for remark in remarks] == ([remark_name] if remark_name else [])


@pytest.mark.parametrize(
    ("flags", "optimizer"),
    [
        ("", 12),
        ("--use-precision-aware-optimizer", 10),
        ("--use-precision-aware-optimizer --store-param-remainders", 10),
        ("--use-precision-aware-optimizer --no-store-param-remainders", 12),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 6),
        ("--use-precision-aware-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5", 6),
    ],
)
def test_master_remainders_take_two_bytes(tmp_path: Path, flags: str, optimizer: int) -> None:
    read = job(tmp_path, SCRIPT.replace("EXTRA", flags))
    framework = framework_of_options(read.options.framework)

    assert parameter_bytes(read.options, shards=1, framework=framework).optimizer == optimizer
    assert "--store-param-remainders" not in "".join(read.unread)


@pytest.mark.parametrize(
    ("arguments", "norm", "range_"),
    [("", 1e-5, 0.02), ("--norm-epsilon 1e-6 --init-method-std 0.006", 1e-6, 0.006)],
)
def test_free_arguments_do_not_change_the_model(tmp_path: Path, arguments: str, norm: float, range_: float) -> None:
    model = job(tmp_path, SCRIPT.replace("EXTRA", arguments)).model
    assert (model.norm_eps, model.initializer_range) == (norm, range_)


def test_biases_disabled_in_a_log_are_not_read(tmp_path: Path) -> None:
    plain = "\n".join(line for line in LOG.splitlines() if "swiglu" not in line and "normalization" not in line)

    assert not job(tmp_path, f"{plain}\n  add_bias_linear ............. False\n").model.mlp_bias
    assert job(tmp_path, plain).model.mlp_bias
