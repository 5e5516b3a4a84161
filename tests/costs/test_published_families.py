"""Costs of recent families: latent attention, multi-token prediction, vision towers, recurrences."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from debubble.costs import MEGATRON, Cluster, Units, model_units
from debubble.costs.analytical.half_layers import attention
from debubble.costs.analytical.operators import Shapes
from debubble.costs.devices.speed import Speed
from debubble.costs.flops import flops_per_token
from debubble.ir import InputError, RunOptions
from debubble.models import ModelConfig, models
from debubble.models.runtime_limits import beyond_runtime
from debubble.models.vision import as_trained

H100S = Cluster.parse("64xH100-80GB")
S = 4096


def shapes(name: str, length: int = S) -> Shapes:
    run, speed = RunOptions(sequence_length=length), Speed(H100S.slowest, 2)
    return Shapes(model=models[name], options=run, framework=MEGATRON, speed=speed)


def units_of(name: str, **options: Any) -> Units:
    return model_units(models[name], H100S, RunOptions(sequence_length=S, **options))


def test_latent_attention_saves_the_latents_and_all_heads() -> None:
    """DeepSeek-V3 per token: 1536 + 512 + 64 latents, and 128 heads of 192 (queries, keys) and 128 (values)."""
    operators = list(attention(shapes("deepseek-v3"), 0))
    latent, heads = 1536 + 512 + 64, 128 * (192 + 192 + 128)

    assert sum(op.saved for op in operators if op.name == "projections") == 2 * S * (latent + heads)
    assert sum(op.saved for op in operators if op.name == "core") == S * (2 * 128 * 128 + 4 * 128)


def core_of(name: str, length: int) -> float:
    """Seconds per token of an attention core of DeepSeek, without the scores of the indexer."""
    return (
        sum(op.forward for op in attention(shapes(name, length), 0) if op.name == "core" and op.backward_input) / length
    )


def test_sparse_attention_is_bounded_by_the_chosen_tokens() -> None:
    """2048 chosen tokens are gathered as latent vectors of 512 + 64 numbers that all heads share."""
    assert core_of("deepseek-v3.2", 2048) == core_of("deepseek-v3", 2048)
    assert core_of("deepseek-v3.2", 131072) < 1.02 * core_of("deepseek-v3.2", 65536)
    assert core_of("deepseek-v3.2", 131072) < 0.2 * core_of("deepseek-v3", 131072)


def test_an_indexer_has_no_backward_and_saves_its_indices() -> None:
    (scores,) = (op for op in attention(shapes("deepseek-v3.2"), 0) if op.name == "core" and not op.backward_input)

    assert scores.forward > 0
    assert scores.saved == 4 * S * 2048


def test_an_mtp_module_costs_a_layer_and_the_head() -> None:
    m = models["deepseek-v3"]
    *_, layer, mtp, head = units_of("deepseek-v3").units

    assert [layer.type, mtp.type, head.type] == ["layer", "mtp", "head"]
    assert mtp.static == 18 * m.mtp_parameters
    without = ModelConfig.from_hf({**m.config, "num_nextn_predict_layers": 0})
    assert [unit.type for unit in without.units[-2:]] == ["layer", "head"]
    assert layer.forward + head.forward < mtp.forward < 1.2 * (layer.forward + head.forward)


def test_the_vision_tower_precedes_the_embedding() -> None:
    tower = models["gemma3-4b"].vision
    assert tower is not None
    units = units_of("gemma3-4b").units
    vision = [unit for unit in units if unit.type == "vision"]

    assert [unit.type for unit in units[:28]] == ["vision"] * 27 + ["embedding"]
    assert sum(unit.static for unit in vision) == pytest.approx(18 * tower.parameters, rel=1e-12)
    assert vision[0].forward > vision[1].forward


def test_flops_are_those_of_the_tokens_and_of_an_image() -> None:
    m = models["gemma3-4b"]
    assert m.vision is not None
    text = ModelConfig.from_hf({**m.config["text_config"], "vocab_size": m.vocab, "num_attention_heads": 8,
                                "num_key_value_heads": 4})  # fmt: skip

    assert flops_per_token(m, S) == pytest.approx(flops_per_token(text, S) + 3 * m.vision.flops / S, rel=1e-12)


def test_with_adapters_the_vision_tower_has_only_a_forward() -> None:
    tower = models["qwen2.5-vl-7b"].vision
    assert tower is not None
    trained, frozen = ([u for u in units_of("qwen2.5-vl-7b", lora=r).units if u.type == "vision"] for r in (0, 16))

    assert [u.forward for u in frozen] == pytest.approx([u.forward for u in trained], rel=1e-12)
    assert {(u.backward_input, u.backward_weight, u.activation, u.gradient_reduce) for u in frozen} == {(0, 0, 0, 0)}
    assert sum(u.static for u in frozen) == pytest.approx(2 * tower.parameters, rel=1e-12)


def test_a_frozen_tower_has_only_weights_and_a_forward() -> None:
    model, tower = models["qwen2.5-vl-7b"], models["qwen2.5-vl-7b"].vision
    assert tower is not None
    trained, frozen = (units_of("qwen2.5-vl-7b", freeze=module).units for module in (None, "vision"))
    vision = [unit for unit in frozen if unit.type == "vision"]

    assert [unit.forward for unit in frozen] == [unit.forward for unit in trained]
    assert {(u.backward_input, u.backward_weight, u.activation, u.gradient_reduce) for u in vision} == {(0, 0, 0, 0)}
    assert {u.optimizer_step for u in vision} == {0}
    assert sum(unit.static for unit in vision) == pytest.approx(2 * tower.parameters, rel=1e-12)
    assert frozen[len(vision) :] == trained[len(vision) :]
    as_frozen = as_trained(model, RunOptions(freeze="vision"))
    assert as_frozen.trained_parameters(0) == model.parameters - tower.parameters
    saved = flops_per_token(model, S, lora=16) - flops_per_token(as_frozen, S, lora=16)
    assert saved == pytest.approx(2 * tower.flops / S, rel=1e-9)


def test_two_images_cost_as_much_as_two_sequences_of_one() -> None:
    two, pair = (units_of("qwen2.5-vl-7b", image_patches=1024, **options).units for options in (
        {"images": 2}, {"micro_batch_size": 2},
    ))  # fmt: skip
    m = models["qwen2.5-vl-7b"]
    assert m.vision is not None
    two_images = replace(m, vision=replace(m.vision, images=2))

    assert [unit for unit in two if unit.type == "vision"] == [unit for unit in pair if unit.type == "vision"]
    assert two[-1] == units_of("qwen2.5-vl-7b", image_patches=1024).units[-1]
    assert flops_per_token(two_images, S) - flops_per_token(m, S) == pytest.approx(3 * m.vision.flops / S, rel=1e-9)


def test_only_the_language_model_has_adapters() -> None:
    m = models["qwen2.5-vl-7b"]
    text = ModelConfig.from_hf({**m.config["text_config"], "model_type": "qwen2"})
    units = model_units(text, H100S, RunOptions(sequence_length=S, lora=16)).units

    assert [u for u in units_of("qwen2.5-vl-7b", lora=16).units if u.type != "vision"] == list(units)


@pytest.mark.parametrize("name", ["qwen2.5-vl-7b", "mistral-small-3.1-24b"])
def test_smaller_images_cost_the_vision_tower_less(name: str) -> None:
    full, small = (units_of(name, **options).units for options in ({}, {"image_patches": 1024}))

    assert small[0].type == "vision"
    assert small[0].forward < full[0].forward
    assert small[0].activation < full[0].activation
    assert small[-1] == full[-1]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("qwen2.5-vl-7b", {"image_patches": 1023}, "must be a positive multiple of 4, the patches of a token of"),
        ("qwen2.5-vl-7b", {"image_patches": 4 * S + 4}, "takes 4097 tokens, and a sequence has 4096: give a larger"),
        ("gemma3-4b", {"image_patches": 1024}, "Every image of 'gemma3' has 4096 patches, as its vision_config says"),
        (
            "mistral-small-3.1-24b",
            {"image_patches": 16000},
            "An image of 'mistral3' has up to 12100 patches, not 16000",
        ),
        ("llama3-8b", {"image_patches": 1024}, "'llama' has no vision tower that debubble knows"),
        ("qwen2.5-vl-7b", {"images": 0}, "--images must be at least 1, not 0"),
        ("qwen2.5-vl-7b", {"freeze": "head"}, "--freeze is 'head'; what can be frozen is 'vision'"),
        (
            "qwen2.5-vl-7b",
            {"images": 5},
            "Each of 5 images of 4096 patches takes 1024 tokens, and a sequence has 4096: give a larger"
            " --sequence-length, fewer --images, or --image-patches 3276 or fewer.",
        ),
    ],
)
def test_images_that_a_model_does_not_support_are_refused(name: str, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        units_of(name, **options)


@pytest.mark.parametrize(
    ("name", "language", "kind", "tokens"),
    [
        ("gemma3-4b", "gemma3_text", "SigLIP", 256),
        ("llama4-scout", "llama4_text", "Llama 4's", 144),
        ("mistral-small-3.1-24b", "mistral", "Pixtral", 3025),
        ("qwen2.5-vl-7b", "qwen2", "Qwen2.5-VL's", 1024),
        ("qwen3-vl-30b-a3b", "qwen3_moe", "Qwen3-VL's", 1024),
        ("kimi-k2.5", "deepseek_v3", "MoonViT", 1024),
    ],
)
def test_a_model_names_its_language_model_and_its_tower(name: str, language: str, kind: str, tokens: int) -> None:
    m = models[name]
    assert m.vision is not None

    assert (m.language, m.vision.kind, m.vision.tokens) == (language, kind, tokens)
    assert f"is a language model ({language}, " in str(m.remark)


def test_linear_attention_costs_the_same_at_any_length() -> None:
    linear = ModelConfig.from_hf({**models["qwen3-next-80b-a3b"].config, "layer_types": ["linear_attention"] * 48})

    assert linear.core_flops(0, 1024) == linear.core_flops(0, 2**20) > 0


def test_a_layer_of_one_half_costs_only_that_half() -> None:
    """Nemotron-H: a layer is a state space, an attention or an MLP."""
    config = {
        "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 3,
        "num_attention_heads": 32, "vocab_size": 131072, "hybrid_override_pattern": "M-*",
    }  # fmt: skip
    m = ModelConfig.from_hf(config)
    units = model_units(m, H100S, RunOptions(sequence_length=S)).units

    assert [unit.type for unit in units] == ["embedding", "layer", "layer", "layer", "head"]
    assert [unit.static for unit in units[1:-1]] == [18 * m.layer_parameters(layer) for layer in range(3)]
    assert m.layer_parameters(1) == 2 * 4096 * 21504 + 4096


def test_chunked_attention_reaches_half_a_chunk_on_average() -> None:
    m = models["llama4-scout"]

    assert m.core_flops(0, 4 * 8192) == 4 * 4096 * m.attention_width
    assert m.core_flops(3, 4 * 8192) == 4 * 4 * 4096 * m.attention_width


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("gemma3-4b", "it has no vision towers: make the plan for the model's text_config"),
        ("deepseek-v3", "it predicts the next token alone: set num_nextn_predict_layers to 0"),
        ("llama3.1-8b", None),
    ],
)
def test_the_runtime_says_what_it_does_not_support(name: str, sentence: str | None) -> None:
    reason = beyond_runtime(RunOptions(), models[name])

    assert reason is None if sentence is None else sentence in str(reason)


def test_adapters_of_latent_attention_are_refused() -> None:
    with pytest.raises(InputError, match="not priced for 'deepseek_v3', whose layers mix tokens in other ways"):
        units_of("deepseek-v3", lora=8)


@pytest.mark.parametrize(
    "config",
    [
        {**models["gemma3-4b"].config, "model_type": "other_vl"},
        {**models["gemma3-4b"].config, "audio_config": {"hidden_size": 8}},
        {"model_type": "nemotron_h", "hybrid_override_pattern": "M?", "hidden_size": 64},
        {"model_type": "zamba", "hidden_size": 64, "mamba_d_state": 16},
    ],
    ids=["vision", "audio", "layers", "state"],
)
def test_unsupported_models_are_referred_to_units_files(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"give the units of this one with --units\.$"):
        ModelConfig.from_hf(config)
