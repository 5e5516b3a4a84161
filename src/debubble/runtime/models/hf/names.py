"""Names of parameters in Hugging Face checkpoints, where transformers' models have other ones.

Files have a tensor per expert, models one for all experts of a layer; Mixtral's files have a name of their own for the
mixture; tied models leave out the head's table.
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
    """The names in a family's files of a mixture and of its experts' gate, up and down projections."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    mixture: str = "mlp"
    stored_mixture: str = "mlp"
    """The mixture's name in files."""


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
"""Parts of names as they are in a family's files."""


def stored(name: str, tensor: Tensor, family: str) -> dict[str, Tensor]:
    """The tensors that a checkpoint of that family has for a parameter, by name; they may be views."""
    names = _EXPERTS.get(family)
    own = next(
        (part for part in (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj") if part in name), ""
    )
    in_file = _in_file(name, family)
    if names is None or not own:
        return {in_file: tensor}
    prefix = in_file.removesuffix(own.removeprefix(".experts."))
    match own:
        case ".experts.gate_up_proj":
            gate, up = tensor.chunk(2, dim=1)
            parts = {names.gate: gate, names.up: up}
        case ".experts.up_proj":
            parts = {names.up: tensor}
        case _:
            parts = {names.down: tensor}
    return {f"{prefix}{e}.{part}.weight": one for part, t in parts.items() for e, one in enumerate(t)}


def _in_file(name: str, family: str) -> str:
    """A parameter's name in files of a family."""
    for part, instead in _RENAMED.get(family, {}).items():
        name = name.replace(part, instead)
    names = _EXPERTS.get(family)
    return name if names is None else name.replace(f".{names.mixture}.", f".{names.stored_mixture}.")


def sources(name: str, shape: torch.Size, family: str, files: Collection[str], *, table: str) -> list[str]:
    """Names of a checkpoint's tensors that make up a parameter of that shape: its own, or those of `stored`.

    `table`: the embedding's, which stands in for the head's where that is left out.
    """
    if name in files:
        return [name]
    names = list(stored(name, torch.empty(shape, device="meta"), family))
    return [table] if name == HEAD_TABLE and names[0] not in files else names


def joined(name: str, read: list[Callable[[], Tensor]]) -> Tensor:
    """The parameter of what `sources` lists: read in that order, one at a time, into one tensor."""
    if len(read) == 1:
        return read[0]()
    first = read[0]()
    parts = 2 if name.endswith("gate_up_proj") else 1
    count, rows = len(read) // parts, len(first)
    whole = first.new_empty(count, parts * rows, *first.shape[1:])
    for index, one in enumerate(read):
        part, expert = divmod(index, count)
        whole[expert, part * rows : (part + 1) * rows] = one()
    return whole
