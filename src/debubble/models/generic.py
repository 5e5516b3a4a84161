"""Models of families without debubble units, which are priced as a Llama of their sizes, in whole layers.

Differences in time and memory are read from the config: gates, experts, windows, biases, tied tables.
"""

from __future__ import annotations

from debubble.ir import InputError
from debubble.models.architecture import Architecture, Experts, Layer, Mlp
from debubble.models.entries import Entries
from debubble.models.layers import sparse_mlps, windows
from debubble.models.mixers import Attention

KNOWN = frozenset(
    (
        "apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "cwm",
        "diffllama", "ernie4_5", "exaone4", "falcon", "flex_olmo", "flint", "glm", "glm4", "gpt_neox",
        "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium",
        "hyperclovax", "internlm3", "iquestcoder", "jais2", "mellum", "minimax_m2", "ministral3", "mpt", "olmo",
        "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2_moe", "seed_oss", "smollm3",
        "stablelm", "starcoder2", "vaultgemma",
    )
)  # fmt: skip
"""Families whose default models have the parameters of transformers' to 0.1%; models of others have a remark."""
UNGATED = frozenset(
    (
        "apertus", "arcee", "biogpt", "bloom", "codegen", "falcon", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj",
        "jais2", "mpt", "nemotron", "opt", "persimmon", "phi", "starcoder2",
    )
)  # fmt: skip
"""Families whose MLP has no gate."""
TIED = frozenset(
    (
        "bloom", "cohere", "cohere2", "ernie4_5", "falcon", "gpt_neo", "granite_swa", "mpt", "opt", "smollm3",
        "starcoder2", "vaultgemma",
    )
)  # fmt: skip
"""Families with tied tables unless the config says otherwise."""
QK_NORMED = frozenset(("apertus", "exaone4", "flex_olmo", "olmo2", "olmo3", "olmoe", "persimmon"))
"""Families with norms of queries and keys."""
FOUR_NORMS = frozenset(("glm4", "vaultgemma"))
"""Families with norms on the outputs of both halves of a layer."""
FP32_NORMS = frozenset(("cohere", "cohere2"))
"""Families whose LayerNorm has the operators of an RMSNorm."""
_LAYERS = ("full_attention", "sliding_attention")
_OTHER_LAYERS = {
    "index_topk": "attention to tokens that an indexer chooses",
    "is_encoder_decoder": "an encoder",
    "type_vocab_size": "an encoder's segments",
    "hidden_size_per_layer_input": "tables of every layer",
    "hybrid_override_pattern": "layers by a pattern",
    "layers_block_type": "layers of several kinds",
    "block_types": "layers of several kinds",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "conv_L_cache": "convolutions",
    "linear_num_key_heads": "linear attention",
    "kv_lora_rank": "latent attention",
    "kv_channels": "heads of another width",
    "moe_num_experts": "experts by other names",
}
"""Config entry of models with other layers than Llama's -> a phrase for these layers; the most specific come first."""
ENCODERS = frozenset(
    (
        "albert", "bart", "beit", "bert", "camembert", "clip", "deberta", "deberta-v2", "deit", "dinov2", "distilbert",
        "electra", "longformer", "modernbert", "mpnet", "mt5", "nomic_bert", "pegasus", "roberta", "siglip", "swin",
        "t5", "vit", "wav2vec2", "whisper", "xlm-roberta",
    )
)  # fmt: skip
"""Families that are not causal language models."""


PER_TOKEN = {
    "granitemoe": 8, "gpt_oss": 4, "olmoe": 8, "phimoe": 2, "qwen2_moe": 4, "flex_olmo": 5, "glm4_moe": 8,
}  # fmt: skip
"""Family -> experts per token, unless the config says otherwise."""


def read_other(config: Entries) -> Architecture:
    """The model of such a config.  Raises InputError if its layers are not attention and an MLP."""
    _check_layers(config)
    try:
        return _like_llama(config)
    except InputError as error:
        if config.family in KNOWN:
            raise
        raise InputError(
            f"debubble does not know the family '{config.family}', and cannot take it for a Llama: {error}  Give the"
            " units of this one with --units."
        ) from error


def _like_llama(config: Entries) -> Architecture:
    entries, family = config.entries, config.family
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    gated = family not in UNGATED
    layer_norm = any("layer_norm" in key or key == "norm_epsilon" for key in entries)
    biased = any(entries.get(key) for key in ("use_bias", "bias"))
    return Architecture(
        family=family,
        whole_layers=True,
        known=family in KNOWN,
        per_layer=tuple(
            Layer(attention=Attention(window=window), mlp=mlp)
            for window, mlp in zip(windows(config), _mlps(config), strict=True)
        ),
        hidden=hidden,
        heads=heads,
        kv_heads=1 if _shares_all_keys(config) else config.number("num_key_value_heads", heads),
        head_dim=config.head_dim(hidden, heads),
        ffn=config.number("intermediate_size", None if gated else 4 * hidden),
        vocab=config.number("vocab_size"),
        gated=gated,
        tied=config.flag("tie_word_embeddings", family in TIED),
        norm="layernorm" if layer_norm and family not in FP32_NORMS else "rmsnorm",
        qk_norm=family in QK_NORMED,
        norms_results=family in FOUR_NORMS,
        qkv_bias=biased or any(entries.get(key) for key in ("attention_bias", "qkv_bias", "use_qkv_bias")),
        output_bias=biased,
        mlp_bias=biased or bool(entries.get("mlp_bias")),
        attention_dropout=_dropout(config, "attention_dropout"),
        residual_dropout=_dropout(config, "residual_dropout"),
        embedding_dropout=_dropout(config, "embedding_dropout"),
    )


_DROPOUTS = {
    "attention_dropout": ("attention_dropout", "attn_pdrop"),
    "residual_dropout": ("resid_pdrop", "hidden_dropout", "residual_dropout", "resid_dropout", "dropout"),
    "embedding_dropout": ("embd_pdrop", "emb_pdrop", "embedding_dropout", "embed_dropout", "dropout"),
}
"""Dropout -> the config entries for its probability, in some family."""
_DROPPING = {
    "seed_oss": ("attention_dropout", "residual_dropout"), "opt": ("residual_dropout", "embedding_dropout"),
    "gpt_bigcode": tuple(_DROPOUTS),
}  # fmt: skip
"""Family -> its dropouts with probability 0.1, unless the config says otherwise."""


def _dropout(config: Entries, name: str) -> float:
    default = 0.1 if name in _DROPPING.get(config.family, ()) else 0.0
    return next((config.real(entry) for entry in _DROPOUTS[name] if config.get(entry) is not None), default)


def _check_layers(config: Entries) -> None:
    entries = config.entries
    kinds = [f"{kind} layers" for kind in entries.get("layer_types") or () if kind not in _LAYERS]
    named = [name for name in entries.get("architectures") or () if not name.endswith(("CausalLM", "LMHeadModel"))]
    unknown = [*(f"{words} ({key})" for key, words in _OTHER_LAYERS.items() if entries.get(key)), *kinds, *named]
    if config.family in ENCODERS:
        unknown.insert(0, "an encoder, not a causal language model")
    if unknown:
        raise InputError(
            f"{config.name} has the model_type '{config.family}' with {unknown[0]}, which debubble has no layers for:"
            " give the units of this one with --units."
        )


def _shares_all_keys(config: Entries) -> bool:
    """Tell whether attention is multi-query (Falcon, unless its config has the number of key-value heads)."""
    return bool(config.entries.get("multi_query")) and not config.entries.get("new_decoder_architecture")


def _mlps(config: Entries) -> list[Mlp | Experts]:
    """The MLP or the experts of every layer."""
    counts = (config.get(key) for key in ("num_local_experts", "num_experts", "n_routed_experts"))
    count = next((count for count in counts if count), None)
    if count is None:
        return [Mlp()] * config.layers()
    ffn = config.number("moe_intermediate_size", config.get("intermediate_size"))
    experts = Experts(
        count=count,
        per_token=config.number("num_experts_per_tok", PER_TOKEN.get(config.family)),
        ffn=ffn,
        shared_gate=config.family == "qwen2_moe",
        shared=config.get("shared_expert_intermediate_size") or ffn * config.get("n_shared_experts", 0),
        bias=bool(config.entries.get("experts_bias")),
    )
    return sparse_mlps(config, experts, dense=config.get("first_k_dense_replace", 0))
