"""Names of parameters in Hugging Face checkpoints, where they differ from transformers' models.

Checkpoints have a tensor per expert, models one for all experts of a layer; Mixtral's checkpoints have another name for
the mixture; checkpoints of tied models lack the head's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_TABLE = "lm_head.weight"
TABLE = {True: "transformer.wte.weight", False: "model.embed_tokens.weight"}
"""Name of the embedding's table, by whether the model is GPT-2."""


@dataclass(frozen=True)
class _Names:
    """A family's names, in checkpoints, of a mixture and of its experts' gate, up and down projections."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    mixture: str = "mlp"
    stored_mixture: str = "mlp"
    """The mixture's name in checkpoints; `mixture` is that in the model."""


_W = _Names("w1", "w3", "w2", stored_mixture="block_sparse_moe")
_EXPERTS = {
    **dict.fromkeys(
        (
            "afmoe", "axk1", "axk2", "beam", "cohere2_moe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe",
            "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite", "hunyuan_v1_moe", "hy_v3", "kolibri1",
            "laguna", "longcat_flash", "mellum", "mimo_v2_flash", "olmoe", "qwen2_moe", "qwen3_5_moe_text",
            "qwen3_moe", "qwen3_next", "sarvam_mla", "sarvam_moe", "solar_open",
        ),
        _Names(),
    ),
    **dict.fromkeys(("minimax", "minimax_m2", "mixtral", "phimoe"), _W),
    "jamba": _Names(mixture="feed_forward", stored_mixture="feed_forward"),
    "lfm2_moe": _Names("w1", "w3", "w2", mixture="feed_forward", stored_mixture="feed_forward"),
    "nemotron_h": _Names(mixture="mixer", stored_mixture="mixer"),
}  # fmt: skip
_GRANITE = {".experts.gate_up_proj": ".input_linear.weight", ".experts.down_proj": ".output_linear.weight",
            ".router.weight": ".router.layer.weight"}  # fmt: skip
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "gpt_neox": {HEAD_TABLE: "embed_out.weight"},
    "ernie4_5_moe": {"mlp.gate.moe_statics.": "mlp.moe_statics."},
    "exaone_moe": {"mlp.gate.e_score": "mlp.e_score"},
    "flint": {"self_attn.sinks": "self_attn.softmax_offset"},
    "hy_v3": {"mlp.gate.weight": "mlp.router.gate.weight", "mlp.e_score_correction_bias": "mlp.expert_bias",
              "mlp.shared_experts.": "mlp.shared_mlp."},
    "laguna": {"mlp.gate.e_score": "mlp.experts.e_score", "mlp.shared_experts.": "mlp.shared_expert."},
    "mimo_v2_flash": {"self_attn.sinks": "self_attn.attention_sink_bias"},
    "nemotron_h": {"model.": "backbone."},
    "phimoe": {".router.weight": ".gate.weight"},
    "lfm3": {"self_attn.g_proj.": "self_attn.gate_proj."},
    **dict.fromkeys(("granitemoe", "granitemoehybrid", "granitemoeshared"), _GRANITE),
}  # fmt: skip
"""Family -> substrings of the model's names -> their replacements in checkpoints."""


def checkpoint_tensors(name: str, tensor: Tensor, family: str) -> dict[str, Tensor]:
    """The tensors of a parameter in a checkpoint of the family, by name; they may be views."""
    names = _EXPERTS.get(family)
    suffixes = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")
    suffix = next((suffix for suffix in suffixes if suffix in name), "")
    checkpoint_name = _checkpoint_name(name, family)
    if names is None or not suffix:
        return {checkpoint_name: tensor}
    prefix = checkpoint_name.removesuffix(suffix.removeprefix(".experts."))
    match suffix:
        case ".experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            projections = {names.gate: gate, names.up: up}
        case ".experts.up_proj":
            projections = {names.up: tensor}
        case _:
            projections = {names.down: tensor}
    return {f"{prefix}{e}.{name}.weight": weight for name, t in projections.items() for e, weight in enumerate(t)}


def _checkpoint_name(name: str, family: str) -> str:
    """A parameter's name in checkpoints of a family."""
    for substring, replacement in _RENAMED.get(family, {}).items():
        name = name.replace(substring, replacement)
    names = _EXPERTS.get(family)
    return name if names is None else name.replace(f".{names.mixture}.", f".{names.stored_mixture}.")


def checkpoint_names(name: str, shape: torch.Size, family: str, available: Collection[str], *, table: str) -> list[str]:
    """Names of the checkpoint tensors of a parameter: its own name, or those of `checkpoint_tensors`.

    `table`: the name of the embedding's table, which replaces the head's if that is not available.
    """
    if name in available:
        return [name]
    names = list(checkpoint_tensors(name, torch.empty(shape, device="meta"), family))
    return [table] if name == HEAD_TABLE and names[0] not in available else names


def join_tensors(name: str, read: list[Callable[[], Tensor]]) -> Tensor:
    """Read the tensors of `checkpoint_names`, in order and one at a time, into one parameter."""
    if len(read) == 1:
        return read[0]()
    first = read[0]()
    projections = 2 if name.endswith("gate_up_proj") else 1
    count, rows = len(read) // projections, len(first)
    parameter = first.new_empty(count, projections * rows, *first.shape[1:])
    for index, read_one in enumerate(read):
        projection, expert = divmod(index, count)
        parameter[expert, projection * rows : (projection + 1) * rows] = read_one()
    return parameter
