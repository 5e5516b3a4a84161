"""The models of torchtitan's flavors, by the sizes in torchtitan's source files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from debubble.imports.defaults import framework_defaults
from debubble.imports.model import ExpertSizes, LatentSizes, Sizes
from debubble.models import Model


def flavor_model(name: str, flavor: str) -> Model | None:
    """The model of a flavor such as `debugmodel` of `llama3`; None if it is unknown."""
    flavor = re.sub("_(flex|varlen)(_attn)?$", "", flavor)
    sizes = framework_defaults("torchtitan")["flavors"].get(f"{name}-{flavor}")
    return None if sizes is None else _sizes(sizes, name).model()


def flavors_of(name: str) -> list[str]:
    """The known flavors of a model, in torchtitan's order; empty if the model is unknown."""
    known = framework_defaults("torchtitan")["flavors"]
    return [key.removeprefix(f"{name}-") for key in known if key.startswith(f"{name}-")]


def _sizes(sizes: Mapping[str, Any], name: str) -> Sizes:
    heads, layers = sizes["n_heads"], sizes["n_layers"]
    latent = None
    if "kv_lora_rank" in sizes:
        latent = LatentSizes(
            query_rank=sizes["q_lora_rank"] or None, rank=sizes["kv_lora_rank"], content=sizes["qk_nope_head_dim"],
            rotary=sizes["qk_rope_head_dim"], value=sizes["v_head_dim"],
        )  # fmt: skip
    return Sizes(
        layers=layers,
        hidden=sizes["dim"],
        heads=heads,
        kv_heads=sizes.get("n_kv_heads", heads),
        head_dim=sizes.get("head_dim", sizes["dim"] // heads),
        ffn=sizes.get("hidden_dim") or sizes.get("inter_dim") or _llama_width(sizes),
        vocab=sizes["vocab_size"],
        tied=sizes.get("enable_weight_tying", False),
        qk_norm=sizes.get("qk_norm", False),
        experts=_experts(sizes, name),
        latent=latent,
    )


def _experts(sizes: Mapping[str, Any], name: str) -> ExpertSizes | None:
    if "num_experts" not in sizes or not sizes.get("moe_enabled", name != "qwen3"):
        return None
    return ExpertSizes(
        count=sizes["num_experts"],
        per_token=sizes["top_k"],
        ffn=sizes["moe_inter_dim"],
        dense=tuple(range(sizes.get("n_dense_layers", 0))),
        shared=sizes["num_shared_experts"] * sizes["moe_inter_dim"] if name == "deepseek_v3" else 0,
        sinks=name == "gpt_oss",
    )


def _llama_width(sizes: Mapping[str, Any]) -> int:
    """Llama's inner width: 2/3 * 4 * hidden, rounded up to a multiple."""
    width, multiple = int(2 * 4 * sizes["dim"] / 3), sizes.get("multiple_of", 256)
    return int(multiple * -(-int(sizes.get("ffn_dim_multiplier", 1) * width) // multiple))
