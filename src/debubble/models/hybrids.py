"""Families with recurrences in place of some or all attention: state-space models, linear attention, convolutions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

from debubble.models.architecture import Architecture, Experts, Layer, Mlp
from debubble.models.entries import Entries
from debubble.models.layers import layer_kinds, sparse_mlps, unpriced_error
from debubble.models.llama_like import of_layers
from debubble.models.mixers import Attention, LinearAttention, Mixer, Parallel, StateSpace
from debubble.models.recurrences import (
    Recurrence,
    gated_linear_recurrence,
    lightning_attention,
    selective_scan,
    short_convolution,
)

_LINEAR = ("linear_attention", "mamba", "conv", "recurrent", "rec", "short_conv")
"""Kinds of layers without attention, in several families' configs."""


def _mixed(
    config: Entries,
    kinds: Sequence[str],
    linear: Mixer,
    mlps: Sequence[Mlp | Experts],
    *,
    attention: Attention | None = None,
) -> list[Layer]:
    """Layers with the linear mixer or attention by kind, and an MLP.  Raises InputError for an unknown kind."""
    attentions: dict[str, Attention] = {
        "full_attention": attention or Attention(),
        "attention": attention or Attention(),
        "sliding_attention": Attention(window=config.get("sliding_window")),
    }
    layers = []
    for kind, mlp in zip(kinds, mlps, strict=True):
        if kind not in _LINEAR and kind not in attentions:
            raise unpriced_error(config, str(kind))
        layers.append(Layer(attention=linear if kind in _LINEAR else attentions[kind], mlp=mlp))
    return layers


def _delta_net(config: Entries) -> LinearAttention:
    return LinearAttention(
        key_heads=config.number("linear_num_key_heads", 16),
        value_heads=config.number("linear_num_value_heads", 32),
        key=config.number("linear_key_head_dim", 128),
        value=config.number("linear_value_head_dim", 128),
        kernel=config.number("linear_conv_kernel_dim", 4),
    )


def _qwen3_next(
    config: Entries, *, kv_heads: int = 2, count: int = 512, per_token: int = 10, dense: bool = False
) -> Architecture:
    """Qwen3-Next and Qwen3.5: three layers of linear attention, then one of gated attention."""
    layers, every = config.layers(), config.number("full_attention_interval", 4)
    kinds = layer_kinds(
        config, default=["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    )
    changes: dict[str, Any] = {}
    if dense:
        mlps: Sequence[Mlp | Experts] = [Mlp()] * layers
    else:
        experts = Experts(
            count=config.number("num_experts", count),
            per_token=config.number("num_experts_per_tok", per_token),
            ffn=config.number("moe_intermediate_size", 512),
            shared=config.number("shared_expert_intermediate_size", 512),
            shared_gate=True,
        )
        mlps = sparse_mlps(config, experts)
        changes["ffn"] = config.number("intermediate_size", experts.ffn)
    return of_layers(
        config,
        _mixed(config, kinds, _delta_net(config), mlps, attention=Attention(gated=True)),
        kv_heads=kv_heads,
        head_dim=config.number("head_dim", 256),
        qk_norm=True,
        **changes,
    )


def _nemotron_h(config: Entries) -> Architecture:
    """Nemotron-H: a layer is a state-space model, attention, an MLP or a mixture of experts, with one norm."""
    if config.get("moe_latent_size"):
        raise unpriced_error(config, "moe_latent_size")
    space = StateSpace(
        heads=config.number("mamba_num_heads", 128),
        head_dim=config.number("mamba_head_dim", 64),
        state=config.number("ssm_state_size", 128),
        groups=config.number("n_groups", 8),
        kernel=config.number("conv_kernel", 4),
        chunk=config.number("chunk_size", 128),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
    )
    experts = Experts(
        count=config.number("n_routed_experts", 8),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("moe_intermediate_size", 7688),
        shared=config.number("moe_shared_expert_intermediate_size", 7688),
    )
    blocks = {
        "linear_attention": Layer(attention=space, mlp=None),
        "full_attention": Layer(mlp=None),
        "mlp": Layer(attention=None),
        "moe": Layer(attention=None, mlp=experts),
    }
    blocks |= {
        "M": blocks["linear_attention"], "mamba": blocks["linear_attention"], "*": blocks["full_attention"],
        "attention": blocks["full_attention"], "-": blocks["mlp"], "E": blocks["moe"],
    }  # fmt: skip
    kinds = config.get("hybrid_override_pattern") or config.get("layers_block_type") or config.get("layer_types") or ()
    for kind in kinds:
        if kind not in blocks:
            raise unpriced_error(config, str(kind))
    return of_layers(
        config,
        [blocks[kind] for kind in kinds],
        kv_heads=8,
        head_dim=config.number("head_dim", 128),
        gated=False,
        mlp_bias=config.flag("mlp_bias", False),
        norm_eps=config.real("layer_norm_epsilon", 1e-5),
    )


def _olmo_hybrid(config: Entries) -> Architecture:
    """OLMo-hybrid: three layers of Gated DeltaNet, then one of attention with norms of full queries and keys."""
    heads, hidden = config.number("num_attention_heads"), config.number("hidden_size")
    key_heads = config.number("linear_num_key_heads", heads)
    key = config.number("linear_key_head_dim", int(0.75 * hidden / key_heads))
    linear = LinearAttention(
        key_heads=key_heads,
        value_heads=config.number("linear_num_value_heads", heads),
        key=key,
        value=config.number("linear_value_head_dim", 2 * key),
        kernel=config.number("linear_conv_kernel_dim", 4),
    )
    count = config.layers()
    kinds = layer_kinds(config, default=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(count)])
    return of_layers(config, _mixed(config, kinds, linear, [Mlp()] * count), qk_norm=True)


def _scan(config: Entries, *, prefix: str, norms: bool = False) -> Recurrence:
    """Mamba's scan from a config with Mamba's entry names, or with other names and a prefix."""
    hidden = config.number("hidden_size")
    if prefix:
        names = ("expand", "d_state", "d_conv", "dt_rank", "conv_bias", "proj_bias")
    else:
        names = ("expand", "state_size", "conv_kernel", "time_step_rank", "use_conv_bias", "use_bias")
    expand, state, kernel, rank, conv_bias, bias = (prefix + name for name in names)
    auto, inner = config.entries.get(rank, "auto") == "auto", config.number(expand, 2) * hidden
    return selective_scan(
        hidden=hidden,
        inner=inner if prefix else config.number("intermediate_size", inner),
        state=config.number(state, 16),
        rank=ceil(hidden / 16) if auto else config.number(rank),
        kernel=config.number(kernel, 4),
        conv_bias=config.flag(conv_bias, True),
        bias=config.flag(bias, False),
        norms=norms,
    )


def _of_mixers(config: Entries, mixer: Recurrence | StateSpace, *, tied: bool) -> Architecture:
    """A model whose layers have only a recurrence."""
    return Architecture(
        family=config.family,
        whole_layers=True,
        per_layer=(Layer(attention=mixer, mlp=None),) * config.layers(),
        hidden=config.number("hidden_size"),
        heads=mixer.heads,
        kv_heads=mixer.heads,
        head_dim=mixer.values // mixer.heads,
        ffn=mixer.values,
        vocab=config.number("vocab_size"),
        tied=config.flag("tie_word_embeddings", tied),
        norm_eps=config.real("layer_norm_epsilon", 1e-5),
    )


def _mamba(config: Entries) -> Architecture:
    return _of_mixers(config, _scan(config, prefix=""), tied=True)


def _mamba2(config: Entries) -> Architecture:
    space = StateSpace(
        heads=config.number("num_heads", 128),
        head_dim=config.number("head_dim", 64),
        state=config.number("state_size", 128),
        groups=config.number("n_groups", 8),
        kernel=config.number("conv_kernel", 4),
        chunk=config.number("chunk_size", 256),
        conv_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
    )
    return _of_mixers(config, space, tied=False)


def _space(config: Entries, *, inner: int, normed: bool = True) -> StateSpace:
    """Mamba-2 from a config with Bamba's entry names."""
    heads = config.number("mamba_n_heads", 128)
    auto = config.entries.get("mamba_d_head", "auto") in ("auto", None)
    return StateSpace(
        heads=heads,
        head_dim=inner // heads if auto else config.number("mamba_d_head"),
        state=config.number("mamba_d_state", 256),
        groups=config.number("mamba_n_groups", 1),
        kernel=config.number("mamba_d_conv", 4),
        chunk=config.number("mamba_chunk_size", 256),
        conv_bias=config.flag("mamba_conv_bias", True),
        bias=config.flag("mamba_proj_bias", False),
        normed=normed,
    )


def _bamba(config: Entries) -> Architecture:
    """Bamba: Mamba-2 in most layers, attention in the listed ones."""
    count, listed = config.layers(), config.get("attn_layer_indices", ())
    kinds = ["full_attention" if i in listed else "linear_attention" for i in range(count)]
    space = _space(config, inner=config.number("mamba_expand", 2) * config.number("hidden_size"))
    return of_layers(
        config, _mixed(config, kinds, space, [Mlp()] * count), kv_heads=8, mlp_bias=config.flag("mlp_bias", False)
    )


def _falcon_h1(config: Entries) -> Architecture:
    """Falcon-H1: attention and Mamba-2 in parallel in every layer."""
    inner = config.number("mamba_d_ssm", config.number("mamba_expand", 2) * config.number("hidden_size"))
    space = _space(config, inner=inner, normed=config.flag("mamba_rms_norm", False))
    layer = Layer(attention=Parallel(attention=Attention(), space=space))
    return of_layers(config, [layer] * config.layers(), kv_heads=8, mlp_bias=config.flag("mlp_bias", False))


def _jamba(config: Entries) -> Architecture:
    """Jamba: Mamba in most layers, experts in every second."""
    count = config.layers()
    period, offset = config.number("attn_layer_period", 8), config.get("attn_layer_offset", 4)
    kinds = ["attention" if i % period == offset else "mamba" for i in range(count)]
    experts = Experts(
        count=config.number("num_experts", 16),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("intermediate_size"),
    )
    period, offset = config.number("expert_layer_period", 2), config.get("expert_layer_offset", 1)
    sparse = experts.count > 1
    mlps = [experts if sparse and i % period == offset else Mlp() for i in range(count)]
    return of_layers(config, _mixed(config, kinds, _scan(config, prefix="mamba_", norms=True), mlps), kv_heads=8)


def _granite_hybrid(config: Entries) -> Architecture:
    """Granite 4: Mamba-2 or attention, and experts with a shared one, or only an MLP of the shared one's width."""
    count, shared = config.layers(), config.number("shared_intermediate_size", 1024)
    kinds = layer_kinds(config, default=["linear_attention"] * count)
    mlp: Mlp | Experts = Mlp()
    if number := config.entries.get("num_local_experts", 8):
        mlp = Experts(
            count=number,
            per_token=config.number("num_experts_per_tok", 2),
            ffn=config.number("intermediate_size"),
            shared=shared,
        )
    space = _space(config, inner=config.number("mamba_expand", 2) * config.number("hidden_size"))
    return of_layers(config, _mixed(config, kinds, space, [mlp] * count), ffn=shared)


def _lfm2(config: Entries) -> Architecture:
    """LFM2: short convolutions in most layers, MLPs or experts after the first dense ones."""
    count, hidden = config.layers(), config.number("hidden_size")
    named = config.get("full_attn_idxs", range(count))
    kinds = layer_kinds(config, default=["full_attention" if i in named else "conv" for i in range(count)])
    convolution = short_convolution(
        hidden=hidden, kernel=config.number("conv_L_cache", 3), bias=config.flag("conv_bias", False)
    )
    ffn, mlps = config.number("intermediate_size"), [Mlp()] * count
    if config.family == "lfm2" and config.flag("block_auto_adjust_ff_dim", True):
        multiple = config.number("block_multiple_of", 256)
        ffn = int(config.real("block_ffn_dim_multiplier", 1.0) * int(2 * ffn / 3))
        ffn = multiple * ceil(ffn / multiple)
    sparse: Sequence[Mlp | Experts] = mlps
    if config.family == "lfm2_moe":
        experts = Experts(
            count=config.number("num_experts", 32),
            per_token=config.number("num_experts_per_tok", 4),
            ffn=config.number("moe_intermediate_size", 1792),
        )
        dense = config.get("num_dense_layers", 2)
        sparse = [Mlp() if i < dense else experts for i in range(count)]
    return of_layers(
        config,
        _mixed(config, kinds, convolution, sparse),
        kv_heads=8,
        ffn=ffn,
        tied=config.flag("tie_word_embeddings", True),
        qk_norm=True,
    )


def _recurrent_gemma(config: Entries) -> Architecture:
    """RecurrentGemma: two layers of gated linear recurrences, then one of sliding-window attention."""
    count, hidden, heads = config.layers(), config.number("hidden_size"), config.number("num_attention_heads")
    pattern = config.get("block_types") or ("recurrent", "recurrent", "attention")
    kinds = [pattern[i % len(pattern)] for i in range(count)]
    recurrence = gated_linear_recurrence(
        hidden=hidden,
        width=config.number("lru_width", hidden),
        heads=heads,
        kernel=config.number("conv1d_width", 4),
    )
    window = Attention(window=config.number("attention_window_size", 2048))
    return of_layers(
        config,
        _mixed(config, kinds, recurrence, [Mlp()] * count, attention=window),
        ffn=config.number("intermediate_size") // 2,
        activation=config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        tied=config.flag("tie_word_embeddings", True),
        output_bias=True,
        mlp_bias=True,
    )


def _minimax(config: Entries) -> Architecture:
    """MiniMax-01: alternating lightning attention and attention, with experts in all layers."""
    count, hidden, heads = config.layers(), config.number("hidden_size"), config.number("num_attention_heads")
    kinds = layer_kinds(config, default=["linear_attention" if (i + 1) % 2 else "full_attention" for i in range(count)])
    linear = lightning_attention(hidden=hidden, heads=heads, head_dim=config.head_dim(hidden, heads))
    experts = Experts(
        count=config.number("num_local_experts", 8),
        per_token=config.number("num_experts_per_tok", 2),
        ffn=config.number("intermediate_size"),
    )
    return of_layers(config, _mixed(config, kinds, linear, [experts] * count), kv_heads=8)


HYBRIDS: Mapping[str, Callable[[Entries], Architecture]] = {
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": partial(_qwen3_next, kv_heads=4, dense=True),
    "qwen3_5_moe_text": partial(_qwen3_next, count=256, per_token=8),
    "olmo_hybrid": _olmo_hybrid,
    "nemotron_h": _nemotron_h,
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "jamba": _jamba,
    "granitemoehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "recurrent_gemma": _recurrent_gemma,
    "minimax": _minimax,
}
