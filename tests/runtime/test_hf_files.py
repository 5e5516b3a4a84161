"""Checkpoints go from Hugging Face into a pipeline and back."""

from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError
from debubble.runtime.hf_files import checkpoint_files
from tests.support.runtime_cases import FAMILIES, LLAMA, plan_of, run_threads

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import transformers

from tests.support.hf_reference import assert_checkpoint_returns


def plan(config: Any) -> Any:
    return plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), config, dtype="fp32")


@pytest.mark.parametrize(
    ("family", "shard_size"), [*((family, "1GB") for family in FAMILIES), ("llama", "20KB"), ("mixtral", "20KB")]
)
def test_a_checkpoint_goes_in_and_out_unchanged(family: Any, shard_size: Any, tmp_path: Path) -> None:
    assert_checkpoint_returns(FAMILIES[family], tmp_path, max_shard_size=shard_size)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no checkpoint"):
        run_threads(plan(LLAMA), lambda pipeline: pipeline.load_pretrained(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    other = transformers.AutoConfig.for_model(**{**LLAMA, "intermediate_size": 64})
    transformers.AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has shape \[64, 32\] in the checkpoint, \[48, 32\] in the plan's"):
        run_threads(plan(LLAMA), lambda pipeline: pipeline.load_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.safetensors", "is no whole safetensors file"),
        ("model.safetensors.index.json", "is no index of a checkpoint"),
    ],
)
def test_a_checkpoint_that_is_cut_short_is_named(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(InputError, match=f"{name} {said}"):
        checkpoint_files(tmp_path)
