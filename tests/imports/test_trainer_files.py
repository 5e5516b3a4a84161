"""Files of accelerate and of trainers that have or name a DeepSpeed configuration."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.imports import imports
from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.support import imported_jobs

ACCELERATE = "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {zero_stage: 2}\n"
FACTORY = "model_name_or_path: llama-tiny\ntemplate: ours\nbf16: true\ndeepspeed: ds.json\n"
AUTO = '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "gradient_accumulation_steps": "auto"}'


def accelerate(folder: Path, text: str, args: str | None = "--per_device_train_batch_size 1") -> ImportedJob:
    facts: dict[str, Any] = {"model": db.models["llama-tiny"], "sequence_length": 64, "micro_batches": 2}
    return imported_jobs.job("deepspeed", folder, "a.yaml", text, args=args, **facts)


def factory(folder: Path, text: str) -> ImportedJob:
    (folder / "ds.json").write_text(AUTO)
    return imported_jobs.job("deepspeed", folder, "a.yaml", text)


def test_a_misspelt_entry_of_accelerate_is_told(tmp_path: Path) -> None:
    assert accelerate(tmp_path, ACCELERATE.replace("zero_stage", "zero_stge")).rest.warnings == (
        "Not known to DeepSpeed, misspelt or of a fork, and not in the prediction:"
        " deepspeed_config.zero_stge (did you mean deepspeed_config.zero_stage?).",
    )


def test_accelerate_leaves_the_batch_to_the_script(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="leaves train_micro_batch_size_per_gpu to your trainer"):
        accelerate(tmp_path, ACCELERATE, args=None)


def test_accelerate_starts_deepspeed_with_zero_2(tmp_path: Path) -> None:
    assert accelerate(tmp_path, ACCELERATE.replace("zero_stage: 2", "zero3_init_flag: false")).options.zero == 2


def test_fp8_of_accelerate_is_not_predicted(tmp_path: Path) -> None:
    job = accelerate(tmp_path, ACCELERATE.replace("bf16", "fp8"))

    assert (job.options.dtype, job.rest.unknown) == ("bf16", ("mixed_precision",))


def test_defaults_that_a_file_leaves_are_told(tmp_path: Path) -> None:
    assert (
        "The file leaves these to their defaults: --per_device_train_batch_size 8 --gradient_accumulation_steps 1"
        " --finetuning_type lora --cutoff_len 2048."
    ) in factory(tmp_path, FACTORY).unread


def test_llama_factory_checkpoints_unless_told(tmp_path: Path) -> None:
    jobs = [factory(tmp_path, f"{FACTORY}{more}") for more in ("", "disable_gradient_checkpointing: true")]

    assert [bool(job.strategies) for job in jobs] == [True, False]


def test_frozen_layers_are_predicted_as_trained(tmp_path: Path) -> None:
    job = factory(tmp_path, f"{FACTORY}finetuning_type: freeze")

    assert "--finetuning_type freeze is predicted as full: its frozen layers take less." in job.unread


@pytest.mark.parametrize(
    ("entries", "instead"),
    [
        ("distributed_type: FSDP", "--pipeline 1 --data 4 --zero 3 "),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP}", "--data 4 --zero 2 "),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: true}", "--data 4 --zero 3 "),
        ("distributed_type: MULTI_GPU", "--data 4 --zero 0 "),
        ("distributed_type: MEGATRON_LM", "`debubble import megatron`"),
    ],
)
def test_other_accelerate_jobs_are_refused_with_a_command(tmp_path: Path, entries: str, instead: str) -> None:
    (tmp_path / "a.yaml").write_text(f"{entries}\nnum_processes: 4\n")
    with pytest.raises(InputError, match=re.escape(instead)):
        imports["deepspeed"].read(tmp_path / "a.yaml", None)
