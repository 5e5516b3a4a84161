"""Vision towers of multimodal models: a config's `vision_config`, next to its `text_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from debubble.ir import InputError, RunOptions
from debubble.models.architecture import Architecture, Layer, VisionTower
from debubble.models.entries import Entries
from debubble.models.layers import unpriced_error
from debubble.models.mixers import Attention

ArchitectureT = TypeVar("ArchitectureT", bound=Architecture)

_DYNAMIC_PATCHES = 4096
"""Default patches per image if the config has no image size (Qwen2.5-VL accepts any)."""

_TEXT: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    },
    "llama4": {
        "model_type": "llama4_text", "vocab_size": 202048, "hidden_size": 5120, "num_hidden_layers": 48,
        "num_attention_heads": 40,
    },
    "mistral3": {"model_type": "mistral"},
    "qwen2_5_vl": {"model_type": "qwen2"},
    "kimi_k25": {"model_type": "deepseek_v3"},
    "qwen3_vl": {"model_type": "qwen3"},
    "qwen3_vl_moe": {"model_type": "qwen3_moe"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}  # fmt: skip
"""Family -> transformers' defaults for its `text_config`."""

_ALIASES = {
    "kimi_k2": "deepseek_v3",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""`model_type` of a language model -> the family with the same layers."""


def text_entries(config: Entries) -> Entries | None:
    """The config of a multimodal model's language model; None if the config is that of a language model.

    Raises InputError for an unsupported audio or vision tower.
    """
    for tower in ("audio_config", "vision_config"):
        if config.entries.get(tower) and (tower != "vision_config" or config.family not in _TOWERS):
            raise unpriced_error(config, tower)
    inner = config.entries.get("text_config")
    if not isinstance(inner, dict) and config.family not in _TEXT:
        return None
    if not isinstance(inner, dict):
        # Qwen2.5-VL's files have the language model's entries next to `vision_config`.
        inner = {k: v for k, v in config.entries.items() if k not in ("model_type", "architectures")}
    tied = {k: v for k, v in config.entries.items() if k == "tie_word_embeddings"}
    text = {**_TEXT.get(config.family, {}), **inner, **tied}
    text["model_type"] = _ALIASES.get(str(text.get("model_type")), text.get("model_type"))
    return Entries(text, config.name)


def read_vision(config: Entries, hidden: int) -> VisionTower | None:
    """The vision tower of a config, whose language model has this hidden size; None if it has none."""
    entries = config.entries.get("vision_config")
    if not isinstance(entries, dict):
        return None
    return _TOWERS[config.family](Entries({"model_type": config.family, **entries}, config.name), config, hidden)


def as_trained(model: ArchitectureT, options: RunOptions) -> ArchitectureT:
    """The model with the run's images and frozen parts; with LoRA its vision tower is frozen.

    Raises InputError if it does not accept images of that many patches, or has no tower to freeze.
    """
    vision, patches = model.vision, options.image_patches
    if options.freeze not in (None, "vision"):
        raise InputError(
            f"--freeze is '{options.freeze}'; what can be frozen is 'vision', and --lora freezes the rest."
        )
    if options.images < 1:
        raise InputError(f"--images must be at least 1, not {options.images}.")
    if vision is None:
        for name in ("image_patches", "images", "freeze"):
            if getattr(options, name) != getattr(RunOptions, name):
                option = f"--{name.replace('_', '-')}"
                raise InputError(f"'{model.family}' has no vision tower that debubble knows: leave out {option}.")
        return model
    if patches is not None:
        _check_patches(model.family, vision, patches)
        vision = replace(vision, patches=patches)
    trained = not options.lora and options.freeze is None
    return replace(model, vision=replace(vision, trained=trained, images=options.images))


def _check_patches(family: str, vision: VisionTower, patches: int) -> None:
    if vision.sizes == "one" and patches != vision.patches:
        raise InputError(
            f"Every image of '{family}' has {vision.patches} patches, as its vision_config says: leave out"
            " --image-patches."
        )
    if vision.sizes == "up to" and patches > vision.patches:
        raise InputError(f"An image of '{family}' has up to {vision.patches} patches, not {patches}.")
    if vision.sizes != "one" and (patches < 1 or patches % vision.merged):
        raise InputError(
            f"--image-patches must be a positive multiple of {vision.merged}, the patches of a token of '{family}',"
            f" not {patches}."
        )


def _siglip(vision: Entries, config: Entries, text: int) -> VisionTower:
    """Gemma 3: SigLIP with learned positions, pooled, normed and projected."""
    patches, pixels = _patches(vision, size=224, patch=16)
    tower = _tower(vision, hidden=768, layers=12, heads=12, ffn=3072, norm="layernorm", bias=True)
    h = tower.hidden
    return VisionTower(
        kind="SigLIP",
        tower=tower,
        patches=patches,
        merged=max(1, patches // config.number("mm_tokens_per_image", 256)),
        sizes="one",
        embedding_parameters=pixels * h + h + patches * h,
        projector_parameters=2 * h + h * text + h,
    )


def _pixtral(vision: Entries, config: Entries, text: int) -> VisionTower:
    """Mistral Small 3: rotary positions, gated MLPs, merged patches before two linear layers."""
    patches, pixels = _patches(vision, size=1024, patch=16)
    tower = _tower(vision, hidden=1024, layers=24, heads=16, ffn=4096, norm="rmsnorm", bias=False, gated=True)
    h, merged = tower.hidden, config.number("spatial_merge_size", 2) ** 2
    biases = config.flag("multimodal_projector_bias", False) * 2 * text
    return VisionTower(
        kind="Pixtral",
        tower=tower,
        patches=patches,
        merged=merged,
        sizes="up to",
        embedding_parameters=pixels * h + h,
        projector_parameters=h + merged * h * h + h * text + text * text + biases,
    )


def _llama4(vision: Entries, config: Entries, text: int) -> VisionTower:
    """Llama 4: a class token, learned positions, and an MLP after a pixel shuffle."""
    patches, pixels = _patches(vision, size=448, patch=14)
    tower = _tower(vision, hidden=768, layers=34, heads=16, ffn=5632, norm="layernorm", bias=True)
    h, inner = tower.hidden, vision.number("projector_input_dim", 4096)
    out = vision.number("projector_output_dim", 4096)
    adapter = tower.ffn * inner + out * out
    return VisionTower(
        kind="Llama 4's",
        tower=tower,
        patches=patches + 1,
        merged=round(vision.real("pixel_shuffle_ratio", 0.5) ** -2),
        sizes="one",
        embedding_parameters=pixels * h + h + (patches + 1) * h + 2 * h,
        projector_parameters=2 * h + adapter + vision.number("vision_output_dim", 7680) * text,
    )


def _qwen(vision: Entries, config: Entries, text: int) -> VisionTower:
    """Qwen2.5-VL: two frames per patch, windows in most layers, gated MLPs with biases, merged patches."""
    tower = _tower(
        vision, hidden=3584, layers=32, heads=16, ffn=3420, norm="rmsnorm", bias=True, gated=True,
        window=(vision.number("window_size", 112) // vision.number("patch_size", 14)) ** 2,
        full=vision.get("fullatt_block_indexes", (7, 15, 23, 31)),
    )  # fmt: skip
    return VisionTower(
        kind="Qwen2.5-VL's",
        tower=tower,
        patches=_DYNAMIC_PATCHES,
        merged=vision.number("spatial_merge_size", 2) ** 2,
        sizes="any",
        embedding_parameters=_pixels(vision, patch=14) * tower.hidden,
        projector_parameters=tower.hidden + _merger_parameters(vision, tower.hidden, text),
    )


def _qwen3(vision: Entries, config: Entries, text: int, *, deep: Sequence[int] = ()) -> VisionTower:
    """Qwen3-VL and Qwen3.5: two frames per patch, learned positions, merged patches.

    `deep` lists layers whose outputs go through a separate merger to the language model's first layers (DeepStack).
    """
    tower = _tower(vision, hidden=1152, layers=27, heads=16, ffn=4304, norm="layernorm", bias=True)
    h, merged = tower.hidden, vision.number("spatial_merge_size", 2) ** 2
    mergers = 1 + len(vision.get("deepstack_visual_indexes", deep))
    positions = vision.number("num_position_embeddings", 2304)
    return VisionTower(
        kind="Qwen3-VL's",
        tower=tower,
        patches=_DYNAMIC_PATCHES,
        merged=merged,
        sizes="any",
        embedding_parameters=(_pixels(vision, patch=16) + 1 + positions) * h,
        projector_parameters=(2 * h + 2 * (mergers - 1) * merged * h + mergers * _merger_parameters(vision, h, text)),
    )


def _kimi(vision: Entries, config: Entries, text: int) -> VisionTower:
    """Kimi-K2.5: learned positions, merged patches before two linear layers."""
    tower = _tower(vision, hidden=1152, layers=27, heads=16, ffn=4304, norm="layernorm", bias=True)
    h, (rows, columns) = tower.hidden, vision.get("merge_kernel_size", (2, 2))
    merged, normed = rows * columns * h, config.number("projection_hidden_size", 1152)
    positions = vision.number("pos_emb_height", 64) * vision.number("pos_emb_width", 64)
    return VisionTower(
        kind="MoonViT",
        tower=tower,
        patches=_DYNAMIC_PATCHES,
        merged=rows * columns,
        sizes="any",
        embedding_parameters=(3 * vision.number("patch_size", 14) ** 2 + 1 + positions) * h,
        projector_parameters=2 * h + 2 * normed + (merged + 1) * (merged + text),
    )


def _pixels(vision: Entries, *, patch: int) -> int:
    """Numbers per patch in Qwen's towers, where a patch spans several frames."""
    frames, channels = vision.number("temporal_patch_size", 2), vision.number("in_channels", 3)
    return frames * channels * vision.number("patch_size", patch) ** 2


def _merger_parameters(vision: Entries, hidden: int, text: int) -> int:
    """Parameters of the two linear layers that turn merged patches into a token."""
    merged = vision.number("spatial_merge_size", 2) ** 2 * hidden
    return (merged + 1) * (merged + vision.number("out_hidden_size", text))


_TOWERS: Mapping[str, Callable[[Entries, Entries, int], VisionTower]] = {
    "gemma3": _siglip,
    "llama4": _llama4,
    "mistral3": _pixtral,
    "qwen2_5_vl": _qwen,
    "kimi_k25": _kimi,
    "qwen3_vl": partial(_qwen3, deep=(8, 16, 24)),
    "qwen3_vl_moe": partial(_qwen3, deep=(8, 16, 24)),
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
}


def _patches(vision: Entries, *, size: int, patch: int) -> tuple[int, int]:
    """Patches per image, and numbers per patch."""
    side = vision.number("patch_size", patch)
    return (vision.number("image_size", size) // side) ** 2, vision.number("num_channels", 3) * side**2


def _tower(
    vision: Entries,
    *,
    hidden: int,
    layers: int,
    heads: int,
    ffn: int,
    norm: Any,
    bias: bool,
    gated: bool = False,
    window: int | None = None,
    full: Any = (),
) -> Architecture:
    """The layers of a tower, with these defaults; attention covers all patches, or in most layers a window of them."""
    hidden = vision.number("hidden_size", hidden)
    heads = vision.number("num_attention_heads", vision.get("num_heads", heads))
    count = vision.number("num_hidden_layers", vision.get("depth", layers))
    windows = [None if window is None or layer in full else window for layer in range(count)]
    return Architecture(
        family=vision.family,
        per_layer=tuple(Layer(attention=Attention(chunk=w, causal=False)) for w in windows),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=vision.head_dim(hidden, heads),
        ffn=vision.number("intermediate_size", ffn),
        vocab=1,
        gated=gated,
        norm=norm,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        whole_layers=True,
    )
