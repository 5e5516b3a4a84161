"""Tensor parallelism of transformers' modules, by the tensor-parallel plan of their family (`base_model_tp_plan`).

It supports column- and row-parallel linear layers, the embedding and the head; plans with other styles are refused.
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


def modules_with_style(parts: ModelParts, style: str) -> tuple[str, ...]:
    """Names of a layer's modules that have this style ("colwise" or "rowwise") in the family's plan."""
    return tuple(name for name, planned in _plan(parts).items() if planned == style)


def check_division(config: Mapping[str, Any], tensor: int) -> None:
    """Raise InputError if the ranks cannot divide the model."""
    parts = ModelParts(config)
    layer, hidden = parts.layers[0], parts.model.config.hidden_size
    plan, modules = _plan(parts), dict(layer.named_modules())
    if not plan:
        raise _refusal(config, "transformers has no plan for it")
    for name, style in plan.items():
        if style not in ("colwise", "rowwise") or type(modules.get(name)) is not nn.Linear:
            raise _refusal(config, f"transformers' plan has '{style}' for '{name}'")
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
    for quantity, size in (
        ("attention heads", heads), ("key-value heads", getattr(shape, "num_key_value_heads", None) or heads),
        ("columns of the MLP", shape.intermediate_size),
    ):  # fmt: skip
        if size % tensor:
            raise InputError(f"{size} {quantity} cannot be divided among {tensor} tensor-parallel ranks.")


def divide_module(module: nn.Module, group: TensorGroup, *, by_rows: bool) -> None:
    """Replace the forward of a linear layer or embedding, whose parameters are sharded, by a tensor-parallel one."""
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
    """The styles of a layer's modules, by name."""
    start = f"{parts.path.rpartition('.')[2]}.*."
    plan: Mapping[str, str] = parts.model.base_model.config.base_model_tp_plan or {}
    return {name.removeprefix(start): style for name, style in plan.items() if name.startswith(start)}


def _refusal(config: Mapping[str, Any], why: str) -> InputError:
    return InputError(
        f"The runtime cannot divide layers of '{config.get('model_type')}' among ranks, because {why}: make the plan"
        " with tensor 1."
    )
