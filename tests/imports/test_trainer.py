"""DeepSpeed configurations whose `auto` entries the arguments of Transformers' Trainer fill in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.support import imported_jobs

AUTO = {
    "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
}  # fmt: skip
WORDS = (
    "--deepspeed ds.json --model_name_or_path llama-tiny --max_seq_length 512 --per_device_train_batch_size 2"
    " --gradient_accumulation_steps 4 --bf16 True --gradient_checkpointing True"
)


def job(folder: Path, args: str, config: dict[str, Any] = AUTO, **facts: Any) -> ImportedJob:
    return imported_jobs.job("deepspeed", folder, "ds.json", json.dumps(config), args=args, **facts)


@pytest.mark.parametrize("between", [" ", "="])
def test_trainer_arguments_replace_auto(tmp_path: Path, between: str) -> None:
    words = WORDS.split()
    read = job(
        tmp_path, " ".join(f"{name}{between}{value}" for name, value in zip(words[::2], words[1::2], strict=True))
    )

    assert (read.model, read.micro_batches) == (db.models["llama-tiny"], 4)
    assert (read.options.dtype, read.options.micro_batch_size, read.options.sequence_length) == ("bf16", 2, 512)
    assert set(read.strategies.values()) == {("full", "full")}


def test_a_flag_of_the_trainer_needs_no_value(tmp_path: Path) -> None:
    assert job(tmp_path, WORDS.replace("--bf16 True", "--bf16")).options.dtype == "bf16"


def test_user_options_override_arguments(tmp_path: Path) -> None:
    read = job(tmp_path, WORDS, model=db.models["llama3-8b"], sequence_length=4096, recompute="none")
    assert (read.model, read.options.sequence_length, read.strategies) == (db.models["llama3-8b"], 4096, {})


@pytest.mark.parametrize(
    ("name", "optimizer", "remarks"),
    [
        ("adamw_torch_fused", "adamw", []),
        ("paged_adamw_8bit", "adamw-8bit", []),
        ("paged_adamw_32bit", "adamw", []),
        ("lion_32bit", "lion", []),
        ("adafactor", "adamw", ["--optim adafactor is predicted as adamw."]),
    ],
)
def test_the_nearest_optimizer_is_predicted(tmp_path: Path, name: str, optimizer: str, remarks: list[str]) -> None:
    read = job(tmp_path, f"{WORDS} --optim {name}")

    assert read.options.optimizer == optimizer
    assert [sentence for sentence in read.unread if sentence.startswith("--optim")] == remarks


def test_the_optimizer_of_the_configuration_is_that_of_the_job(tmp_path: Path) -> None:
    read = job(tmp_path, f"{WORDS} --optim adafactor", {**AUTO, "optimizer": {"type": "AdamW"}})
    assert read.options.optimizer == "adamw"
    assert not any(sentence.startswith("--optim") for sentence in read.unread)


def test_contradicting_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="per_gpu is 1, and --per_device_train_batch_size 2, which the Trainer ref"):
        job(tmp_path, WORDS, {**AUTO, "train_micro_batch_size_per_gpu": 1})


def test_missing_trainer_arguments_are_requested(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"leaves gradient_accumulation_steps to your trainer \('auto'\)"):
        job(tmp_path, WORDS.replace("--gradient_accumulation_steps 4", ""))


def test_an_argument_named_as_an_entry_is_not_misspelt(tmp_path: Path) -> None:
    words = WORDS.replace("--max_seq_length", "--block_size").replace("--gradient_accumulation_steps 4", "")

    with pytest.raises(InputError, match=r"ds\.json leaves gradient_accumulation_steps to your trainer"):
        job(tmp_path, words)


def test_arguments_of_the_trainer_that_cost_nothing_are_known(tmp_path: Path) -> None:
    costs_nothing = "--learning_rate 2e-5 --output_dir out --logging_steps 10 --save_strategy epoch --report_to none"
    assert job(tmp_path, f"{WORDS} {costs_nothing}").rest.unknown == ()


@pytest.mark.parametrize("argument", ["--max_seq_length", "--max_length", "--block_size"])
def test_sequence_length_is_reported_by_its_argument(tmp_path: Path, argument: str) -> None:
    words = WORDS.replace("--max_seq_length", argument)
    as_given, other = job(tmp_path, words), job(tmp_path, words, sequence_length=4096)

    assert [remark for remark in as_given.unread if argument in remark] == [
        f"Every sequence is predicted with the whole {argument}, as packed ones have; shorter ones take less."
    ]
    assert [remark for remark in other.unread if argument in remark] == [
        f"Sequences are predicted with --sequence-length 4096, not with {argument} 512."
    ]


@pytest.mark.parametrize(
    ("more", "rank"),
    [
        ("--finetuning_type lora", 8), ("--lora_rank 32", 32), ("--use_peft", 16), ("--use_peft True --lora_r 4", 4),
        ("--finetuning_type full --lora_rank 8", 0), ("--use_peft False --lora_r 4", 0), ("", 0),
    ],
)  # fmt: skip
def test_adapters_of_a_trainer_are_read(tmp_path: Path, more: str, rank: int) -> None:
    assert job(tmp_path, f"{WORDS} {more}").options.lora == rank


@pytest.mark.parametrize(
    ("argument", "near"),
    [
        ("--gradient_checkpoining True", "--gradient_checkpointing"),
        ("--save_stratgy no", "--save_strategy"),
        ("--per_device_train_batchsize 1", "--per_device_train_batch_size"),
        ("--lora_targets all", "--lora_target"),
    ],
)
def test_misspelt_arguments_of_the_trainer_are_told(argument: str, near: str, tmp_path: Path) -> None:
    [warning] = job(tmp_path, f"{WORDS} {argument}").rest.warnings

    assert warning == (
        "Not known to DeepSpeed or the Trainer, misspelt or of a fork, and not in the prediction:"
        f" {argument.partition(' ')[0]} (did you mean {near}?)."
    )


@pytest.mark.parametrize(
    "argument",
    ["--evaluation_strategy no", "--group_by_length True", "--tokenizer_name_or_path x", "--data_mixture_path x"],
)
def test_other_arguments_of_a_program_are_not_misspelt(argument: str, tmp_path: Path) -> None:
    assert job(tmp_path, f"{WORDS} {argument}").rest.warnings == ()
