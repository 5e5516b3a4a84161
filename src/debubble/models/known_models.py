"""The models that are known by name, as Hugging Face configs.

Sources: each model's own `config.json` on the Hugging Face hub, of which the entries that fix its sizes are here;
GPT-3 from Brown et al. 2020, Table 2.1, in Megatron-LM's shape (hidden size 5120 for 13B, vocabulary 51200).  The 18B,
23B and 28B models are Obscura's: the 13B ones with more layers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.registry import Registry, full_name

models: Registry[ModelConfig] = Registry("debubble.models", what="model")


def named_model(text: str) -> ModelConfig:
    """The model of a built-in name or its only beginning, a hub's name for it, a `config.json`, or a folder with one.

    Raises InputError if the text is none of them.
    """
    if text not in models and (Path(text).exists() or Path(text).suffix == ".json"):
        return ModelConfig.from_hf(text)
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        if (known := hub_model(text)) is not None:
            return known
        raise InputError(
            f"There is no model or file '{text}'; for a model of the Hugging Face hub, fetch its config, `hf download"
            f" {text} config.json --local-dir {text.rpartition('/')[2]}`, and give that folder."
        )
    return models[full_name(text, models, what="model or file")]


_SUFFIXES = re.compile(
    r"-(instruct|hf|base|it|chat|thinking|preview|bf16|fp8|v\d\.\d|\d{4}|(?<=r1-)distill)(?=-|$)|^(hf|meta)-"
)
"""Parts of hubs' names that say how a model was trained, and nothing of its layers."""


def hub_model(name: str) -> ModelConfig | None:
    """The known model that a hub's name such as `meta-llama/Meta-Llama-3-8B` means; None if none is."""
    last = name.rstrip("/").rpartition("/")[2].lower().replace("_", "-")
    short = _SUFFIXES.sub("", last)
    names = (last, short, short.replace("llama-", "llama"), re.sub(r"-(?=\d)", "", short, count=1))
    return next((models[each] for each in names if each in models), None)


def as_model(model: ModelConfig | str | Path) -> ModelConfig:
    """The model itself, or the one that a text or a path names.  Raises InputError if it is neither."""
    if isinstance(model, str | Path):
        return named_model(str(model))
    if not isinstance(model, ModelConfig):
        raise InputError(
            f"A model is db.models[NAME], db.Model.from_hf(FILE), a name or a file, not {type(model).__name__}."
        )
    return model


def _llama(
    layers: int, *, hidden: int, heads: int, ffn: int, kv_heads: int | None = None, vocab: int = 32000, **entries: Any
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **entries,
    }


def _llama3(layers: int, *, hidden: int, heads: int, ffn: int, **entries: Any) -> dict[str, Any]:
    common = {"max_position_embeddings": 8192, "rope_theta": 500000.0}
    return _llama(layers, hidden=hidden, heads=heads, ffn=ffn, kv_heads=8, vocab=128256, **{**common, **entries})


def _llama31(layers: int, *, factor: float = 8.0, **sizes: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    return _llama3(layers, max_position_embeddings=131072, rope_scaling=scaling, **sizes)


def _llama4(experts: int, *, step: int) -> dict[str, Any]:
    text = _llama(
        48, hidden=5120, heads=40, ffn=8192, kv_heads=8, vocab=202048, model_type="llama4_text", head_dim=128,
        intermediate_size_mlp=16384, num_local_experts=experts, num_experts_per_tok=1, interleave_moe_layer_step=step,
        attention_chunk_size=8192, max_position_embeddings=262144 * 40 if step == 1 else 1048576, rope_theta=500000.0,
    )  # fmt: skip
    del text["architectures"]
    vision = {
        "model_type": "llama4_vision_model", "hidden_size": 1408, "image_size": 336, "intermediate_size": 5632,
        "num_attention_heads": 16, "num_hidden_layers": 34, "patch_size": 14, "projector_input_dim": 4096,
        "projector_output_dim": 4096, "vision_output_dim": 4096,
    }  # fmt: skip
    return {
        "model_type": "llama4", "architectures": ["Llama4ForConditionalGeneration"], "tie_word_embeddings": False,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip


def _qwen2(layers: int, *, hidden: int, heads: int, ffn: int, kv_heads: int, **entries: Any) -> dict[str, Any]:
    common = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "vocab": 152064,
    }  # fmt: skip
    return _llama(layers, hidden=hidden, heads=heads, ffn=ffn, kv_heads=kv_heads, **{**common, **entries})


def _falcon(layers: int, *, hidden: int, heads: int, **entries: Any) -> dict[str, Any]:
    return {
        "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": hidden, "bias": False,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": 65024, "alibi": False,
        "parallel_attn": True, "layer_norm_epsilon": 1e-5, **entries,
    }  # fmt: skip


def _qwen3(layers: int, *, hidden: int, heads: int, ffn: int, kv_heads: int = 8, **entries: Any) -> dict[str, Any]:
    common = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0,
    }  # fmt: skip
    return _llama(layers, hidden=hidden, heads=heads, ffn=ffn, kv_heads=kv_heads, vocab=151936, **{**common, **entries})


def _qwen3_moe(layers: int, *, inner: int, **sizes: Any) -> dict[str, Any]:
    return _qwen3(
        layers, kv_heads=4, model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"], num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=inner, norm_topk_prob=True, **sizes,
    )  # fmt: skip


def _gemma3(layers: int, *, hidden: int, ffn: int, **entries: Any) -> dict[str, Any]:
    text = {
        "model_type": "gemma3_text", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, **entries,
    }  # fmt: skip
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    return {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
        "vision_config": vision,
    }  # fmt: skip


def _deepseek(*, heads: int, experts: int, dense: int, vocab: int, **entries: Any) -> dict[str, Any]:
    return _llama(
        61, hidden=7168, heads=heads, ffn=18432, vocab=vocab, architectures=["DeepseekV3ForCausalLM"],
        moe_intermediate_size=2048, n_routed_experts=experts, n_shared_experts=1, num_experts_per_tok=8,
        first_k_dense_replace=dense, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, rms_norm_eps=1e-6, **entries,
    )  # fmt: skip


def _glm45(layers: int, *, hidden: int, ffn: int, inner: int, experts: int, dense: int, norm: bool) -> dict[str, Any]:
    return _llama(
        layers, hidden=hidden, heads=96, ffn=ffn, kv_heads=8, vocab=151552, model_type="glm4_moe",
        architectures=["Glm4MoeForCausalLM"], head_dim=128, attention_bias=True, use_qk_norm=norm,
        moe_intermediate_size=inner, n_routed_experts=experts, n_shared_experts=1, num_experts_per_tok=8,
        first_k_dense_replace=dense, num_nextn_predict_layers=1, max_position_embeddings=131072, rope_theta=1000000.0,
    )  # fmt: skip


def _gpt_oss(layers: int, *, experts: int) -> dict[str, Any]:
    return _llama(
        layers, hidden=2880, heads=64, ffn=2880, kv_heads=8, vocab=201088, model_type="gpt_oss",
        architectures=["GptOssForCausalLM"], head_dim=64, attention_bias=True, num_local_experts=experts,
        num_experts_per_tok=4, sliding_window=128, max_position_embeddings=131072, rope_theta=150000.0,
    )  # fmt: skip


def _gpt(layers: int, *, hidden: int, heads: int, positions: int, vocab: int = 51200, **entries: Any) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": positions,
        "vocab_size": vocab,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
        **entries,
    }


_LLAMA2_13B = {"hidden": 5120, "heads": 40, "ffn": 13824}
# 4096 positions, twice GPT-3's, for Obscura's sequences.
_GPT3_13B = {"hidden": 5120, "heads": 40, "positions": 4096}

_CONFIGS: dict[str, dict[str, Any]] = {
    "llama2-7b": _llama(32, hidden=4096, heads=32, ffn=11008),
    "llama2-13b": _llama(40, **_LLAMA2_13B),
    "llama2-70b": _llama(80, hidden=8192, heads=64, ffn=28672, kv_heads=8),
    "llama2-18b": _llama(56, **_LLAMA2_13B),
    "llama2-23b": _llama(72, **_LLAMA2_13B),
    "llama2-28b": _llama(88, **_LLAMA2_13B),
    "llama3-8b": _llama3(32, hidden=4096, heads=32, ffn=14336),
    "llama3-70b": _llama3(80, hidden=8192, heads=64, ffn=28672),
    "llama3.1-8b": _llama31(32, hidden=4096, heads=32, ffn=14336),
    "llama3.1-70b": _llama31(80, hidden=8192, heads=64, ffn=28672),
    "llama3.1-405b": _llama31(126, hidden=16384, heads=128, ffn=53248),
    "llama3.2-1b": _llama31(16, hidden=2048, heads=32, ffn=8192, factor=32.0, tie_word_embeddings=True),
    "llama3.2-3b": _llama31(28, hidden=3072, heads=24, ffn=8192, factor=32.0, tie_word_embeddings=True),
    "llama3.3-70b": _llama31(80, hidden=8192, heads=64, ffn=28672),
    "llama4-scout": _llama4(16, step=1),
    "llama4-maverick": _llama4(128, step=2),
    "gpt3-13b": _gpt(40, **_GPT3_13B),
    "gpt3-18b": _gpt(56, **_GPT3_13B),
    "gpt3-23b": _gpt(72, **_GPT3_13B),
    "gpt3-28b": _gpt(88, **_GPT3_13B),
    "gpt3-175b": _gpt(96, hidden=12288, heads=96, positions=2048),
    "qwen1.5-14b": _qwen2(40, hidden=5120, heads=40, ffn=13696, kv_heads=40),
    "qwen2-7b": _qwen2(28, hidden=3584, heads=28, ffn=18944, kv_heads=4),
    "qwen2-72b": _qwen2(80, hidden=8192, heads=64, ffn=29568, kv_heads=8),
    "qwen2.5-0.5b": _qwen2(
        24, hidden=896, heads=14, ffn=4864, kv_heads=2, vocab=151936, tie_word_embeddings=True
    ),
    "qwen2.5-1.5b": _qwen2(
        28, hidden=1536, heads=12, ffn=8960, kv_heads=2, vocab=151936, tie_word_embeddings=True
    ),
    "qwen2.5-3b": _qwen2(36, hidden=2048, heads=16, ffn=11008, kv_heads=2, vocab=151936, tie_word_embeddings=True),
    "qwen2.5-7b": _qwen2(28, hidden=3584, heads=28, ffn=18944, kv_heads=4),
    "qwen2.5-14b": _qwen2(48, hidden=5120, heads=40, ffn=13824, kv_heads=8),
    "qwen2.5-32b": _qwen2(64, hidden=5120, heads=40, ffn=27648, kv_heads=8, rms_norm_eps=1e-5),
    "qwen2.5-72b": _qwen2(80, hidden=8192, heads=64, ffn=29568, kv_heads=8),
    "qwen3-0.6b": _qwen3(28, hidden=1024, heads=16, ffn=3072, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(28, hidden=2048, heads=16, ffn=6144, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(36, hidden=2560, heads=32, ffn=9728, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(36, hidden=4096, heads=32, ffn=12288),
    "qwen3-14b": _qwen3(40, hidden=5120, heads=40, ffn=17408),
    "qwen3-32b": _qwen3(64, hidden=5120, heads=64, ffn=25600),
    "qwen3-30b-a3b": _qwen3_moe(48, hidden=2048, heads=32, ffn=6144, inner=768),
    "qwen3-235b-a22b": _qwen3_moe(94, hidden=4096, heads=64, ffn=12288, inner=1536),
    "qwen3-next-80b-a3b": _llama(
        48, hidden=2048, heads=16, ffn=5120, kv_heads=2, vocab=151936, model_type="qwen3_next",
        architectures=["Qwen3NextForCausalLM"], head_dim=256, full_attention_interval=4, num_experts=512,
        num_experts_per_tok=10, moe_intermediate_size=512, shared_expert_intermediate_size=512,
        linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=4, max_position_embeddings=262144, rope_theta=10000000.0, rms_norm_eps=1e-6,
    ),
    "deepseek-v3": _deepseek(
        heads=128, experts=256, dense=3, vocab=129280, model_type="deepseek_v3", num_nextn_predict_layers=1,
        n_group=8, topk_group=4,
    ),
    "deepseek-v2-lite": _llama(
        27, hidden=2048, heads=16, ffn=10944, vocab=102400, model_type="deepseek_v2",
        architectures=["DeepseekV2ForCausalLM"], moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128,
        qk_rope_head_dim=64, v_head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=163840,
    ),
    **dict.fromkeys(
        ("minimax-m2", "minimax-m2.1", "minimax-m2.5", "minimax-m2.7"),
        _llama(
            62, hidden=3072, heads=48, ffn=1536, kv_heads=8, vocab=200064, model_type="minimax_m2", head_dim=128,
            architectures=["MiniMaxM2ForCausalLM"], num_local_experts=256, num_experts_per_tok=8,
            max_position_embeddings=196608, rope_theta=5000000.0,
        ),
    ),
    "kimi-k2": _deepseek(heads=64, experts=384, dense=1, vocab=163840, model_type="kimi_k2"),
    "glm-4-9b": _llama(
        40, hidden=4096, heads=32, ffn=13696, kv_heads=2, vocab=151552, model_type="glm",
        architectures=["GlmForCausalLM"], head_dim=128, attention_bias=True, max_position_embeddings=131072,
    ),
    "glm-4.5": _glm45(92, hidden=5120, ffn=12288, inner=1536, experts=160, dense=3, norm=True),
    **dict.fromkeys(
        ("glm-4.6", "glm-4.7"), _glm45(92, hidden=5120, ffn=12288, inner=1536, experts=160, dense=3, norm=True)
    ),
    "glm-4.5-air": _glm45(46, hidden=4096, ffn=10944, inner=1408, experts=128, dense=1, norm=False),
    "gemma2-9b": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "hidden_size": 3584, "head_dim": 256,
        "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8,
        "vocab_size": 256000, "sliding_window": 4096, "query_pre_attn_scalar": 256, "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "hidden_size": 1152, "head_dim": 256,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
        "vocab_size": 262144, "sliding_window": 512, "query_pre_attn_scalar": 256, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "tie_word_embeddings": True,
    },
    "gemma3-4b": _gemma3(34, hidden=2560, ffn=10240),
    "gemma3-12b": _gemma3(48, hidden=3840, ffn=15360, num_attention_heads=16, num_key_value_heads=8),
    "gemma3-27b": _gemma3(
        62, hidden=5376, ffn=21504, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=168,
    ),
    "gpt-oss-20b": _gpt_oss(24, experts=32),
    "gpt-oss-120b": _gpt_oss(36, experts=128),
    "phi-4": _llama(
        40, hidden=5120, heads=40, ffn=17920, kv_heads=10, vocab=100352, model_type="phi3",
        architectures=["Phi3ForCausalLM"], max_position_embeddings=16384, rope_theta=250000.0,
    ),
    "mistral-7b": _llama(
        32, hidden=4096, heads=32, ffn=14336, kv_heads=8, vocab=32768, model_type="mistral",
        architectures=["MistralForCausalLM"], max_position_embeddings=32768, rope_theta=1000000.0, sliding_window=None,
    ),
    "mistral-large": _llama(
        88, hidden=12288, heads=96, ffn=28672, kv_heads=8, vocab=32768, model_type="mistral", head_dim=128,
        architectures=["MistralForCausalLM"], max_position_embeddings=131072, rope_theta=1000000.0, sliding_window=None,
    ),
    "mistral-small-3.1-24b": {
        "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"], "spatial_merge_size": 2,
        "multimodal_projector_bias": False,
        "text_config": {
            "model_type": "mistral", "head_dim": 128, "hidden_size": 5120, "intermediate_size": 32768,
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
            "rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072,
        },
        "vision_config": {
            "model_type": "pixtral", "head_dim": 64, "hidden_size": 1024, "image_size": 1540, "patch_size": 14,
            "intermediate_size": 4096, "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 24,
        },
    },
    "mixtral-8x7b": _llama(
        32, hidden=4096, heads=32, ffn=14336, kv_heads=8, model_type="mixtral",
        architectures=["MixtralForCausalLM"], max_position_embeddings=32768, rope_theta=1000000.0,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "mixtral-8x22b": _llama(
        56, hidden=6144, heads=48, ffn=16384, kv_heads=8, model_type="mixtral", architectures=["MixtralForCausalLM"],
        max_position_embeddings=65536, rope_theta=1000000.0, num_local_experts=8, num_experts_per_tok=2,
    ),
    "yi-34b": _llama(60, hidden=7168, heads=56, ffn=20480, kv_heads=8, vocab=64000, rope_theta=5000000.0),
    "falcon-7b": _falcon(32, hidden=4544, heads=71, multi_query=True, new_decoder_architecture=False),
    "falcon-40b": _falcon(60, hidden=8192, heads=128, num_kv_heads=8, new_decoder_architecture=True),
    "bloom": {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 14336, "n_layer": 70,
        "num_attention_heads": 112, "vocab_size": 250880, "layer_norm_epsilon": 1e-5, "use_bias": True,
    },
    "llama-tiny": _llama(8, hidden=256, heads=8, ffn=704, kv_heads=4, vocab=320, max_position_embeddings=512),
    "gpt2-tiny": _gpt(
        8, hidden=256, heads=8, positions=512, vocab=320, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}  # fmt: skip

for _name, _config in _CONFIGS.items():
    models.add(_name, ModelConfig.from_hf(_config))
