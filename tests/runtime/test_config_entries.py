"""Config entries of any value train as in transformers or are refused."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError, RunOptions
from debubble.models import ModelConfig, models
from debubble.models.runtime_limits import beyond_runtime
from debubble.models.unit_entries import DEFAULTS, KNOWN, WITHOUT_EFFECT
from tests.support.runtime_cases import plan_of, tokens_of
from tests.support.tiny_models import FAMILIES, LLAMA, with_layers

pytest.importorskip("transformers", minversion="5")

import transformers

from tests.support.hf_reference import assert_trains_as_alone, exactly, hf_model

TINY = {
    "llama": LLAMA, "mistral": FAMILIES["mistral"], "qwen2": FAMILIES["qwen2"], "qwen3": FAMILIES["qwen3"],
    "gemma": FAMILIES["gemma"], "gemma2": FAMILIES["gemma2"], "gemma3_text": FAMILIES["gemma3"],
    "gpt2": FAMILIES["gpt2"], "mixtral": FAMILIES["mixtral"], "qwen3_moe": FAMILIES["qwen3-moe"],
}  # fmt: skip
"""Tiny model of every family that runs with units."""
RANDOM = ("dropout", "pdrop", "jitter")
"""Words in the names of entries that make a model draw random numbers."""
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ACTIVATIONS = ["gelu", "gelu_new", "quick_gelu", "relu", "silu", "tanh", "mish", "gelu_pytorch_tanh", "relu2"]
ROPES: list[Any] = [
    {"rope_type": "default", "rope_theta": 500.0}, {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
]  # fmt: skip
VALUES: dict[str, list[Any]] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ACTIVATIONS),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), ROPES),
    "layer_types": [KINDS, ["full_attention"] * 3], "sliding_window": [None, 3, 64], "n_inner": [40, None],
    "num_key_value_heads": [1, 4, None], "head_dim": [12, 16, None], "num_experts_per_tok": [1, 2],
    "num_local_experts": [3, 5], "num_experts": [3], "mlp_only_layers": [[], [1], [0, 2]], "decoder_sparse_step": [2],
    "hidden_size": [48], "intermediate_size": [40], "vocab_size": [53], "n_embd": [48], "n_head": [2],
    "num_attention_heads": [2], "max_window_layers": [0, 1, 9], "rope_theta": [500.0], "query_pre_attn_scalar": [5],
    "attn_logit_softcapping": [None, 2.0], "final_logit_softcapping": [None, 1.5], "sliding_window_pattern": [2],
    "rope_local_base_freq": [200.0], "pad_token_id": [None, 5], "n_positions": [80], "initializer_range": [0.1],
    "is_causal": [False], "num_hidden_layers": [3], "n_layer": [3], "pretraining_tp": [2], "is_decoder": [True],
    "partial_rotary_factor": [0.5], "use_bidirectional_attention": [True, None], "attention_bias": [True],
    "moe_intermediate_size": [12], "bos_token_id": [3], "eos_token_id": [[4, 5]], "max_position_embeddings": [64, 8],
    "problem_type": ["regression"], "chunk_size_feed_forward": [4],
}  # fmt: skip
"""Values to try per entry; the other entries get a value that is not their default."""


def entries_of(family: str) -> list[str]:
    """Deterministic entries of a family in transformers, and a few others."""
    config = transformers.AutoConfig.for_model(family).to_dict()
    unused = {"model_type", "transformers_version", "id2label", "label2id", "dtype"}
    names = {*config, *VALUES, *DEFAULTS} - {*unused, "is_encoder_decoder", "add_cross_attention", "pruned_heads"}
    return sorted(name for name in names if not any(word in name for word in RANDOM))


def values_of(family: str, name: str) -> list[Any]:
    """Values to try for an entry."""
    if name in VALUES:
        return VALUES[name]
    default = getattr(transformers.AutoConfig.for_model(family), name, DEFAULTS.get(name))
    if isinstance(default, bool) or default is None:
        return [not default]
    return [default * 0.5 + 0.25] if isinstance(default, float) else []


def single_changes(family: str) -> Iterator[dict[str, Any]]:
    """The tiny model with one entry at a time changed."""
    for name in entries_of(family):
        for value in values_of(family, name):
            yield {name: value}


def random_changes(family: str, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Random tiny models with several entries changed."""
    draw = random.Random(f"{family} {seed}")
    for _ in range(count):
        names = draw.sample(entries_of(family), draw.randint(2, 6))
        yield {name: draw.choice(values) for name in names if (values := values_of(family, name))}


def outcome(family: str, changes: dict[str, Any]) -> str:
    """Train a model: returns whether transformers or debubble refuses it, or both agree."""
    # transformers writes into the dictionaries of rotary positions that it is given.
    config = deepcopy({**with_layers(TINY[family], 3), **changes})
    if family == "gemma3_text" and "layer_types" not in changes:
        config.pop("layer_types")
    try:
        model = hf_model(config)
        model(tokens_of(config, rows=1))
    except Exception:  # any error of a model that transformers does not build or run
        return "not transformers'"
    try:
        plan = plan_of(db.schedules["gpipe"](devices=1, micro_batches=1), config)
        assert_trains_as_alone(model, plan, tokens_of(config, rows=2), within=exactly, rounding=1e-14)
    except InputError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}),
        ("llama", {"layer_types": KINDS, "sliding_window": 3}),
        ("llama", {"hidden_act": "quick_gelu"}),
        ("llama", {"rope_parameters": ROPES[2]}),
    ],
    ids=str,
)
def test_entry_is_computed_as_in_transformers(family: str, changes: dict[str, Any]) -> None:
    assert outcome(family, changes) == "trained"


@pytest.mark.parametrize("entry", [{"is_causal": False}, {"use_bidirectional_attention": True}])
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_attention_that_is_not_causal_is_refused(family: str, entry: dict[str, Any]) -> None:
    assert "predicts tokens from those before them" in outcome(family, entry)


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2", "qwen3_moe"])
def test_drawn_entries_train_as_transformers_does(family: str) -> None:
    for changes in random_changes(family, 3, seed=0):
        assert outcome(family, changes)


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY)
def test_every_entry_matches_transformers_or_is_refused(family: str) -> None:
    outcomes = [outcome(family, changes) for changes in single_changes(family)]
    outcomes += [outcome(family, changes) for changes in random_changes(family, 60, seed=1)]
    assert outcomes.count("trained") > len(outcomes) / 3


@pytest.mark.parametrize("family", KNOWN)
def test_every_entry_of_transformers_is_classified(family: str) -> None:
    config = transformers.AutoConfig.for_model(family).to_dict()
    assert config.keys() <= KNOWN[family] | DEFAULTS.keys() | WITHOUT_EFFECT
    for name in config.keys() & DEFAULTS.keys() - KNOWN[family]:
        assert config[name] == DEFAULTS[name] or not (config[name] or DEFAULTS[name]), name
    assert ModelConfig.from_hf({"model_type": family, **config}).beyond_units is None


def test_models_known_by_name_run_with_the_units() -> None:
    known_models = {name: model for name, model in models.items() if model.family in KNOWN}
    assert len(known_models) > 20
    assert {name: model.beyond_units for name, model in known_models.items()} == dict.fromkeys(known_models)


def test_plan_names_the_entry_that_prevents_units() -> None:
    remark = ModelConfig.from_hf({**LLAMA, "hidden_act": "mish"}).remark
    assert remark is not None
    assert "because debubble's own do not know the entry 'hidden_act: 'mish''" in remark


@pytest.mark.parametrize("options", [{"lora": 2}, {"quantize": "nf4"}, {"context": 2}], ids=str)
def test_refusal_names_the_config_entry_that_prevents_units(options: dict[str, Any]) -> None:
    refusal = beyond_runtime(RunOptions(**options), ModelConfig.from_hf({**LLAMA, "hidden_act": "mish"}))
    assert refusal is not None
    assert "runs with transformers' modules because its config has 'hidden_act: 'mish''" in refusal
