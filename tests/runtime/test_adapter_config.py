"""Saved adapters of a different model are refused, even if their shapes match."""

import json
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from tests.support.runtime_cases import plan_of, run_threads
from tests.support.tiny_models import LLAMA, MISTRAL

pytest.importorskip("safetensors")


def plan_for(config: Any) -> Any:
    return plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), config, dtype="fp32", lora=3)


def saved_adapters(config: Any, folder: Path) -> Any:
    plan = plan_for(config)
    run_threads(plan, lambda pipeline: pipeline.save_pretrained(folder))
    return plan


@pytest.mark.parametrize(
    ("config", "entries", "message"),
    [
        (MISTRAL, {}, "for a model of the family 'llama', and the plan's is 'mistral'"),
        ({**LLAMA, "num_hidden_layers": 1}, {}, "for a model of at least 4 layers, and the plan's has 1"),
        (LLAMA, {"lora_alpha": 3}, "are scaled by 1 on 'model.layers.0.self_attn.q_proj', and the plan's by 2"),
        (LLAMA, {"use_rslora": True}, "are scaled by 3.4641 on"),
        (LLAMA, {"use_dora": True}, "have another 'use_dora'"),
        (LLAMA, {"r": "three"}, "is no config of peft's adapters"),
    ],
)  # fmt: skip
def test_adapters_of_another_model_or_kind_are_refused(config: Any, entries: Any, message: str, tmp_path: Path) -> None:
    saved_adapters(LLAMA, tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    with pytest.raises(InputError, match=message):
        Pipeline(None, plan_for(config)).load_pretrained(tmp_path)


def test_family_of_saved_adapters_comes_from_their_model(tmp_path: Path) -> None:
    plan = saved_adapters(LLAMA, tmp_path)
    file, base = tmp_path / "adapter_config.json", tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**LLAMA, "model_type": "qwen2"}))
    entries = {"auto_mapping": None, "base_model_name_or_path": str(base)}
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    with pytest.raises(InputError, match="for a model of the family 'qwen2', and the plan's is 'llama'"):
        Pipeline(None, plan).load_pretrained(tmp_path)
