"""A small model of every family that runs with units."""

from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "hidden_act": "silu", "initializer_range": 0.3,
}  # fmt: skip
LLAMA_TIED = {**LLAMA, "tie_word_embeddings": True}
LLAMA3_ROPE = {
    **LLAMA,
    "attention_bias": True,
    "mlp_bias": True,
    "rope_scaling": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}  # fmt: skip
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 8, "head_dim": 8}
QWEN2 = {**LLAMA, "model_type": "qwen2", "use_sliding_window": False}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 16, "use_sliding_window": False}
QWEN2_WINDOWED = {**QWEN2, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
GEMMA = {
    **LLAMA, "model_type": "gemma", "head_dim": 16, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "pad_token_id": 0,
}  # fmt: skip
GEMMA2 = {
    **GEMMA, "model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 5,
    "query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
}  # fmt: skip
GEMMA3 = {
    **GEMMA2, "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
MIXTRAL = {
    **LLAMA, "model_type": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None,
}  # fmt: skip
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    "norm_topk_prob": False, "mlp_only_layers": [1],
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 61,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
GPT2_UNTIED = {**GPT2, "tie_word_embeddings": False}

FAMILIES = {
    "llama": LLAMA, "llama-tied": LLAMA_TIED, "llama3-rope": LLAMA3_ROPE, "mistral": MISTRAL, "qwen2": QWEN2,
    "qwen2-windowed": QWEN2_WINDOWED, "qwen3": QWEN3, "gemma": GEMMA, "gemma2": GEMMA2, "gemma3": GEMMA3, "gpt2": GPT2,
    "mixtral": MIXTRAL, "qwen3-moe": QWEN3_MOE,
}  # fmt: skip
"""One small model of every family and of its variants."""


def with_layers(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The model with another number of layers."""
    return {**config, "n_layer" if "n_layer" in config else "num_hidden_layers": layers}
