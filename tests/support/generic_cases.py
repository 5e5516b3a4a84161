"""A small model of every family that runs with transformers' own modules and is compared with transformers."""

from typing import Any

from tests.support.tiny_models import LLAMA

BASE = {**LLAMA, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
del BASE["rms_norm_eps"]

LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
CTRL = {"n_embd": 32, "dff": 48, "n_layer": 4, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}

CHANGES: dict[str, dict[str, Any]] = {
    "olmo2": {}, "phi3": {}, "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4,
    }, "starcoder2": {"sliding_window": 5}, "smollm3": {"no_rope_layers": [1, 0, 1, 1], "tie_word_embeddings": True},
    "stablelm": {"use_qkv_bias": True}, "cohere": {"tie_word_embeddings": True, "logit_scale": 0.3},
    "cohere2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neox": {"num_key_value_heads": None}, "glm4": {"head_dim": 8}, "olmo3": {"sliding_window": 5},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2}, "phi": {},
    "helium": {"head_dim": 8}, "qwen2_moe": {
        "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40,
    }, "gpt_oss": {"num_local_experts": 4, "head_dim": 8, "sliding_window": 5}, "bloom": {},
    "deepseek_v3": {**LATENT, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "glm4_moe": {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                 "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}, "ctrl": CTRL,
    "llama4_text": {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 40, "moe_layers": [1, 3]},
    "apertus": {"hidden_act": "xielu"}, "granite_swa": {"sliding_window": 5},
}  # fmt: skip
GENERIC = {name: {**BASE, "model_type": name, **changes} for name, changes in CHANGES.items()}
