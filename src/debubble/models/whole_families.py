"""Families in whole layers: latent attention, and mixtures with shared experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from debubble.models.architecture import Architecture, Experts, Layer, Mlp
from debubble.models.entries import Entries
from debubble.models.layers import first_dense, mtp_layers, windows
from debubble.models.llama_like import of_layers
from debubble.models.mixers import Attention, Indexer, LatentAttention


@dataclass(frozen=True)
class _Latent:
    """A family's default sizes of latent attention."""

    content: int = 128
    rotary: int = 64
    value: int = 128
    query_rank: int | None = 1536
    rank: int = 512
    index_heads: int | None = None
    """The default for families with an indexer; None: the family has none."""


def _latent(config: Entries, mlps: Sequence[Mlp | Experts], defaults: _Latent, **changes: Any) -> Architecture:
    """A model of layers with latent attention and these MLPs."""
    content = config.number("qk_nope_head_dim", defaults.content)
    rotary = config.number("qk_rope_head_dim", defaults.rotary)
    heads = config.number("num_attention_heads")
    # Null means no latent vector of queries, as in DeepSeek-V2 Lite.
    query_rank = config.entries.get("q_lora_rank", defaults.query_rank)
    attention = LatentAttention(
        heads=heads,
        query_rank=None if query_rank is None else config.number("q_lora_rank", query_rank),
        rank=config.number("kv_lora_rank", defaults.rank),
        content=content,
        rotary=rotary,
        value=config.number("v_head_dim", defaults.value),
        bias=config.flag("attention_bias", False),
    )
    indexers = _indexers(config, len(mlps), defaults)
    layers = [
        Layer(attention=replace(attention, indexer=indexer), mlp=mlp)
        for indexer, mlp in zip(indexers, mlps, strict=True)
    ]
    return of_layers(config, layers, kv_heads=heads, head_dim=content + rotary, **changes)


def _indexers(config: Entries, layers: int, defaults: _Latent) -> list[Indexer | None]:
    """The indexer of every layer; in GLM-5 some layers reuse the choice of a previous one."""
    if defaults.index_heads is None:
        return [None] * layers
    indexer = Indexer(
        heads=config.number("index_n_heads", defaults.index_heads),
        width=config.number("index_head_dim", 128),
        tokens=config.number("index_topk", 2048),
    )
    every, first = config.number("index_topk_freq", 1), config.get("index_skip_topk_offset", 2)
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    kinds = kinds or ["S" if max(i - first + 1, 0) % every else "F" for i in range(layers)]
    return [replace(indexer, reused=kind in ("S", "shared")) for kind in kinds]


def _deepseek(config: Entries) -> Architecture:
    """DeepSeek-V2 and V3, and Kimi-K2: latent attention, dense first layers, shared experts; V3.2: an indexer."""
    if config.family == "deepseek_v2":
        mlps = first_dense(config, count=64, ffn=1407, shared=2, per_token=None, dense=0)
    else:
        mlps = first_dense(config, count=256, ffn=2048, shared=1, per_token=8, dense=3)
    defaults = _Latent(index_heads=64 if config.family == "deepseek_v32" else None)
    return _latent(config, mlps, defaults, mtp_layers=mtp_layers(config))


def _dense_latent(config: Entries) -> Architecture:
    """MiniCPM3 and Youtu: latent attention and MLPs."""
    if config.family == "minicpm3":
        value = config.number("hidden_size") // config.number("num_attention_heads")
        defaults = _Latent(content=64, rotary=32, value=value, query_rank=768, rank=256)
    else:
        defaults = _Latent()
    return _latent(
        config, [Mlp()] * config.layers(), defaults, tied=config.flag("tie_word_embeddings", True),
        mlp_bias=config.flag("mlp_bias", False),
    )  # fmt: skip


def _sparse_latent(config: Entries) -> Architecture:
    """GLM-4 MoE Lite, GLM-5 and Sarvam's MLA models: latent attention, dense first layers, a shared expert."""
    if config.family == "glm4_moe_lite":
        mlps = first_dense(config, count=64, ffn=1536, shared=1, per_token=4, dense=1)
        defaults = _Latent(content=192, value=256, query_rank=768)
    elif config.family == "glm_moe_dsa":
        mlps = first_dense(config, count=256, ffn=2048, shared=1, per_token=8, dense=3)
        defaults = _Latent(content=192, value=256, query_rank=2048, index_heads=32)
    else:
        mlps = first_dense(config, count=128, ffn=2048, shared=1, per_token=8, dense=1)
        defaults = _Latent(query_rank=None)
    kinds = config.get("mlp_layer_types")
    if kinds:
        experts = next(mlp for mlp in mlps if isinstance(mlp, Experts))
        mlps = [experts if kind == "sparse" else Mlp() for kind in kinds]
    return _latent(config, mlps, defaults, mtp_layers=mtp_layers(config))


def _glm4_moe(config: Entries) -> Architecture:
    mlps = first_dense(config, count=128, ffn=1408, shared=1, per_token=8, dense=1)
    return of_layers(
        config,
        [Layer(mlp=mlp) for mlp in mlps],
        kv_heads=8,
        qk_norm=config.flag("use_qk_norm", False),
        output_bias=False,
        mtp_layers=mtp_layers(config),
    )


def _gpt_oss(config: Entries) -> Architecture:
    experts = Experts(
        count=config.number("num_local_experts", 128),
        per_token=config.number("num_experts_per_tok", config.get("experts_per_token", 4)),
        ffn=config.number("intermediate_size"),
        bias=True,
    )
    layers = [Layer(attention=Attention(window=w, sinks=True), mlp=experts) for w in windows(config, default=128)]
    bias = config.flag("attention_bias", True)
    return of_layers(
        config, layers, kv_heads=8, head_dim=config.number("head_dim", 64), qkv_bias=bias, output_bias=bias
    )


def _llama4(config: Entries) -> Architecture:
    """Llama 4's language model: dense layers and mixtures in alternation; most layers attend within chunks."""
    count, inner = config.layers(), config.number("intermediate_size", 8192)
    step = config.number("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers", range(step - 1, count, step))
    rotary = config.get("no_rope_layers") or [
        (i + 1) % config.number("no_rope_layer_interval", 4) for i in range(count)
    ]
    chunk = config.entries.get("attention_chunk_size", 8192)
    experts = Experts(
        count=config.number("num_local_experts", 16),
        per_token=config.number("num_experts_per_tok", 1),
        ffn=inner,
        shared=inner,
    )
    layers = [
        Layer(attention=Attention(chunk=chunk if rotary[i] else None), mlp=experts if i in sparse else Mlp())
        for i in range(count)
    ]
    return of_layers(
        config,
        layers,
        kv_heads=8,
        head_dim=config.number("head_dim", 128),
        ffn=config.number("intermediate_size_mlp", 16384),
    )


def _ernie4_5_moe(config: Entries) -> Architecture:
    """ERNIE 4.5: dense first layers, shared experts."""
    count, ffn = config.layers(), config.number("moe_intermediate_size", 1536)
    experts = Experts(
        count=config.number("moe_num_experts", 64),
        per_token=config.number("moe_k", 6),
        ffn=ffn,
        shared=config.get("moe_num_shared_experts", 2) * ffn,
    )
    begin, end = config.get("moe_layer_start_index", 1), config.get("moe_layer_end_index", -1)
    step = config.number("moe_layer_interval", 1)
    end = count - 1 if end == -1 else end
    layers = [Layer(mlp=experts if (i + 1) % step == 0 and begin <= i <= end else Mlp()) for i in range(count)]
    bias = config.flag("use_bias", False)
    return of_layers(
        config, layers, kv_heads=4, tied=config.flag("tie_word_embeddings", True), qkv_bias=bias, output_bias=bias,
        mlp_bias=bias,
    )  # fmt: skip


def _hunyuan_moe(config: Entries) -> Architecture:
    """Hunyuan: every layer has experts and a shared expert of the same width."""
    ffn, per_token = config.number("intermediate_size"), config.get("moe_topk", 1)
    experts = Experts(
        count=config.number("num_experts", 1),
        per_token=per_token if isinstance(per_token, int) else per_token[0],
        ffn=ffn,
        shared=ffn,
    )
    return of_layers(config, [Layer(mlp=experts)] * config.layers(), qk_norm=True)


WHOLE_FAMILIES: Mapping[str, Callable[[Entries], Architecture]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek,
    "kimi_k2": _deepseek,
    "minicpm3": _dense_latent,
    "youtu": _dense_latent,
    "glm4_moe_lite": _sparse_latent,
    "glm_moe_dsa": _sparse_latent,
    "sarvam_mla": _sparse_latent,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "ernie4_5_moe": _ernie4_5_moe,
    "hunyuan_v1_moe": _hunyuan_moe,
}
