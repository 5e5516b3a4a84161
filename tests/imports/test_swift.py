"""ms-swift's `megatron` command: differences from Megatron-LM, and calls that are no plain training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from debubble.imports.job import ImportedJob
from debubble.imports.training_scripts import swift_command
from debubble.ir import InputError
from tests.support import imported_jobs

SFT = "megatron sft --model Qwen/Qwen3-0.6B --max_length 2048 --packing true"
VISION = SFT.replace("Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-VL-7B-Instruct")


def job(folder: Path, text: str, **facts: Any) -> ImportedJob:
    return imported_jobs.job("megatron", folder, "job.sh", text, cluster="8xH100-80GB", **facts)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("megatron sft --lr 1", "megatron sft"),
        ("srun --nodes 2 /opt/bin/megatron rlhf --lr 1", "megatron rlhf"),
        ("torchrun --nproc_per_node 8 swift/cli/_megatron/sft.py --lr 1", "megatron sft"),
        ("torchrun swift/cli/sft.py --lr 1", "swift sft"),
        ("swift merge_lora --model x", "swift merge-lora"),
        ("python pretrain_gpt.py --lr 1 --save swift", None),
    ],
)
def test_ms_swift_command_is_recognized(words: str, command: str | None) -> None:
    assert swift_command(words.split()) == command


def test_the_summary_names_the_defaults_and_all_is_predicted(tmp_path: Path) -> None:
    assert job(tmp_path, f"{SFT} --save_steps 5 --dataset a b --finetune --lr 1e-5").rest.not_predicted == 0
    assert job(tmp_path, SFT).summary == (
        "computes in bf16 (default of ms-swift), gradients in fp32 (default of ms-swift), ZeRO-1 (default of ms-swift),"
        " a global batch of 16 (default of ms-swift)"
    )


def test_recomputation_that_is_off_by_name_is_no_warning(tmp_path: Path) -> None:
    read = job(tmp_path, f"{SFT} --recompute_granularity none")

    assert (read.warnings, read.strategies) == ((), {})


@pytest.mark.parametrize("value", ["True", "yes"])
def test_switch_accepts_all_words_for_true(value: str, tmp_path: Path) -> None:
    text = f"{SFT} --tensor_model_parallel_size 2 --sequence_parallel"

    assert job(tmp_path, f"{text} {value}").options.sequence_parallel
    assert not job(tmp_path, f"{text} 0").options.sequence_parallel


def test_arguments_may_be_in_a_yaml_file(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "ENV: {NPROC_PER_NODE: 4}\nmodel: Qwen/Qwen3-0.6B\nmax_length: 2048\npacking: true\ntuner_type: lora\n"
        "tensor_model_parallel_size: 4\nglobal_batch_size: 32\ndataset: [a, b]\n"
    )
    read = job(tmp_path, "megatron sft runs/sft.yaml --global_batch_size 64")

    assert (read.options.tensor, read.options.lora, read.micro_batches) == (4, 8, 32)
    assert read.warnings == (
        "The job starts 4 ranks (NPROC_PER_NODE 4), and --cluster has 8 devices, which are predicted.",
    )


def test_the_ranks_of_a_command_are_those_of_its_environment(tmp_path: Path) -> None:
    assert job(tmp_path, f"export NNODES=3\nNNODES=2 NPROC_PER_NODE=8 {SFT}").warnings == (
        "The job starts 16 ranks (NNODES 2 x NPROC_PER_NODE 8), and --cluster has 8 devices, which are predicted.",
    )


@pytest.mark.parametrize(("argument", "layers"), [("", 0), ("--mtp_num_layers 1", 1)])
def test_further_tokens_are_predicted_only_where_asked(argument: str, layers: int, tmp_path: Path) -> None:
    text = f"megatron sft --model ZhipuAI/GLM-4.5-Air --max_length 2048 --expert_model_parallel_size 8 {argument}"

    assert job(tmp_path, text).model.mtp_layers == layers


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        (SFT.replace("--packing true", ""), "Without --packing sequences are as long as their samples"),
        (f"{SFT} --task_type seq_cls --num_labels 3", "--task_type seq_cls: its head is predicted as one of the"),
        (SFT.replace("sft", "rlhf --rlhf_type rm"), "--task_type seq_cls: its head is predicted as one of the"),
        (f"{SFT} --tuner_type lora_llm", "--tuner_type lora_llm: the vision tower, which it trains as well, is not"),
        (f"{SFT} --tuner_type lora --target_modules linear_qkv linear_proj", "Adapters are on linear_proj linear_qkv"),
        (f"{SFT} --optimizer dist_muon", "--optimizer dist_muon divides its states between replicas"),
        (SFT.replace("Qwen/Qwen3-0.6B", "google/gemma-3-4b-it"), "The vision tower is frozen unless --freeze_vit is"),
        (
            f"{VISION} --tuner_type lora --freeze_vit false",
            "--freeze_vit false: the vision tower has adapters too, and",
        ),
    ],
)
def test_differing_predictions_are_reported(text: str, remark: str, tmp_path: Path) -> None:
    (actual,) = job(tmp_path, text).rest.remarks

    assert actual.startswith(remark)


def test_adapters_with_a_frozen_vision_tower_are_predicted(tmp_path: Path) -> None:
    read = job(tmp_path, f"{VISION} --tuner_type lora --lora_rank 16")

    assert (read.options.lora, read.rest.remarks) == (16, ())


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("megatron rlhf --rlhf_type grpo --lr 1", "a step of --rlhf_type grpo also generates its samples"),
        ("megatron rlhf --lr 1", "a step of --rlhf_type dpo also runs a reference model"),
        ("megatron rlhf --rlhf_type rm --lr 1", "a step of --rlhf_type rm also has pairs of sequences"),
        (f"{SFT} --task_type embedding", "the samples of --task_type embedding are several sequences each"),
        ("megatron export --tensor_model_parallel_size 2", "runs `megatron export`, which trains nothing"),
        ("megatron sft --mcore_model x --max_length 8 --lr 1", "names no model: give it with --model"),
        (SFT.replace("--max_length 2048", ""), "does not say --max_length, which is the model's longest then: give"),
        ("megatron sft far.yaml", "has its arguments in far.yaml, which is not next to it: put it there"),
    ],
)
def test_non_training_steps_are_refused(text: str, refusal: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=refusal):
        job(tmp_path, text)


def test_defaults_that_are_on_are_switched_off_explicitly(run: Any, tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(SFT)
    _, out, _ = run("import", "megatron", str(tmp_path / "job.sh"), "--cluster", "8xH100-80GB", "--planner", "adapipe")

    assert "  --recompute-granularity none\n" in out
