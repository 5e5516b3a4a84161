"""Tensor parallelism of transformers' own modules, by the plan of its own that a family has (`base_model_tp_plan`).

Linear layers by columns and by rows are divided, and the two tables; what else lies between them is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as functional
from torch import Tensor, nn

from debubble.ir import InputError
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.models.hf.model import ModelParts
from debubble.runtime.models.loss import embed


def planned(parts: ModelParts, how: str) -> tuple[str, ...]:
    """The modules of a layer that the family's plan divides so ("colwise" or "rowwise"), by name."""
    return tuple(name for name, word in _plan(parts).items() if word == how)


def check_division(config: Mapping[str, Any], tensor: int) -> None:
    """Refuse what the ranks cannot divide among them; raises InputError."""
    parts = ModelParts(config)
    layer, hidden = parts.layers[0], parts.model.config.hidden_size
    plan, found = _plan(parts), dict(layer.named_modules())
    if not plan:
        raise _refusal(config, "transformers has no plan for it")
    for name, how in plan.items():
        if how not in ("colwise", "rowwise") or type(found.get(name)) is not nn.Linear:
            raise _refusal(config, f"transformers' plan has '{how}' for '{name}'")
    for name, parameter in layer.named_parameters():
        if name.rpartition(".")[0] not in plan and parameter.shape != (hidden,):
            raise _refusal(config, f"transformers' plan leaves '{name}' to the ranks")
    if type(parts.model.get_input_embeddings()) is not nn.Embedding:
        raise _refusal(config, "its embedding does more than look tokens up")
    shape = parts.model.config
    for name, value in shape.to_dict().items():
        if ("dropout" in name or "pdrop" in name) and not name.startswith("classifier") and value:
            raise _refusal(config, f"ranks would draw the same masks for different heads (set '{name}' to 0)")
    heads = shape.num_attention_heads
    for what, size in (
        ("attention heads", heads), ("key-value heads", getattr(shape, "num_key_value_heads", None) or heads),
        ("columns of the MLP", shape.intermediate_size),
    ):  # fmt: skip
        if size % tensor:
            raise InputError(f"{size} {what} cannot be divided among {tensor} tensor-parallel ranks.")


def divide_module(module: nn.Module, group: TensorGroup, *, by_rows: bool) -> None:
    """Let a linear layer or a table, which has its shard already, compute with the group."""
    if isinstance(module, nn.Embedding):
        forward = partial(embed, table=module, group=group)
    else:
        forward = partial(_rows if by_rows else _columns, layer=module, group=group)
    vars(module)["forward"] = forward


def _columns(x: Tensor, *, layer: Any, group: TensorGroup) -> Tensor:
    return functional.linear(group.copy_to_group(x), layer.weight, layer.bias)


def _rows(x: Tensor, *, layer: Any, group: TensorGroup) -> Tensor:
    y = group.reduce_from_group(functional.linear(x, layer.weight))
    return y if layer.bias is None else y + layer.bias


def _plan(parts: ModelParts) -> dict[str, str]:
    """The ways in which a layer's modules are divided, by name."""
    start = f"{parts.path.rpartition('.')[2]}.*."
    plan: Mapping[str, str] = parts.model.base_model.config.base_model_tp_plan or {}
    return {name.removeprefix(start): how for name, how in plan.items() if name.startswith(start)}


def _refusal(config: Mapping[str, Any], why: str) -> InputError:
    return InputError(
        f"The runtime cannot divide layers of '{config.get('model_type')}' among ranks, because {why}: make the plan"
        " with tensor 1."
    )
