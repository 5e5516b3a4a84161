"""Megatron-LM: arguments of a plan's model, and the script that passes them to torchrun."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.costs import Cluster
from debubble.exports import Export, exports
from debubble.frameworks.megatron.import_ import known_flags
from debubble.frameworks.megatron.launch import launch_script
from debubble.imports import imports
from debubble.imports.registry import UserFacts
from debubble.plans import Plan
from tests.exports.hand_plans import LLAMA, MIXTRAL, one_f_one_b, priced

QWEN3_MOE = {
    **LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
    "mlp_only_layers": [0, 1], "num_key_value_heads": 4, "norm_topk_prob": False,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 1024, "n_layer": 4, "n_head": 8, "vocab_size": 16384, "n_positions": 4096}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Llama 3.1": {**db.models["llama3.1-8b"].config, "num_hidden_layers": 4},
    "tied, wide heads": {**LLAMA, "tie_word_embeddings": True, "head_dim": 256},
    "Qwen 2": {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2},
    "Qwen 3": {**LLAMA, "model_type": "qwen3", "num_key_value_heads": 2},
    "Mistral": {**LLAMA, "model_type": "mistral", "sliding_window": None},
    "GPT-2": GPT2,
    "Mixtral": MIXTRAL,
    "Qwen 3 with experts": QWEN3_MOE,
}


def written(made: Export, folder: Path) -> Path:
    for name, content in made.files.items():
        (folder / name).write_text(content)
    return folder


@pytest.mark.parametrize("file", ["megatron-arguments.sh", "launch.sh"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_files_alone_are_read_as_the_same_step(name: str, file: str, tmp_path: Path) -> None:
    plan = priced(config=CONFIGS[name], layers=(1, 1, 1, 1), data=2, tensor=2, zero=1, framework="megatron-lm")
    cluster = Cluster.parse("16xA100-80GB")

    made = exports["megatron"](plan)
    script = written(made, tmp_path) / file
    importer = imports["megatron"]
    imported = importer.job(importer.settings(script), script, UserFacts(cluster=cluster)).plan(cluster)

    assert made.losses == ()
    assert imported.simulate().makespan == plan.simulate().makespan
    assert imported.simulate().peak_memory == plan.simulate().peak_memory


def arguments(plan: Plan) -> list[str]:
    """Words of the model arguments of a plan."""
    script = exports["megatron"](plan).files["megatron-arguments.sh"]
    return script.partition("DEBUBBLE_MODEL_ARGS=(\n")[2].partition("\n)")[0].split()


def test_mixture_arguments_include_experts_and_routing() -> None:
    words = arguments(priced(config=QWEN3_MOE))

    assert words[words.index("--num-experts") :] == [
        "--num-experts", "4",
        "--moe-ffn-hidden-size", "512",
        "--moe-router-topk", "2",
        "--moe-layer-freq", "'([0]*2+[1]*2)'",
        "--moe-router-pre-softmax",
    ]  # fmt: skip


def test_dropouts_of_gpt2_are_megatrons_defaults() -> None:
    assert "--hidden-dropout" not in arguments(priced(config=GPT2))
    assert "--swiglu" not in arguments(priced(config=GPT2))


def test_scaling_of_llama_3_is_written_with_its_factor() -> None:
    words = arguments(priced(config=CONFIGS["Llama 3.1"]))

    assert words[words.index("--rotary-base") :][:5] == [
        "--rotary-base", "500000", "--use-rope-scaling", "--rope-scaling-factor", "8.0"
    ]  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_model_arguments_exist_in_megatron(name: str) -> None:
    flags = {word for word in arguments(priced(config=CONFIGS[name])) if word.startswith("--")}

    assert flags <= known_flags()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "mistral", "sliding_window": 1024}, "are not written for attention with windows"),
        ({"attention_bias": True}, "are not written for biases next to a gated MLP"),
        ({"hidden_act": "gelu"}, "are not written for the activation 'gelu'"),
        ({"model_type": "gemma", "num_key_value_heads": 8}, "are not written for models of the family 'gemma'"),
    ],
)
def test_unsupported_model_is_reported(changes: dict[str, Any], reason: str) -> None:
    plan = priced(config={**LLAMA, **changes})

    made = exports["megatron"](plan)
    assert "DEBUBBLE_MODEL_ARGS=(\n)\n" in made.files["megatron-arguments.sh"]
    (loss,) = made.losses
    assert reason in loss


def test_unsupported_rotary_scaling_is_reported() -> None:
    scaled = {**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}

    (loss,) = exports["megatron"](priced(config=scaled)).losses
    assert loss == "Rotary scaling of the type 'linear' is not written: give Megatron-LM's arguments for it yourself."


def test_a_vocabulary_is_padded_for_tensor_parallel_ranks() -> None:
    plan = priced(config={**LLAMA, "vocab_size": 16383}, tensor=2)

    assert "16384" in arguments(plan)
    assert exports["megatron"](plan).losses == (
        "The vocabulary of 16383 words is padded to 16384, which the tensor-parallel ranks divide.",
    )


def launched(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Output of a node's launch script with a torchrun that prints its arguments."""
    torchrun = folder / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    command = ["bash", str(folder / "launch.sh"), "--lr", "3e-4"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_the_launch_script_gives_all_arguments_to_torchrun(tmp_path: Path) -> None:
    folder = written(exports["megatron"](priced(data=2, tensor=4)), tmp_path)
    words = launched(folder, NODE_RANK="1", MASTER_ADDR="node0", TOKENIZER="gpt2", DATA="text").stdout.split()

    assert words[:11] == [
        "--nproc-per-node", "8", "--nnodes", "2", "--node-rank", "1", "--master-addr", "node0",
        "--master-port", "29500", "pretrain_gpt.py",
    ]  # fmt: skip
    assert {"--hidden-size", "--pipeline-model-parallel-layout"} <= set(words)
    assert words[-8:] == [
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2", "--data-path", "text", "--lr", "3e-4"
    ]  # fmt: skip


def test_a_variable_that_is_not_set_is_named(tmp_path: Path) -> None:
    folder = written(exports["megatron"](priced(data=2, tensor=4)), tmp_path)

    assert "NODE_RANK: is 0 on the first of 2 nodes" in launched(folder).stderr
    alone = written(exports["megatron"](priced()), tmp_path)
    assert "TOKENIZER: is the name or the folder of a tokenizer" in launched(alone).stderr


def test_nodes_of_different_sizes_start_a_rank_per_gpu() -> None:
    assert "--nproc-per-node gpu\n    --nnodes 2\n" in launch_script(Cluster.parse("12xA100-80GB"), 12)


def test_a_plan_without_a_model_has_no_launch_script() -> None:
    assert set(exports["megatron"](one_f_one_b([2, 2])).files) == {"megatron-arguments.sh", "megatron_bridge.py"}
