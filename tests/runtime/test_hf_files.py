"""Hugging Face checkpoints are loaded into a pipeline and saved from it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.runtime.weights.hf_files import checkpoint_files
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import plan_of, run_threads, slow_unless
from tests.support.tiny_models import FAMILIES, LLAMA

pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import transformers
from safetensors.torch import load_file, save_file

from tests.support.hf_reference import assert_checkpoint_returns


def plan(config: Any) -> Any:
    return plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), config, dtype="fp32")


@pytest.mark.parametrize("family", slow_unless(FAMILIES, "llama-tied", "gpt2", "mixtral"))
def test_checkpoint_round_trip_changes_nothing(family: Any, tmp_path: Path) -> None:
    assert_checkpoint_returns(FAMILIES[family], tmp_path, shard_size="1GB" if family == "gpt2" else "20KB")


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no checkpoint"):
        run_threads(plan(LLAMA), lambda pipeline: pipeline.load_pretrained(tmp_path))


def written(config: Any, folder: Path, tensors: Any = None, **entries: Any) -> Any:
    """Write a transformers model with changed tensors and config entries to a folder."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    model.save_pretrained(folder)
    file, described = folder / "model.safetensors", folder / "config.json"
    save_file({**load_file(file), **(tensors or {})}, file, metadata={"format": "pt"})
    described.write_text(json.dumps({**json.loads(described.read_text()), **entries}))
    return model


def loaded(config: Any, folder: Path, *, devices: int = 2) -> Any:
    """Parameters of a plan's model that is loaded from a folder."""
    schedule = db.schedules["1f1b"](devices=devices, micro_batches=2)

    def load(pipeline: Any) -> Any:
        pipeline.load_pretrained(folder)
        return pipeline.state_dict()

    states = run_threads(plan_of(schedule, config, dtype="fp32"), load)
    return {name: tensor for state in states for name, tensor in state.items()}


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "entries", "named"),
    [
        (LLAMA, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_parameters {"),
        (LLAMA, {"rms_norm_eps": 0.1}, "rms_norm_eps 0.1, the plan's 1e-05"),
        (LLAMA, {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, "head_dim 16, the plan's None"),
        (LLAMA, {"intermediate_size": 64}, "intermediate_size 64, the plan's 48"),
        (LLAMA, {"hidden_act": "mish"}, "hidden_act 'mish', the plan's 'silu'"),
        (GENERIC["granite"], {"logits_scaling": 3.0}, "logits_scaling 3.0, the plan's 2.0"),
        (GENERIC["olmo2"], {"model_type": "olmo3"}, "model_type 'olmo3', the plan's 'olmo2'"),
    ],
    ids=str,
)
def test_a_folder_of_another_model_is_refused(config: Any, entries: Any, named: str, tmp_path: Path) -> None:
    written(config, tmp_path, **entries)
    with pytest.raises(InputError, match=f"is of another model than the plan's: its config has {re.escape(named)}"):
        loaded(config, tmp_path)


@pytest.mark.parametrize("config", [LLAMA, GENERIC["granite"]], ids=["own", "transformers"])
def test_a_run_may_choose_dropout_padding_and_initial_weights(config: Any, tmp_path: Path) -> None:
    written(config, tmp_path, attention_dropout=0.5, pad_token_id=3, initializer_range=1.0, use_cache=False)
    assert loaded(config, tmp_path)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.ones(32, 32).to(torch.float8_e4m3fn), "float8_e4m3fn"), (torch.ones(32, 32, dtype=torch.int8), "int8")],
    ids=["float8", "int8"],
)
def test_weights_that_need_scales_are_refused(tensor: torch.Tensor, kind: str, tmp_path: Path) -> None:
    written(LLAMA, tmp_path, {f"{QUERY}.weight": tensor})
    with pytest.raises(InputError, match=f"'{QUERY}.weight' in .* is {kind}, whose scales debubble does not read"):
        loaded(LLAMA, tmp_path)


def test_a_quantised_folder_is_refused(tmp_path: Path) -> None:
    written(LLAMA, tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(InputError, match=r"is quantised \(fp8\), which debubble does not read"):
        loaded(LLAMA, tmp_path)


@pytest.mark.parametrize("config", [LLAMA, GENERIC["olmo2"]], ids=["own", "transformers"])
def test_unknown_parameter_is_named(config: Any, tmp_path: Path) -> None:
    written(config, tmp_path, {f"{QUERY}.bias": torch.ones(32)})
    with pytest.raises(InputError, match=f"has '{QUERY}.bias', which the plan's model lacks"):
        loaded(config, tmp_path)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    written(LLAMA, tmp_path, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    assert loaded(LLAMA, tmp_path)


@pytest.mark.parametrize("devices", [1, 2])
def test_tied_tables_that_differ_are_refused(devices: int, tmp_path: Path) -> None:
    config = FAMILIES["llama-tied"]
    written(config, tmp_path, {"lm_head.weight": torch.ones(61, 32)})
    with pytest.raises(InputError, match="has two tables that differ, and the plan's model ties them"):
        loaded(config, tmp_path, devices=devices)


def test_tied_checkpoint_initializes_an_untied_model(tmp_path: Path) -> None:
    table = written(FAMILIES["llama-tied"], tmp_path).model.embed_tokens.weight
    state = loaded(LLAMA, tmp_path)
    assert torch.equal(state["lm_head.weight"], table)
    assert torch.equal(state["model.embed_tokens.weight"], table)


@pytest.mark.parametrize(
    "config",
    [
        FAMILIES["gpt2"],
        FAMILIES["llama-tied"],
        *({**GENERIC[name], "tie_word_embeddings": True} for name in ("olmo2", "bloom")),
    ],
    ids=["gpt2", "llama", "olmo2", "bloom"],
)
def test_names_of_a_base_model_are_accepted(config: Any, tmp_path: Path) -> None:
    model = written(config, tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    state = loaded(config, tmp_path / "base")
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_base_model_has_no_head_for_untied_embeddings(tmp_path: Path) -> None:
    model = written(LLAMA, tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match=r"has no parameter 'lm_head\.weight'"):
        loaded(LLAMA, tmp_path / "base")


def test_index_may_name_only_files_of_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"names '../model.safetensors', which is no file of its folder"):
        checkpoint_files(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.safetensors", "is no whole safetensors file"),
        ("model.safetensors.index.json", "is no index of a checkpoint"),
    ],
)
def test_truncated_checkpoint_is_named(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"{")
    with pytest.raises(InputError, match=f"{name} {message}"):
        checkpoint_files(tmp_path)
