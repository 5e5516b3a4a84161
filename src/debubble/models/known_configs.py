"""The Hugging Face configs of the models that are known by name.

Sources: the size entries of a model's `config.json` on the Hugging Face hub; for GPT-3 Brown et al. 2020, Table 2.1, in
Megatron-LM's shape (hidden size 5120 for 13B, vocabulary 51200).  The 18B, 23B and 28B models are Obscura's: the 13B
ones with more layers.
"""

from __future__ import annotations

from typing import Any


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


def _latent(layers: int, *, experts: int, dense: int, **entries: Any) -> dict[str, Any]:
    common = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _llama(layers, n_routed_experts=experts, first_k_dense_replace=dense, **{**common, **entries})


def _deepseek_v2(layers: int, **sizes: Any) -> dict[str, Any]:
    return _latent(
        layers, dense=1, vocab=102400, model_type="deepseek_v2", architectures=["DeepseekV2ForCausalLM"],
        n_shared_experts=2, num_experts_per_tok=6, rms_norm_eps=1e-6, max_position_embeddings=163840, **sizes,
    )  # fmt: skip


def _glm_latent(layers: int, **sizes: Any) -> dict[str, Any]:
    return _latent(
        layers, vocab=154880, n_shared_experts=1, qk_nope_head_dim=192, v_head_dim=256, num_nextn_predict_layers=1,
        max_position_embeddings=202752, **sizes,
    )  # fmt: skip


def _deepseek(*, heads: int, experts: int, dense: int, vocab: int, **entries: Any) -> dict[str, Any]:
    return _latent(
        61, hidden=7168, heads=heads, ffn=18432, vocab=vocab, architectures=["DeepseekV3ForCausalLM"],
        moe_intermediate_size=2048, experts=experts, n_shared_experts=1, num_experts_per_tok=8, dense=dense,
        q_lora_rank=1536, rms_norm_eps=1e-6, **entries,
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


def _mistral(layers: int, **sizes: Any) -> dict[str, Any]:
    common = {
        "heads": 32, "kv_heads": 8, "vocab": 131072, "model_type": "mistral", "architectures": ["MistralForCausalLM"],
        "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None,
    }  # fmt: skip
    return _llama(layers, **{**common, **sizes})


def _olmo2(layers: int, **sizes: Any) -> dict[str, Any]:
    return _llama(
        layers, vocab=100352, model_type="olmo2", architectures=["Olmo2ForCausalLM"], rope_theta=500000.0, **sizes
    )


def _qwen25_vl(text: dict[str, Any], *, ffn: int = 3420) -> dict[str, Any]:
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": ffn, "num_heads": 16, "patch_size": 14,
        "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
        "out_hidden_size": text["hidden_size"],
    }  # fmt: skip
    return {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "tie_word_embeddings": text["tie_word_embeddings"], "text_config": {**text, "model_type": "qwen2_5_vl_text"},
        "vision_config": vision,
    }  # fmt: skip


def _qwen3_vl(text: dict[str, Any], *, small: bool = False) -> dict[str, Any]:
    family = text["model_type"].replace("qwen3", "qwen3_vl")
    width = text["hidden_size"]
    vision = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "deepstack_visual_indexes": [8, 16, 24]}
    if small:
        vision = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}
    kind = "Qwen3VLMoeForConditionalGeneration" if "moe" in family else "Qwen3VLForConditionalGeneration"
    return {
        "model_type": family, "architectures": [kind], "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": {**text, "model_type": f"{family}_text"},
        "vision_config": {**vision, "num_heads": 16, "patch_size": 16, "out_hidden_size": width},
    }  # fmt: skip


def _kimi_k25() -> dict[str, Any]:
    text = _deepseek(heads=64, experts=384, dense=1, vocab=163840, model_type="kimi_k2")
    return {
        "model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text,
        "tie_word_embeddings": False, "projection_hidden_size": 1152,
        "vision_config": {
            "num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16,
        },
    }  # fmt: skip


def _gemma(
    family: str, layers: int, *, hidden: int, heads: int, kv_heads: int, ffn: int, **entries: Any
) -> dict[str, Any]:
    return {
        "model_type": family, "architectures": [f"{family.capitalize()}ForCausalLM"], "hidden_size": hidden,
        "head_dim": 256, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 256000, "max_position_embeddings": 8192, **entries,
    }  # fmt: skip


_GEMMA2 = {
    "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


def _phi3(layers: int, *, hidden: int, heads: int, ffn: int, vocab: int, **entries: Any) -> dict[str, Any]:
    return _llama(
        layers, hidden=hidden, heads=heads, ffn=ffn, vocab=vocab, model_type="phi3",
        architectures=["Phi3ForCausalLM"], **entries,
    )  # fmt: skip


def _cohere(layers: int, **sizes: Any) -> dict[str, Any]:
    config = _llama(
        layers, vocab=256000, model_type="cohere", architectures=["CohereForCausalLM"], layer_norm_eps=1e-5, **sizes
    )
    return {**config, "tie_word_embeddings": True, "logit_scale": 0.0625, "rope_theta": 8000000.0}


def _starcoder2(layers: int, *, hidden: int, heads: int, kv_heads: int, **entries: Any) -> dict[str, Any]:
    return {
        "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 49152, "use_bias": True, "tie_word_embeddings": True,
        "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "sliding_window": 4096,
        "norm_epsilon": 1e-5, **entries,
    }  # fmt: skip


def _neox(layers: int, *, hidden: int, heads: int, vocab: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"], "hidden_size": hidden,
        "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": vocab, "max_position_embeddings": 2048, "hidden_act": "gelu", "rotary_pct": 0.25,
        "tie_word_embeddings": False,
    }  # fmt: skip


def _bloom(layers: int, *, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": hidden, "n_layer": layers,
        "num_attention_heads": heads, "vocab_size": 250880, "layer_norm_epsilon": 1e-5, "use_bias": True,
    }  # fmt: skip


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


_DELTA_NET: dict[str, Any] = {
    "hidden": 2048, "heads": 16, "kv_heads": 2, "head_dim": 256, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
}  # fmt: skip
_LLAMA2_13B = {"hidden": 5120, "heads": 40, "ffn": 13824}
# 4096 positions, twice GPT-3's, for Obscura's sequences.
_GPT3_13B = {"hidden": 5120, "heads": 40, "positions": 4096}

CONFIGS: dict[str, dict[str, Any]] = {
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
        48, ffn=5120, vocab=151936, model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"],
        full_attention_interval=4, num_experts=512, num_experts_per_tok=10, rope_theta=10000000.0, **_DELTA_NET,
    ),
    "deepseek-v3": _deepseek(
        heads=128, experts=256, dense=3, vocab=129280, model_type="deepseek_v3", num_nextn_predict_layers=1,
        n_group=8, topk_group=4,
    ),
    "deepseek-v2-lite": _deepseek_v2(
        27, hidden=2048, heads=16, ffn=10944, moe_intermediate_size=1408, experts=64, q_lora_rank=None
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
    "gemma2-9b": _gemma("gemma2", 42, hidden=3584, heads=16, kv_heads=8, ffn=14336, **_GEMMA2),
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
    "phi-4": _phi3(
        40, hidden=5120, heads=40, kv_heads=10, ffn=17920, vocab=100352, max_position_embeddings=16384,
        rope_theta=250000.0,
    ),
    "mistral-7b": _mistral(32, hidden=4096, ffn=14336, vocab=32768),
    "mistral-large": _mistral(
        88, hidden=12288, heads=96, ffn=28672, vocab=32768, head_dim=128, max_position_embeddings=131072
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
    "bloom": _bloom(70, hidden=14336, heads=112),
    # Llama's and its relatives'.
    "llama-7b": _llama(32, hidden=4096, heads=32, ffn=11008, max_position_embeddings=2048),
    "llama-13b": _llama(40, **_LLAMA2_13B, max_position_embeddings=2048),
    "llama-30b": _llama(60, hidden=6656, heads=52, ffn=17920, max_position_embeddings=2048),
    "llama-65b": _llama(80, hidden=8192, heads=64, ffn=22016, max_position_embeddings=2048),
    "codellama-34b": _llama(48, hidden=8192, heads=64, ffn=22016, kv_heads=8, rope_theta=1000000.0),
    "tinyllama-1.1b": _llama(22, hidden=2048, heads=32, ffn=5632, kv_heads=4, max_position_embeddings=2048),
    "smollm2-135m": _llama(30, hidden=576, heads=9, ffn=1536, kv_heads=3, vocab=49152, tie_word_embeddings=True),
    "smollm2-360m": _llama(32, hidden=960, heads=15, ffn=2560, kv_heads=5, vocab=49152, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(24, hidden=2048, heads=32, ffn=8192, vocab=49152, tie_word_embeddings=True),
    "smollm3-3b": _llama(
        36, hidden=2048, heads=16, ffn=11008, kv_heads=4, vocab=128256, model_type="smollm3",
        architectures=["SmolLM3ForCausalLM"], tie_word_embeddings=True, max_position_embeddings=65536,
    ),
    "deepseek-coder-33b": _llama(62, hidden=7168, heads=56, ffn=19200, kv_heads=8, vocab=32256, rope_theta=100000.0),
    "deepseek-llm-67b": _llama(95, hidden=8192, heads=64, ffn=22016, kv_heads=8, vocab=102400),
    "yi-6b": _llama(32, hidden=4096, heads=32, ffn=11008, kv_heads=4, vocab=64000, rope_theta=5000000.0),
    "yi-9b": _llama(48, hidden=4096, heads=32, ffn=11008, kv_heads=4, vocab=64000, rope_theta=5000000.0),
    "falcon3-7b": _llama(28, hidden=3072, heads=12, ffn=23040, kv_heads=4, vocab=131072, head_dim=256),
    "falcon3-10b": _llama(40, hidden=3072, heads=12, ffn=23040, kv_heads=4, vocab=131072, head_dim=256),
    "mistral-nemo": _mistral(40, hidden=5120, ffn=14336, head_dim=128),
    "mistral-small-24b": _mistral(40, hidden=5120, ffn=32768, head_dim=128),
    "ministral-8b": _mistral(36, hidden=4096, ffn=12288, head_dim=128),
    "seed-oss-36b": _llama(
        64, hidden=5120, heads=80, ffn=27648, kv_heads=8, vocab=155136, model_type="seed_oss", head_dim=128,
        architectures=["SeedOssForCausalLM"], attention_bias=True, attention_out_bias=False, rope_theta=10000000.0,
    ),
    "olmo2-7b": _olmo2(32, hidden=4096, heads=32, ffn=11008),
    "olmo2-13b": _olmo2(40, hidden=5120, heads=40, ffn=13824),
    "olmo2-32b": _olmo2(64, hidden=5120, heads=40, ffn=27648, kv_heads=8),
    "granite-3.1-8b": _llama(
        40, hidden=4096, heads=32, ffn=12800, kv_heads=8, vocab=49155, model_type="granite",
        architectures=["GraniteForCausalLM"], tie_word_embeddings=True, attention_multiplier=0.0078125,
        embedding_multiplier=12.0, logits_scaling=16.0, residual_multiplier=0.22, max_position_embeddings=131072,
    ),
    # Qwen's.
    "qwen1.5-7b": _qwen2(32, hidden=4096, heads=32, ffn=11008, kv_heads=32, vocab=151936),
    "qwen1.5-32b": _qwen2(64, hidden=5120, heads=40, ffn=27392, kv_heads=8),
    "qwen1.5-72b": _qwen2(80, hidden=8192, heads=64, ffn=24576, kv_heads=64),
    "qwq-32b": _qwen2(64, hidden=5120, heads=40, ffn=27648, kv_heads=8, rms_norm_eps=1e-5),
    "qwen2.5-vl-3b": _qwen25_vl(
        _qwen2(36, hidden=2048, heads=16, ffn=11008, kv_heads=2, vocab=151936, tie_word_embeddings=True)
    ),
    "qwen2.5-vl-7b": _qwen25_vl(_qwen2(28, hidden=3584, heads=28, ffn=18944, kv_heads=4)),
    "qwen2.5-vl-32b": _qwen25_vl(_qwen2(64, hidden=5120, heads=40, ffn=27648, kv_heads=8), ffn=3456),
    "qwen2.5-vl-72b": _qwen25_vl(_qwen2(80, hidden=8192, heads=64, ffn=29568, kv_heads=8), ffn=3456),
    "qwen3-coder-480b-a35b": {
        **_qwen3_moe(62, hidden=6144, heads=96, ffn=8192, inner=2560), "num_key_value_heads": 8, "num_experts": 160,
    },
    "qwen3-vl-2b": _qwen3_vl(_qwen3(28, hidden=2048, heads=16, ffn=6144, tie_word_embeddings=True), small=True),
    "qwen3-vl-4b": _qwen3_vl(_qwen3(36, hidden=2560, heads=32, ffn=9728, tie_word_embeddings=True), small=True),
    "qwen3-vl-8b": _qwen3_vl(_qwen3(36, hidden=4096, heads=32, ffn=12288)),
    "qwen3-vl-32b": _qwen3_vl(_qwen3(64, hidden=5120, heads=64, ffn=25600)),
    "qwen3-vl-30b-a3b": _qwen3_vl(_qwen3_moe(48, hidden=2048, heads=32, ffn=6144, inner=768)),
    "qwen3-vl-235b-a22b": _qwen3_vl(_qwen3_moe(94, hidden=4096, heads=64, ffn=12288, inner=1536)),
    # Latent attention.
    "deepseek-v2": _deepseek_v2(
        60, hidden=5120, heads=128, ffn=12288, moe_intermediate_size=1536, experts=160, q_lora_rank=1536
    ),
    "deepseek-v3.2": _deepseek(
        heads=128, experts=256, dense=3, vocab=129280, model_type="deepseek_v32", num_nextn_predict_layers=1,
        n_group=8, topk_group=4, index_head_dim=128, index_n_heads=64, index_topk=2048,
    ),
    "moonlight-16b-a3b": _latent(
        27, hidden=2048, heads=16, ffn=11264, vocab=163840, model_type="deepseek_v3",
        architectures=["DeepseekV3ForCausalLM"], moe_intermediate_size=1408, experts=64, n_shared_experts=2,
        num_experts_per_tok=6, dense=1, q_lora_rank=None, max_position_embeddings=8192, rope_theta=50000.0,
    ),
    "kimi-k2.5": _kimi_k25(),
    "glm-4.7-flash": _glm_latent(
        47, hidden=2048, heads=20, ffn=10240, model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"],
        moe_intermediate_size=1536, experts=64, num_experts_per_tok=4, dense=1, q_lora_rank=768,
    ),
    "glm-5": _glm_latent(
        78, hidden=6144, heads=64, ffn=12288, model_type="glm_moe_dsa", architectures=["GlmMoeDsaForCausalLM"],
        moe_intermediate_size=2048, experts=256, num_experts_per_tok=8, dense=3, q_lora_rank=2048, index_head_dim=128,
        index_n_heads=32, index_topk=2048,
    ),
    # Google's, Microsoft's, Cohere's, BigCode's, EleutherAI's and OpenAI's.
    "gemma-2b": _gemma("gemma", 18, hidden=2048, heads=8, kv_heads=1, ffn=16384),
    "gemma-7b": _gemma("gemma", 28, hidden=3072, heads=16, kv_heads=16, ffn=24576),
    "gemma2-2b": _gemma("gemma2", 26, hidden=2304, heads=8, kv_heads=4, ffn=9216, **_GEMMA2),
    "gemma2-27b": _gemma(
        "gemma2", 46, hidden=4608, heads=32, kv_heads=16, ffn=36864, head_dim=128,
        **{**_GEMMA2, "query_pre_attn_scalar": 144},
    ),
    "phi-3-mini": _phi3(32, hidden=3072, heads=32, ffn=8192, vocab=32064),
    "phi-3-medium": _phi3(40, hidden=5120, heads=40, kv_heads=10, ffn=17920, vocab=32064),
    "phi-3.5-mini": _phi3(32, hidden=3072, heads=32, ffn=8192, vocab=32064),
    "phi-4-mini": _phi3(
        32, hidden=3072, heads=24, kv_heads=8, ffn=8192, vocab=200064, tie_word_embeddings=True,
        partial_rotary_factor=0.75,
    ),
    "command-r": _cohere(40, hidden=8192, heads=64, kv_heads=64, ffn=22528),
    "command-r-plus": _cohere(64, hidden=12288, heads=96, kv_heads=8, ffn=33792, use_qk_norm=True),
    "starcoder2-3b": _starcoder2(30, hidden=3072, heads=24, kv_heads=2),
    "starcoder2-7b": _starcoder2(32, hidden=4608, heads=36, kv_heads=4),
    "starcoder2-15b": _starcoder2(40, hidden=6144, heads=48, kv_heads=4, tie_word_embeddings=False),
    "gpt-neox-20b": _neox(44, hidden=6144, heads=64, vocab=50432),
    "pythia-6.9b": _neox(32, hidden=4096, heads=32, vocab=50432),
    "pythia-12b": _neox(36, hidden=5120, heads=40, vocab=50688),
    "gpt2": _gpt(12, hidden=768, heads=12, positions=1024, vocab=50257),
    "gpt2-xl": _gpt(48, hidden=1600, heads=25, positions=1024, vocab=50257),
    "bloom-560m": _bloom(24, hidden=1024, heads=16),
    "bloom-1b7": _bloom(24, hidden=2048, heads=16),
    "bloom-3b": _bloom(30, hidden=2560, heads=32),
    "bloom-7b1": _bloom(30, hidden=4096, heads=32),
    # Hybrids of attention and recurrences.
    "qwen3.5-35b-a3b": _llama(
        40, ffn=512, vocab=248320, model_type="qwen3_5_moe_text", architectures=["Qwen3_5MoeForCausalLM"],
        num_experts=256, num_experts_per_tok=8, **_DELTA_NET,
    ),
    "nemotron-h-8b": {
        "model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 21504, "num_hidden_layers": 52, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 131072, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
        "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    },
    "granite-4.0-h-small": {
        "model_type": "granitemoehybrid", "architectures": ["GraniteMoeHybridForCausalLM"], "hidden_size": 4096,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 72,
        "num_experts_per_tok": 10, "shared_intermediate_size": 1536, "intermediate_size": 768, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128,
        "mamba_chunk_size": 256, "vocab_size": 100352, "tie_word_embeddings": True, "position_embedding_type": "nope",
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    },
    "hunyuan-a13b": _llama(
        32, hidden=4096, heads=32, ffn=3072, kv_heads=8, vocab=128167, model_type="hunyuan_v1_moe", head_dim=128,
        architectures=["HunYuanMoEV1ForCausalLM"], num_experts=64, moe_topk=8, tie_word_embeddings=True,
        max_position_embeddings=32768,
    ),
    # Small ones for tests and demonstrations.
    "llama-tiny": _llama(8, hidden=256, heads=8, ffn=704, kv_heads=4, vocab=320, max_position_embeddings=512),
    "gpt2-tiny": _gpt(
        8, hidden=256, heads=8, positions=512, vocab=320, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}  # fmt: skip
