"""Names of parameters in Hugging Face checkpoints, where transformers' models have other ones.

Files have a tensor per expert, models one for all experts of a layer; Mixtral's files have a name of their own for the
mixture; tied models leave out the head's table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

HEAD_TABLE = "lm_head.weight"
TABLE = {True: "transformer.wte.weight", False: "model.embed_tokens.weight"}
"""Name of the embedding's table, by whether the model is GPT-2."""


@dataclass(frozen=True)
class _Names:
    """The names in a family's files of a mixture and of its experts' gate, up and down projections."""

    mixture: str
    gate: str
    up: str
    down: str


_QWEN = _Names(".mlp.", "gate_proj", "up_proj", "down_proj")
_EXPERTS = {
    "mixtral": _Names(".block_sparse_moe.", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen3_moe", "qwen2_moe", "deepseek_v2", "olmoe", "flex_olmo"), _QWEN),
}
_RENAMED = {"gpt_neox": {HEAD_TABLE: "embed_out.weight"}}
_MIXTURE = ".mlp."


def stored(name: str, tensor: Tensor, family: str) -> dict[str, Tensor]:
    """The tensors that a checkpoint of that family has for a parameter, by name; they may be views."""
    name = _RENAMED.get(family, {}).get(name, name)
    names = _EXPERTS.get(family)
    if names is None or _MIXTURE not in name:
        return {name: tensor}
    name = name.replace(_MIXTURE, names.mixture)
    prefix, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        parts = {names.gate: tensor.chunk(2, dim=1)[0], names.up: tensor.chunk(2, dim=1)[1]}
    elif last == "down_proj":
        parts = {names.down: tensor}
    else:
        return {name: tensor}
    return {f"{prefix}.{e}.{part}.weight": own for part, t in parts.items() for e, own in enumerate(t)}


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
