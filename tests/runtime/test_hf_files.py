"""Checkpoints go from Hugging Face into a pipeline and back."""

from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from tests.support.runtime_cases import FAMILIES, LLAMA, plan_of, run_threads, tokens_of

transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


def plan(config: Any) -> Any:
    return plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), config, dtype="fp32")


@pytest.mark.parametrize(
    ("family", "shard_size"), [*((family, "1GB") for family in FAMILIES), ("llama", "20KB"), ("mixtral", "20KB")]
)
def test_a_checkpoint_goes_in_and_out_unchanged(family: Any, shard_size: Any, tmp_path: Path) -> None:
    config = FAMILIES[family]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(tmp_path / "in", max_shard_size=shard_size)

    def through(pipeline: Any) -> Any:
        pipeline.load_pretrained(tmp_path / "in")
        pipeline.save_pretrained(tmp_path / "out")
        return pipeline.step(tokens_of(config, rows=2))

    losses = run_threads(plan(model.config.to_dict()), through)
    tokens = tokens_of(config, rows=2)
    logits = model(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-5, atol=0)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no checkpoint"):
        run_threads(plan(LLAMA), lambda pipeline: pipeline.load_pretrained(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    other = transformers.AutoConfig.for_model(**{**LLAMA, "intermediate_size": 64})
    transformers.AutoModelForCausalLM.from_config(other).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has shape \[64, 32\] in the checkpoint, \[48, 32\] in the plan's"):
        run_threads(plan(LLAMA), lambda pipeline: pipeline.load_pretrained(tmp_path))
