"""Files that a Primus file extends, in all versions of its syntax."""

from __future__ import annotations

from pathlib import Path

import pytest

from debubble.imports.job import ImportedJob
from debubble.ir import InputError
from tests.support import imported_jobs

OVERRIDES = "{micro_batch_size: 1, global_batch_size: 8, seq_length: 512}"
SIZES = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 128"


def primus(folder: Path, model: str, **files: str) -> ImportedJob:
    for name, text in {"mine": model, **files}.items():
        (folder / f"{name}.yaml").write_text(f"{{{text}}}")
    text = f"modules: {{pre_trainer: {{framework: megatron, model: mine, overrides: {OVERRIDES}}}}}"
    return imported_jobs.job("primus", folder, "a.yaml", text)


@pytest.mark.parametrize("word", ["extends: [other.yaml]", "extends: other.yaml", "bases: [other.yaml]"])
def test_primus_model_inherits_from_its_base(word: str, tmp_path: Path) -> None:
    assert primus(tmp_path, f"{word}, {SIZES}", other="ffn_hidden_size: 96").model.ffn == 96


def test_first_of_several_primus_bases_takes_precedence(tmp_path: Path) -> None:
    first, second = "ffn_hidden_size: 96", "ffn_hidden_size: 32"
    words = "bases: [first.yaml, second.yaml], includes: [second.yaml]"

    assert primus(tmp_path, f"{words}, {SIZES}", first=first, second=second).model.ffn == 96


def test_a_lost_base_of_a_model_of_primus_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"extends lost\.yaml, which is not there"):
        primus(tmp_path, f"bases: [lost.yaml], {SIZES}")


def test_zero_hybrid_ratios_describe_no_hybrid_layers(tmp_path: Path) -> None:
    assert primus(tmp_path, f"hybrid_attention_ratio: 0.0, hybrid_mlp_ratio: 0.0, {SIZES}").model.layers == 2


def titan(folder: Path, overrides: str, **files: str) -> ImportedJob:
    trainers = folder / "primus/configs/modules/torchtitan"
    trainers.mkdir(parents=True)
    for name, text in files.items():
        (trainers / f"{name}.yaml").write_text(text)
    text = f"modules: {{pre_trainer: {{framework: torchtitan, model: llama3.1_8B.yaml, overrides: {overrides}}}}}"
    return imported_jobs.job("torchtitan", folder, "a.yaml", text)


def test_trainer_file_sets_what_torchtitan_runs(tmp_path: Path) -> None:
    trainer = "bases: [lengths.yaml]\ntraining: {batch_size: 3}\nactivation_checkpoint: {mode: full}\n"
    read = titan(tmp_path, "{training: {steps: 9}}", pre_trainer=trainer, lengths="training: {seq_len: 4096}")

    assert (read.options.micro_batch_size, read.options.sequence_length) == (3, 4096)
    assert ("full", "full") in read.strategies.values()


def test_old_names_of_torchtitan_experiments_are_read(tmp_path: Path) -> None:
    assert titan(tmp_path, "{training: {batch_size: 2, seq_len: 1024}}").options.micro_batch_size == 2
