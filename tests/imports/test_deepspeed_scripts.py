"""Launch scripts that write, or have next to them, a DeepSpeed configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

import debubble as db
from debubble.imports.job import ImportedJob
from debubble.imports.shell.scripts import follow
from debubble.ir import InputError
from tests.support import imported_jobs

MEGATRON = (
    "deepspeed pretrain_gpt.py --deepspeed --deepspeed_config ds.json --num-layers 4 --hidden-size 64"
    " --num-attention-heads 4 --seq-length 64 --vocab-size 128 --micro-batch-size 1 --global-batch-size 32 --bf16"
)
TRAINER = "deepspeed train.py --deepspeed ds.json --model_name_or_path llama-tiny --output_dir out --max_length 64"


def megatron(folder: Path, config: str, more: str = "") -> ImportedJob:
    (folder / "ds.json").write_text(config)
    return imported_jobs.job("megatron", folder, "run.sh", f"{MEGATRON} {more}")


def trainer(folder: Path, script: str) -> ImportedJob:
    (folder / "ds.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}')
    return imported_jobs.job("deepspeed", folder, "run.sh", script)


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ('Z=3; cat <<EOT > ds.json\n{"stage": $Z}\nEOT\n', '{"stage": 3}\n'),
        ("cat > ds.json <<'EOT'\n{\"stage\": $Z}\nEOT\n", '{"stage": $Z}\n'),
        ("tee ds.json <<EOT >/dev/null\n{}\nEOT\n", "{}\n"),
        ("D=ds; echo '{\"a\":' 1 > $D.json; echo '}' >> $D.json", '{"a": 1\n}\n'),
        ("> log\nwrite() { cat > ds.json <<EOT\n$1\nEOT\n}\nwrite 4 2> error", "4\n"),
    ],
)
def test_files_that_a_script_writes_are_read(script: str, text: str) -> None:
    assert follow(script, Path("run.sh")).files["ds.json"] == text


def test_the_configuration_decides_the_zero_level(tmp_path: Path) -> None:
    job = megatron(tmp_path, '{"zero_optimization": {"stage": 3}}', "--no-pipeline-parallel --zero-stage 1")

    assert job.options.zero == 3
    assert job.warnings == (
        "deepspeed_config.zero_optimization.stage is 3, and the script has 1: the configuration's is predicted.",
    )


def test_a_contradicting_batch_is_told(tmp_path: Path) -> None:
    assert megatron(tmp_path, '{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 32}').warnings == (
        "deepspeed_config.train_micro_batch_size_per_gpu is 2, and the script has 1: that is predicted.",
    )


def test_zero_2_needs_a_job_without_pipeline(tmp_path: Path) -> None:
    assert megatron(tmp_path, '{"zero_optimization": {"stage": 2}}').warnings == (
        "DeepSpeed does not start: ZeRO-2 needs --no-pipeline-parallel, which is predicted.",
    )


def test_a_configuration_that_is_not_there_is_told(tmp_path: Path) -> None:
    unread = imported_jobs.job("megatron", tmp_path, "run.sh", MEGATRON).unread

    assert any(
        "neither in the script nor next to it: predicted is none; give it with --args" in line for line in unread
    )


def test_a_launch_in_an_open_loop_is_told(tmp_path: Path) -> None:
    jobs = [
        trainer(tmp_path, f"for i in $(seq $N); do {TRAINER}; done"),
        imported_jobs.job("megatron", tmp_path, "run.sh", f"for i in $(seq $N); do {MEGATRON} --zero-stage 1; done"),
    ]

    sentence = (
        "The training is in a loop that the file does not decide (line 1: for i in $(seq $N)): predicted is one run of"
        " it."
    )
    assert [sentence in (*job.warnings, *job.unread) for job in jobs] == [True, True]


def test_a_dtype_that_the_trainer_lacks_is_fp32(tmp_path: Path) -> None:
    assert [trainer(tmp_path, f"{TRAINER} {more}").options.dtype for more in ("", "--bf16 True")] == ["fp32", "bf16"]


@pytest.mark.parametrize(("more", "rank"), [("--use_lora", 8), ("--use_lora True --lora_r 64", 64), ("", 0)])
def test_adapters_of_a_program_are_read(more: str, rank: int, tmp_path: Path) -> None:
    assert trainer(tmp_path, f"{TRAINER} {more}").options.lora == rank


def test_quantised_weights_are_asked_for(tmp_path: Path) -> None:
    unread = trainer(tmp_path, f"{TRAINER} --use_lora --q_lora True").unread

    assert "--q_lora: frozen weights are predicted unquantised; give --quantize nf4 for those of 4 bits." in unread


def test_a_misspelt_argument_of_a_script_is_told(tmp_path: Path) -> None:
    [warning] = trainer(tmp_path, f"{TRAINER} --gradient_acumulation_steps 4").rest.warnings

    assert "--gradient_acumulation_steps (did you mean --gradient_accumulation_steps?)" in warning


def test_megatron_names_the_importer_of_a_trainers_script(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"`debubble import deepspeed .*run\.sh` reads scripts of Transformers' Trainer"
    ):
        imported_jobs.job("megatron", tmp_path, "run.sh", TRAINER)


def test_deepspeed_names_the_importer_of_megatrons_script(tmp_path: Path) -> None:
    with pytest.raises(db.InputError, match="starts Megatron-DeepSpeed: `debubble import megatron"):
        trainer(tmp_path, MEGATRON)


def test_an_open_deviation_of_weights_decides_nothing(tmp_path: Path) -> None:
    assert megatron(tmp_path, "{}", "--init-method-std $(bc -l x)").model.initializer_range == 0.02
