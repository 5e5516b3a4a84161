"""Model shapes: parameter counts are those of Hugging Face, and an invalid config is refused with one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import InputError, RunOptions
from debubble.models import Model, models, named_model
from debubble.models.generic import KNOWN
from debubble.models.mixers import Attention
from debubble.models.runtime_limits import beyond_runtime

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 300}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


PUBLISHED = {
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "deepseek-v2-lite": 15_706_484_224, "glm-4-9b": 9_399_951_360, "gemma2-9b": 9_241_705_984,
    "mistral-large": 122_610_069_504, "mixtral-8x22b": 140_620_634_112, "yi-34b": 34_388_917_248,
    "falcon-40b": 41_303_293_952, "mixtral-8x7b": 46_702_792_704, "llama3.1-8b": 8_030_261_248,
    "llama3.1-405b": 405_853_388_800, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824,
    "llama4-scout": 108_641_793_536, "llama4-maverick": 401_583_781_376, "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "deepseek-v3": 671_026_404_352,
    "gemma3-1b": 999_885_952, "gemma3-4b": 4_300_079_472, "gemma3-12b": 12_187_325_040,
    "gemma3-27b": 27_432_406_640, "gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672,
    "phi-4": 14_659_507_200, "mistral-7b": 7_248_023_552, "mistral-small-3.1-24b": 24_011_361_280,
    "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672, "codellama-34b": 33_743_970_304,
    "tinyllama-1.1b": 1_100_048_384, "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384, "smollm3-3b": 3_075_098_624, "deepseek-coder-33b": 33_342_991_360,
    "yi-6b": 6_061_035_520, "yi-9b": 8_829_407_232, "falcon3-7b": 7_455_550_464, "falcon3-10b": 10_305_653_760,
    "mistral-nemo": 12_247_782_400, "mistral-small-24b": 23_572_403_200, "ministral-8b": 8_019_808_256,
    "seed-oss-36b": 36_151_104_512, "granite-3.1-8b": 8_170_848_256, "qwen1.5-7b": 7_721_324_544,
    "qwen1.5-32b": 32_512_218_112, "qwen1.5-72b": 72_287_920_128, "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen2.5-vl-3b": 3_754_622_976, "qwen2.5-vl-7b": 8_292_166_656, "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344, "qwen3-vl-2b": 2_127_532_032, "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696, "qwen3-vl-30b-a3b": 31_070_754_032, "deepseek-v2": 235_741_434_880,
    "gemma-2b": 2_506_172_416, "gemma-7b": 8_537_680_896, "gemma2-2b": 2_614_341_888, "gemma2-27b": 27_227_128_320,
    "phi-3-mini": 3_821_079_552, "phi-3-medium": 13_960_238_080, "phi-4-mini": 3_836_021_760,
    "starcoder2-3b": 3_030_371_328, "starcoder2-7b": 7_173_923_840, "starcoder2-15b": 15_957_889_024,
    "gpt2": 124_439_808, "gpt2-xl": 1_557_611_200,
}  # fmt: skip


def test_known_models_have_the_published_number_of_parameters() -> None:
    assert {name: models[name].parameters for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("olmo2-7b", 7_298_617_344),
        ("olmo2-32b", 32_234_279_936),
        ("command-r", 34_980_831_232),
        ("command-r-plus", 103_810_674_688),
        ("gpt-neox-20b", 20_554_567_680),
        ("pythia-12b", 11_846_072_320),
        ("bloom-560m", 559_214_592),
        ("bloom-7b1", 7_069_016_064),
        ("moonlight-16b-a3b", 15_960_111_936),
    ],
)
def test_uncounted_norms_and_biases_are_few(name: str, parameters: int) -> None:
    assert models[name].parameters == pytest.approx(parameters, rel=2e-4)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("deepseek-v3", 684_531_386_000), ("glm-4.5", 358_337_791_296), ("glm-4.5-air", 110_468_824_832)],
)
def test_published_counts_include_mtp_embeddings(name: str, parameters: int) -> None:
    m = models[name]

    assert m.parameters + m.mtp_layers * (m.mtp_parameters + 2 * m.vocab * m.hidden) == pytest.approx(
        parameters, rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "active"),
    [("deepseek-v3", 37.5), ("kimi-k2", 32.9), ("qwen3-235b-a22b", 22.2), ("llama4-scout", 17.2 + 0.87)],
)
def test_active_parameters_are_the_published_number(name: str, active: float) -> None:
    assert models[name].active_parameters / 1e9 == pytest.approx(active, abs=0.1)


BUILT = ("llama3.1-405b", "qwen3-235b-a22b", "gemma3-27b", "gpt-oss-20b", "mistral-small-3.1-24b", "deepseek-v3.2")
SLOW_TO_BUILD = (
    "llama4-scout", "llama4-maverick", "qwen3-next-80b-a3b", "deepseek-v3", "glm-4.5", "glm-4.5-air", "gemma3-1b",
    "gemma3-4b", "gpt-oss-120b", "phi-4", "qwen3-vl-235b-a22b", "qwen3.5-35b-a3b", "kimi-k2.5", "glm-4.7-flash",
    "glm-5", "granite-4.0-h-small", "hunyuan-a13b",
)  # fmt: skip


@pytest.mark.parametrize("name", [*BUILT, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_TO_BUILD)])
def test_known_models_have_the_parameters_of_transformers(name: str) -> None:
    model = models[name]

    assert built_parameters(dict(model.config)) == model.parameters


def test_a_state_space_hybrid_has_the_parameters_as_built() -> None:
    """Nemotron-H 8B (NVIDIA, arXiv:2504.03624), as published."""
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    config = {
        "model_type": "nemotron_h", "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
        "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4,
        "chunk_size": 128, "hybrid_override_pattern": pattern,
    }  # fmt: skip

    assert Model.from_hf(config).parameters == built_parameters(config) == 8_100_852_736


def test_a_flat_vision_language_config_has_its_parameters() -> None:
    """Qwen2.5-VL 7B, whose config has the language model's entries next to `vision_config`."""
    config = {
        "model_type": "qwen2_5_vl", "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }  # fmt: skip

    assert Model.from_hf(config).parameters == built_parameters(config) == 8_292_166_656


@pytest.mark.parametrize(
    "more",
    [{}, {"index_topk_freq": 4, "index_skip_topk_offset": 3}, {"index_topk_pattern": "FSSFSS"}],
    ids=["every layer chooses", "every fourth", "a pattern"],
)
def test_layers_that_reuse_an_index_have_no_indexer(more: dict[str, Any]) -> None:
    config = {
        "model_type": "glm_moe_dsa", "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024,
        "moe_intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 64,
        "index_head_dim": 32, "index_n_heads": 4, "index_topk": 64, **more,
    }  # fmt: skip

    model = Model.from_hf(config)
    assert model.parameters == built_parameters(config)
    assert (beyond_runtime(RunOptions(), model) is None) == (not more)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("qwen3_vl_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
        ("qwen3_5", {}),
        ("qwen3_5_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}),
    ],
)
def test_qwen_towers_have_the_parameters_of_transformers(family: str, more: dict[str, Any]) -> None:
    vision = {"depth": 3, "hidden_size": 64, "intermediate_size": 200, "num_heads": 4, "out_hidden_size": 1024}
    text = {
        "model_type": f"{family}_text", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 1000, **more,
    }  # fmt: skip
    mergers = {"deepstack_visual_indexes": [0, 1]} if "vl" in family else {}
    config = {
        "model_type": family, "text_config": text, "vision_config": {**vision, **mergers}, "tie_word_embeddings": False
    }  # fmt: skip

    assert Model.from_hf(config).parameters == built_parameters(config)


def built_parameters(config: dict[str, Any]) -> int:
    """The number of parameters of the model that transformers builds."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch = pytest.importorskip("torch")
    auto = transformers.AutoModelForImageTextToText if "vision_config" in config else transformers.AutoModelForCausalLM
    # transformers ties Mistral 3's tables by default; its published model has two.
    untied = {"tie_word_embeddings": False} if config["model_type"] == "mistral3" else {}
    with torch.device("meta"):
        built = auto.from_config(transformers.AutoConfig.for_model(**config, **untied))
    return sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
        {**LLAMA, "model_type": "qwen2"},
        {**LLAMA, "model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
        {**LLAMA, "model_type": "gemma", "head_dim": 32},
        {**LLAMA, "model_type": "gemma2", "head_dim": 32, "sliding_window": 100},
        {**LLAMA, "model_type": "gemma3_text", "head_dim": 32, "sliding_window_pattern": 2},
        {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
        {**LLAMA, "model_type": "qwen3_moe", "head_dim": 16, **MOE, "decoder_sparse_step": 2},
        GPT2,
        {**GPT2, "tie_word_embeddings": False, "n_inner": 100},
        {**models["gpt3-13b"].config, "n_layer": 2},
    ],
    ids=lambda config: config["model_type"],
)
def test_configs_have_the_parameters_of_transformers(config: dict[str, Any]) -> None:
    assert Model.from_hf(config).parameters == built_parameters(config)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "qwen3_moe"])
def test_missing_key_value_heads_are_those_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config |= {"model_type": family, "num_attention_heads": 32, "hidden_size": 1024}

    assert Model.from_hf(config).kv_heads == transformers.AutoConfig.for_model(**config).num_key_value_heads


@pytest.mark.parametrize(
    ("family", "method"),
    [
        pytest.param(family, method, marks=[] if (number % 5, method) == (0, "to_diff_dict") else pytest.mark.slow)
        for number, family in enumerate(sorted(KNOWN))
        for method in ("to_dict", "to_diff_dict")
    ],
)
def test_other_families_are_counted_within_a_thousandth(family: str, method: str) -> None:
    """The family's default model; `to_diff_dict` returns the content of a config.json."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch = pytest.importorskip("torch")
    config = type(transformers.AutoConfig.for_model(family))()
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    model = Model.from_hf(getattr(config, method)())

    assert model.whole_layers
    assert model.known
    assert model.parameters == pytest.approx(sum(p.numel() for p in built.parameters()), rel=1e-3)


def test_active_parameters_count_the_experts_of_a_token() -> None:
    """Mixtral of Experts (Jiang et al. 2024): 47B parameters, of which a token uses 13B."""
    mixtral, llama = models["mixtral-8x7b"], models["llama2-7b"]

    assert mixtral.active_parameters == 12_879_925_248
    assert llama.active_parameters == llama.parameters


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, ()),
        ({"model_type": "mistral"}, (4096,) * 3),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mixtral"}, ()),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 2}, (None, None, 4096)),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 3}, ()),
        ({"model_type": "gemma2", "sliding_window": 128}, (128, None, 128)),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 2}, (4096, None, 4096)),
        ({"model_type": "gemma2", "sliding_window_pattern": None}, (4096, None, 4096)),
        (
            {"model_type": "gemma3_text", "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            (None, 4096, None),
        ),
    ],
)
def test_windows_follow_the_pattern_of_the_family(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    attentions = [layer.attention for layer in Model.from_hf({**LLAMA, **changes}).per_layer]
    assert tuple(a.window for a in attentions if isinstance(a, Attention)) == (windows or (None,) * 3)


def test_layer_types_must_be_as_many_as_layers() -> None:
    with pytest.raises(InputError, match="`layer_types` for 2 layers, but `num_hidden_layers` 3"):
        Model.from_hf({**LLAMA, "model_type": "gemma2", "layer_types": ["full_attention"] * 2})


def test_depth_scaled_models_have_the_layers_of_obscura() -> None:
    layers = {name: models[f"llama2-{name}"].layers for name in ("13b", "18b", "23b", "28b")}

    assert layers == {"13b": 40, "18b": 56, "23b": 72, "28b": 88}


def test_a_config_is_read_from_a_file_and_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))

    assert Model.from_hf(tmp_path) == Model.from_hf(str(tmp_path / "config.json")) == Model.from_hf(LLAMA)
    assert named_model(str(tmp_path)).config == LLAMA


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": None}, "has no `num_hidden_layers`, which a llama model needs."),
        ({"num_hidden_layers": 10**7}, "has 10000000 layers; debubble plans models of up to 10000"),
        ({"hidden_size": "64"}, "`hidden_size` must be a positive whole number"),
        ({"tie_word_embeddings": 1}, "`tie_word_embeddings` must be true or false"),
        ({"num_key_value_heads": 3}, "8 attention heads cannot share 3 key-value heads"),
        ({"num_attention_heads": 7, "num_key_value_heads": 7}, "has 7 heads for a hidden size of 64"),
        (
            {"model_type": "zamba", "mamba_d_state": 16},
            "model_type 'zamba' with state-space layers (mamba_d_state), which debubble has no layers for",
        ),
        ({"model_type": "qwen2_vl", "vision_config": {"depth": 32}}, "'qwen2_vl' with 'vision_config', which"),
        ({"model_type": "bert"}, "'bert' with an encoder, not a causal language model, which"),
        ({"model_type": "mine", "architectures": ["MineForMaskedLM"]}, "'mine' with MineForMaskedLM, which"),
        ({"model_type": "olmo2", "num_attention_heads": None}, "has no `num_attention_heads`, which a olmo2 model"),
        ({"model_type": None}, "has no `model_type`"),
        ({"model_type": ["llama"]}, "The config is wrong: `model_type` must be a text, not a list"),
        ({"model_type": "olmo2", "layer_types": [1, 2, 3]}, "`layer_types[0]` must be a text, not a whole number"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "LLG"}, "`sliding_window_pattern` must be a positive"),
        ({"hidden_size": 10**400}, "`hidden_size` is more than 1e+09"),
        ({"hidden_act": "swiglu"}, "has the activation function 'swiglu', which transformers does not know"),
    ],
)
def test_an_invalid_config_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        Model.from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read"),
        ("{", "is not a JSON file"),
        ("[]", "it holds no JSON object"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)

    with pytest.raises(InputError, match=sentence):
        Model.from_hf(file)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("lama2-13b", "There is no model or file 'lama2-13b'; did you mean 'llama2-13b' or"),
        ("llama2-1", "'llama2-1' may be llama2-13b or llama2-18b: write more of it"),
        ("whisper", "There is no model or file 'whisper'; see `debubble models`"),
    ],
)
def test_an_unknown_name_gets_suggestions(name: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        named_model(name)


def test_a_mixture_in_every_layer_needs_no_dense_width() -> None:
    model = Model.from_hf(
        {
            "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
            "num_key_value_heads": 2, "vocab_size": 248320, "linear_num_value_heads": 32,
        }
    )  # fmt: skip

    assert model.parameters == 34_660_610_688


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama3-70b"),
        ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
        ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", "tinyllama-1.1b"),
        ("CohereForAI/c4ai-command-r-v01", "command-r"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "llama3.3-70b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4-scout"),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("nvidia/Nemotron-H-8B-Base-8K", "nemotron-h-8b"),
    ],
)
def test_known_models_are_found_by_their_hub_name(text: str, name: str) -> None:
    assert named_model(text) is models[name]


def test_an_unknown_hub_name_gets_a_download_command() -> None:
    with pytest.raises(InputError, match=r"hf download foo/bar-7b config\.json --local-dir bar-7b"):
        named_model("foo/bar-7b")
