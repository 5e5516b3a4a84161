"""The models that are known by name, as Hugging Face configs.

Sources: each model's own `config.json` on the Hugging Face hub; GPT-3 from Brown et al. 2020, Table 2.1, in
Megatron-LM's shape (hidden size 5120 for 13B, vocabulary 51200).  The 18B, 23B and 28B models are Obscura's: the
13B ones with more layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.registry import Registry

models: Registry[ModelConfig] = Registry("debubble.models", what="model")


def named_model(text: str) -> ModelConfig:
    """The model of a built-in name, a `config.json`, or a folder with one.  Raises InputError if it is none of them."""
    if text in models:
        return models[text]
    if Path(text).exists() or Path(text).suffix == ".json":
        return ModelConfig.from_hf(text)
    raise InputError(f"'{text}' is neither a file nor a known model; there are: {', '.join(models)}.")


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


def _llama3(layers: int, *, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return _llama(layers, hidden=hidden, heads=heads, ffn=ffn, kv_heads=8, vocab=128256,
                  max_position_embeddings=8192, rope_theta=500000.0)  # fmt: skip


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
    "gpt3-13b": _gpt(40, **_GPT3_13B),
    "gpt3-18b": _gpt(56, **_GPT3_13B),
    "gpt3-23b": _gpt(72, **_GPT3_13B),
    "gpt3-28b": _gpt(88, **_GPT3_13B),
    "gpt3-175b": _gpt(96, hidden=12288, heads=96, positions=2048),
    "qwen2.5-32b": _llama(
        64, hidden=5120, heads=40, ffn=27648, kv_heads=8, vocab=152064, model_type="qwen2",
        architectures=["Qwen2ForCausalLM"], max_position_embeddings=32768, rope_theta=1000000.0,
    ),
    "mixtral-8x7b": _llama(
        32, hidden=4096, heads=32, ffn=14336, kv_heads=8, model_type="mixtral",
        architectures=["MixtralForCausalLM"], max_position_embeddings=32768, rope_theta=1000000.0,
        num_local_experts=8, num_experts_per_tok=2,
    ),
    "llama-tiny": _llama(8, hidden=256, heads=8, ffn=704, kv_heads=4, vocab=320, max_position_embeddings=512),
    "gpt2-tiny": _gpt(
        8, hidden=256, heads=8, positions=512, vocab=320, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}  # fmt: skip

for _name, _config in _CONFIGS.items():
    models.add(_name, ModelConfig.from_hf(_config))
