"""The layers of a Hugging Face config: windows, rotary positions, and the kind of every layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from debubble.ir import InputError
from debubble.models.architecture import Experts, Layer, Mlp
from debubble.models.entries import Entries
from debubble.models.mixers import Attention, Rope

_ALL_SLIDING = ("mistral", "mixtral", "starcoder2", "phi3")
"""Families in which every layer has the window, if the config has one."""
_UNWINDOWED = ("mixtral", "starcoder2", "phi3")
"""Families without a default window; in others the default is 4096 tokens."""
_NEVER_SLIDING = ("llama", "gemma")
"""Families whose models in transformers ignore the window in their configs."""
_FULL_EVERY = {"gemma2": 2, "gpt_oss": 2, "gemma3_text": 6}
"""Family -> every how many layers one has full attention, unless the config says otherwise."""


def like_layers(
    config: Entries, *, mlps: Sequence[Mlp | Experts] | None = None, theta: float = 10000.0
) -> tuple[Layer, ...]:
    """Layers of Llama-like models, with the same rotary positions, whose base is `theta` by default."""
    # transformers 5 writes `rope_parameters`; earlier versions `rope_theta` and `rope_scaling`.
    rotary = {**config.get("rope_scaling", {}), **config.get("rope_parameters", {})}
    rope = rope_of(config, {"rope_theta": config.get("rope_theta", theta), **rotary})
    per_layer = windows(config)
    kinds = zip(per_layer, mlps or [Mlp()] * len(per_layer), strict=True)
    return tuple(Layer(attention=Attention(rope=rope, window=window), mlp=mlp) for window, mlp in kinds)


def first_dense(
    config: Entries, *, count: int, ffn: int, shared: int, per_token: int | None, dense: int
) -> list[Mlp | Experts]:
    """The feed-forward of every layer: MLPs in the first `dense` layers, then experts with `shared` ones.

    The arguments are a family's defaults.
    """
    width = config.number("moe_intermediate_size", ffn)
    experts = Experts(
        count=config.number("n_routed_experts", count),
        per_token=config.number("num_experts_per_tok", per_token),
        ffn=width,
        shared=config.get("n_shared_experts", shared) * width,
        reach=config.number("topk_group", 1) / config.number("n_group", 1),
    )
    dense = config.get("first_k_dense_replace", dense)
    return [Mlp() if layer < dense else experts for layer in range(config.layers())]


def mtp_layers(config: Entries) -> int:
    """Number of multi-token-prediction modules, from the published entry or transformers'."""
    count = config.get("num_nextn_predict_layers", config.get("num_mtp_layers", 0))
    return config.number("num_nextn_predict_layers", count) if count else 0


def layer_kinds(config: Entries, *, default: list[str]) -> list[str]:
    """The kind of every layer; raises InputError if their number is not that of layers."""
    kinds: list[str] = config.get("layer_types") or default
    _check_count(config, kinds)
    return kinds


def _check_count(config: Entries, kinds: Sequence[object]) -> None:
    layers = config.layers()
    if len(kinds) != layers:
        raise InputError(f"{config.name} has `layer_types` for {len(kinds)} layers, but `num_hidden_layers` {layers}.")


def sparse_mlps(config: Entries, experts: Experts, *, dense: int = 0) -> list[Mlp | Experts]:
    """The feed-forward of every layer: experts, or MLPs in the first `dense` layers and where the config says so."""
    step, dense_layers = config.number("decoder_sparse_step", 1), set(config.get("mlp_only_layers", ()))
    return [
        experts if layer >= dense and (layer + 1) % step == 0 and layer not in dense_layers else Mlp()
        for layer in range(config.layers())
    ]


def unpriced_error(config: Entries, entry: str) -> InputError:
    """The error for a model with a config entry that debubble has no costs for."""
    return InputError(
        f"{config.name} has the model_type '{config.family}' with '{entry}', which debubble has no layers for: give the"
        " units of this one with --units."
    )


def windows(config: Entries, *, default: int | None = 4096) -> tuple[int | None, ...]:
    """The window of every layer in tokens, including the token itself; None: no window."""
    window = config.entries.get("sliding_window", None if config.family in _UNWINDOWED else default)
    sliding = _sliding(config)
    _check_count(config, sliding)
    return tuple(window if slides else None for slides in sliding)


def _sliding(config: Entries) -> Sequence[bool]:
    """Whether the attention has a window, per layer."""
    family, count = config.family, config.layers()
    if family in _NEVER_SLIDING:
        return [False] * count
    if family in _ALL_SLIDING:
        return [True] * count
    if family == "qwen3_moe":
        return [bool(config.get("use_sliding_window"))] * count
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window"):
        return [False] * count
    if types := config.get("layer_types"):
        return [kind == "sliding_attention" for kind in types]
    if family in ("qwen2", "qwen3"):
        return [layer >= config.get("max_window_layers", 28) for layer in range(count)]
    if family in _FULL_EVERY:
        every = _FULL_EVERY[family]
        # transformers reads the pattern only for Gemma 3.
        every = config.number("sliding_window_pattern", every) if family == "gemma3_text" else every
        return [(layer + 1) % every != 0 for layer in range(count)]
    return [False] * count


def rope_of(config: Entries, rotary: Mapping[str, Any]) -> Rope:
    """The rotary positions that these config entries describe."""
    entries = Entries({**rotary, "model_type": config.family}, f"{config.name}, in its rotary positions,")
    theta, kind = entries.real("rope_theta"), str(entries.get("rope_type", entries.get("type", "default")))
    match kind:
        case "linear":
            return Rope(theta=theta, kind=kind, factor=entries.real("factor"))
        case "llama3":
            return Rope(
                theta=theta,
                kind=kind,
                factor=entries.real("factor"),
                low=entries.real("low_freq_factor"),
                high=entries.real("high_freq_factor"),
                original_length=entries.number("original_max_position_embeddings"),
            )
        case _:
            return Rope(theta=theta, kind=kind)
