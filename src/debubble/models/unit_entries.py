"""The config entries that debubble's units support; a model with other entries runs with transformers' modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.models.entries import Entries

_COMMON = "attention_dropout hidden_act initializer_range pad_token_id tie_word_embeddings vocab_size"
_LLAMA = (
    f"{_COMMON} head_dim hidden_size intermediate_size num_attention_heads num_hidden_layers num_key_value_heads"
    " rms_norm_eps rope_parameters rope_scaling rope_theta"
)
_GEMMA = _LLAMA.replace("hidden_act", "hidden_activation") + (
    " attention_bias final_logit_softcapping hidden_act layer_types query_pre_attn_scalar sliding_window"
)
_ROUTERS = " num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef"
_WINDOWS = " layer_types max_window_layers sliding_window use_sliding_window"

KNOWN: Mapping[str, frozenset[str]] = {
    family: frozenset(entries.split())
    for family, entries in {
        "llama": _LLAMA + " attention_bias mlp_bias",
        "mistral": _LLAMA + " sliding_window",
        "qwen2": _LLAMA + _WINDOWS,
        "qwen3": _LLAMA + _WINDOWS + " attention_bias",
        "gemma": _LLAMA + " attention_bias hidden_activation",
        "gemma2": _GEMMA + " attn_logit_softcapping",
        "gemma3_text": _GEMMA + " rope_local_base_freq sliding_window_pattern",
        "gpt2": (
            "activation_function attn_pdrop embd_pdrop initializer_range layer_norm_epsilon n_embd n_head n_inner"
            " n_layer n_positions num_hidden_layers pad_token_id resid_pdrop tie_word_embeddings vocab_size"
        ),
        "mixtral": _LLAMA + _ROUTERS + " sliding_window",
        "qwen3_moe": (
            _LLAMA + _ROUTERS + " attention_bias decoder_sparse_step mlp_only_layers moe_intermediate_size"
            " norm_topk_prob sliding_window use_sliding_window"
        ),
    }.items()
}
"""Family that runs with debubble's units -> the entries that these read as transformers does (of the two activation
functions in Gemma's configs, the one that transformers reads)."""

DEFAULTS: Mapping[str, Any] = {
    "add_cross_attention": False, "attn_logit_softcapping": None,
    "chunk_size_feed_forward": 0, "is_causal": True, "is_decoder": False, "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0, "pruned_heads": {}, "reorder_and_upcast_attn": False, "router_jitter_noise": 0.0,
    "scale_attn_by_inverse_layer_idx": False, "scale_attn_weights": True, "tie_encoder_decoder": False,
    "use_bidirectional_attention": False, "use_mrope": False,
}  # fmt: skip
"""Entries that modules of transformers read and the units do not -> the only value that the units support."""

WITHOUT_EFFECT = frozenset(
    (
        "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_flash_attn_2_enabled",
        "_name_or_path", "_sliding_window_pattern", "architectures", "attn_implementation", "auto_map", "bad_words_ids",
        "begin_suppress_tokens", "bos_token_id", "cls_token_id", "custom_pipelines", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "experts_implementation", "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id",
        "forced_eos_token_id", "gradient_checkpointing", "id2label", "label2id", "length_penalty", "mask_token_id",
        "max_length", "max_position_embeddings", "max_window_layers", "min_length", "model_type", "n_ctx",
        "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_labels", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_scores", "prefix", "pretraining_tp", "problem_type",
        "quantization_config", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
        "sep_token_id", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
        "summary_use_proj", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p",
        "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    )
)  # fmt: skip
"""Entries that do not change a training step, or that are checked elsewhere (quantization_config)."""

ROPES = ("default", "linear", "llama3")
"""The types of rotary scaling that the units support."""
_ROTARY = (
    "factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings", "rope_theta", "rope_type",
    "type",
)  # fmt: skip
ACTIVATIONS = ("gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish")
"""The activation functions that the units support."""


def entry_beyond_units(config: Entries) -> str | None:
    """The first entry of a config, with its value, that debubble's units do not support.

    None if they support all, or the family has no units.
    """
    known = KNOWN.get(config.family)
    if known is None:
        return None
    unsupported = (name for name, value in config.entries.items() if _is_unsupported(config, name, value, known))
    return next((f"{name}: {config.entries[name]!r}"[:80] for name in unsupported), None)


def _is_unsupported(config: Entries, name: str, value: Any, known: frozenset[str]) -> bool:
    """Tell whether an entry describes another model than the units compute."""
    if name in known:
        match name:
            case "hidden_act" | "hidden_activation" | "activation_function":
                return value is not None and value not in ACTIVATIONS
            case "rope_scaling" | "rope_parameters":
                both = config.entries.get("rope_scaling") and config.entries.get("rope_parameters")
                return bool(both) or _is_other_rope(value or {})
        return False
    if name in DEFAULTS:
        default = DEFAULTS[name]
        return not (value == default or (value is None and not default))
    # An entry that is false or empty has no effect.
    return name not in WITHOUT_EFFECT and bool(value)


def _is_other_rope(rotary: Mapping[str, Any]) -> bool:
    """Tell whether the units do not support rotary positions, which may be given per kind of layer."""
    if any(isinstance(value, Mapping) for value in rotary.values()):
        return any(isinstance(value, Mapping) and _is_other_rope(value) for value in rotary.values())
    if rotary.get("rope_type", rotary.get("type", "default")) not in ROPES:
        return True
    return any(
        value is not None and name not in _ROTARY and not (name == "partial_rotary_factor" and value == 1)
        for name, value in rotary.items()
    )
