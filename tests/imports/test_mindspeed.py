"""Scripts of MindSpeed-LLM: its arguments for layers are read like Megatron-LM's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from debubble.costs import framework_of_options
from debubble.frameworks.megatron.changes import conflicts, switches
from debubble.frameworks.megatron.mindspeed import SWAP_OPTIMIZER
from debubble.frameworks.megatron.stages import LAYOUT
from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from debubble.targets.target import sparse_layers
from tests.support import imported_jobs

RUN = """
msrun --local_worker_num 8 pretrain_gpt.py --use-mcore-models --num-layers 8 --hidden-size 1024 \\
    --ffn-hidden-size 4096 --num-attention-heads 16 --kv-channels 64 --padded-vocab-size 32000 \\
    --seq-length 1024 --max-position-embeddings 1024 --position-embedding-type rope \\
    --normalization RMSNorm --swiglu --disable-bias-linear --hidden-dropout 0.0 \\
    --attention-dropout 0.0 --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 16 --bf16 \\
    --pipeline-model-parallel-size 2 MORE
"""
EXPERTS = "--num-experts 16 --moe-router-topk 2 --moe-intermediate-size 512"


def job(folder: Path, more: str, **facts: Any) -> ImportedJob:
    return imported_jobs.job("megatron", folder, "run.sh", RUN.replace("MORE", more), cluster="8xH100-80GB", **facts)


@pytest.mark.parametrize(
    ("more", "family", "experts"),
    [
        ("--spec mindspeed_llm.tasks.models.spec.qwen3_spec layer_spec --qk-layernorm", "qwen3", None),
        ("--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec --post-norm --use-fused-rmsnorm", "glm4", None),
        (EXPERTS, "mixtral", (16, 512, 8)),
        (f"{EXPERTS} --n-shared-experts 2 --shared-expert-gate", "qwen2_moe", (16, 512, 8)),
        (f"{EXPERTS} --first-k-dense-replace 3 --moe-layer-freq 1 --qk-layernorm", "qwen3_moe", (16, 512, 5)),
        (f"{EXPERTS} --first-k-dense-replace 2 --moe-layer-freq 2 --qk-layernorm", "qwen3_moe", (16, 512, 3)),
        (
            f"{EXPERTS} --n-shared-experts 1 --first-k-dense-replace 1 --spec"
            " mindspeed_llm.tasks.models.spec.deepseek_spec layer_spec --multi-head-latent-attention"
            " --qk-rope-head-dim 64 --qk-nope-head-dim 128 --q-lora-rank 256 --kv-lora-rank 128 --v-head-dim 128",
            "deepseek_v3",
            (16, 512, 7),
        ),
    ],
)
def test_layers_are_read_by_mindspeeds_names(
    tmp_path: Path, more: str, family: str, experts: tuple[int, ...] | None
) -> None:
    model = job(tmp_path, more).model
    mixture = model.experts
    sparse = len(sparse_layers(model))

    assert model.family == family
    assert (None if mixture is None else (mixture.count, mixture.ffn, sparse)) == experts


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ("--noop-layers 6,7", [4, 2]),
        ("--noop-layers 0,7 --num-layers-per-virtual-pipeline-stage 2", [1, 2, 2, 1]),
    ],
)
def test_empty_layers_are_not_counted(tmp_path: Path, more: str, stages: list[int]) -> None:
    read = job(tmp_path, more)
    assert (read.model.layers, list(read.layers)) == (6, stages)


def test_other_specs_are_asked_for_as_a_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--spec describes layers that are not read here: give the model's config"):
        job(tmp_path, "--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec")


def test_reused_fp32_parameters_take_four_bytes(tmp_path: Path) -> None:
    options = job(tmp_path, "--reuse-fp32-param").options
    assert framework_of_options(options.framework).keeps_remainders


@pytest.mark.parametrize("words", ["--schedules-method dualpipev", "--use-dualpipev"])
def test_dualpipev_is_a_schedule_of_two_stages_per_device_in_a_v(tmp_path: Path, words: str) -> None:
    read = job(tmp_path, words)
    assert (read.order, tuple(read.layers)) == ("dualpipe-v", (2, 2, 2, 2))


def test_an_unknown_schedules_method_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--schedules-method is 'ring', which is not known here; there are: dualpipev"):
        job(tmp_path, "--schedules-method ring")


@pytest.mark.parametrize(
    "words",
    [
        "--lora-r 16 --lora-alpha 32", "--lora-rank 16 --target-modules all-linear",
        "--peft-type lora --lora-dim 16 --lora-in-init-method xavier",
    ],
)  # fmt: skip
def test_adapter_arguments_of_forks_are_read(tmp_path: Path, words: str) -> None:
    read = job(tmp_path, words)
    assert (read.options.lora, read.rest.unknown) == (16, ())


def test_a_rank_of_zero_has_no_adapters(tmp_path: Path) -> None:
    assert job(tmp_path, "--lora-rank 0").options.lora == 0


def test_adapters_of_some_layers_are_reported(tmp_path: Path) -> None:
    read = job(tmp_path, "--lora-r 8 --lora-target-modules linear_proj")
    assert "Adapters are on linear_proj, and the prediction counts on all linear layers." in read.unread


def test_quantised_weights_of_adapters_are_asked_for(tmp_path: Path) -> None:
    assert any("give --quantize nf4" in remark for remark in job(tmp_path, "--lora-r 8 --qlora").unread)


def test_a_list_of_layers_per_stage_is_read(tmp_path: Path) -> None:
    assert tuple(job(tmp_path, "--num-layer-list 5,3").layers) == (5, 3)


def test_layer_list_is_replaced_by_a_layout() -> None:
    assert list(conflicts({"--num-layer-list": "5,3"}, {LAYOUT: "Et|tL"})) == ["--num-layer-list"]


def test_swapped_states_are_the_hosts(tmp_path: Path) -> None:
    read = job(tmp_path, "--use-distributed-optimizer --swap-optimizer --swap-optimizer-times 8")
    assert read.options.host_optimizer == 1
    assert any(remark.startswith("--swap-optimizer: the states are predicted on the host") for remark in read.unread)


def test_switches_leave_out_the_swap(tmp_path: Path) -> None:
    options = job(tmp_path, "--swap-optimizer").options
    assert {SWAP_OPTIMIZER: None} in list(switches({SWAP_OPTIMIZER: True}, options))


def test_stages_that_do_more_than_train_are_warned_of(tmp_path: Path) -> None:
    assert not any("--stage" in warning for warning in job(tmp_path, "--stage sft").warnings)
    assert any("--stage dpo: training alone is predicted" in line for line in job(tmp_path, "--stage dpo").warnings)


def test_mindspeed_arguments_are_not_treated_as_typos(tmp_path: Path) -> None:
    read = job(tmp_path, "--use-fused-rmsnorm --context-parallel-algo ulysses_cp_algo")
    assert read.rest.warnings == ()
    assert {"--use-fused-rmsnorm", "--context-parallel-algo"} <= {*read.rest.unknown}


def test_extended_expert_ranks_have_full_experts(tmp_path: Path) -> None:
    degrees = "--tensor-model-parallel-size 2 --expert-model-parallel-size 2 --moe-tp-extend-ep"
    options = job(tmp_path, f"{EXPERTS} {degrees}").options
    assert (options.expert, options.expert_tensor) == (4, 1)


def test_gemma_layer_specs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--spec describes layers that are not read here"):
        job(tmp_path, "--spec mindspeed_llm.tasks.models.spec.gemma2_spec layer_spec --post-norm --input-embeds-norm")
