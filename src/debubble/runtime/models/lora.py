"""Low-rank adapters of frozen linear layers (LoRA, Hu et al., ICLR 2022), with peft's names and files.

A linear layer y = W x becomes W x + scaling B A x, of which only A and B are trained.  peft's layers are not used, as
they compute weight gradients with input gradients, which would rule out split backwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from debubble.ir import InputError
from debubble.runtime.models.units import UnitModule
from debubble.runtime.operators import Linear

PREFIX = "base_model.model."
"""peft's prefix of a parameter's Hugging Face name."""
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    """The adapter of one linear layer."""

    rank: int
    scaling: float


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """The adapters of a model's linear layers."""

    by_layer: Mapping[str, Adapter]
    """Hugging Face name of the layer -> its adapter."""
    config: Mapping[str, Any]
    """peft's config."""


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is part of an adapter."""
    return ".lora_A." in name or ".lora_B." in name


_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_TARGETS = {"gpt2": ("c_attn", "c_fc", "c_proj"), "mixtral": _ATTENTION, "qwen3_moe": _ATTENTION}
"""Linear layers with adapters, by family; with experts, those of attention."""


def new_adapters(units: Iterable[UnitModule], family: str, *, rank: int) -> Adapters:
    """Adapters on every linear layer of the half-layers except routers, with alpha = 2 rank (a scaling of 2)."""
    targets = _TARGETS.get(family, (*_ATTENTION, "down_proj", "gate_proj", "up_proj"))
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": list(targets), "fan_in_fan_out": family == "gpt2", "inference_mode": True,
    }  # fmt: skip
    layers = [
        unit.prefix + name
        for unit in units
        for name, module in unit.named_modules()
        if isinstance(module, Linear) and name.rpartition(".")[2] in targets
    ]
    return Adapters(by_layer=dict.fromkeys(layers, Adapter(rank, 2.0)), config=config)


def peft_adapters(model: Any) -> Adapters | None:
    """The adapters of a PeftModel; None for another model.  Raises InputError for unsupported kinds."""
    if not hasattr(model, "peft_config"):
        return None
    active: str = model.active_adapter
    config = model.peft_config[active]
    if config.peft_type != "LORA":
        raise InputError(f"The runtime trains adapters of peft's type LORA, not {config.peft_type}.")
    unknown = [name for name in ("use_dora", "modules_to_save", "target_parameters") if getattr(config, name, None)]
    if unknown or config.bias != "none" or config.lora_dropout:
        entry = unknown[0] if unknown else "lora_dropout" if config.lora_dropout else "bias"
        raise InputError(f"The runtime has plain LoRA alone: leave out '{entry}' of the adapters' config.")
    by_layer = {
        plain_name(name): Adapter(module.r[active], module.scaling[active])
        for name, module in model.named_modules()
        if any(active in getattr(module, kind, {}) for kind in ("lora_A", "lora_embedding_A"))
    }
    content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return Adapters(by_layer=by_layer, config=json.loads(json.dumps({**content, "inference_mode": True}, default=str)))


def plain_name(name: str) -> str:
    """The Hugging Face name of a PeftModel's parameter; other names are returned unchanged."""
    name = name.removeprefix(PREFIX).replace(".base_layer", "")
    for infix in (".lora_A.", ".lora_B."):
        layer, matched, suffix = name.partition(infix)
        if matched:
            # In memory, the suffix is the adapter's name, then the parameter's.
            return f"{layer}{infix}{suffix.rpartition('.')[2]}"
    return name


def adapt(units: Iterable[UnitModule], adapters: Adapters) -> None:
    """Freeze the units, and add adapters to their linear layers, uninitialised."""
    for unit in units:
        for parameter in unit.parameters():
            parameter.requires_grad_(False)
        for name, module in list(unit.named_modules()):
            adapter = adapters.by_layer.get(unit.prefix + name)
            if adapter is not None:
                if not isinstance(module, Linear):
                    raise InputError(f"'{unit.prefix + name}' is no linear layer, and only such can have an adapter.")
                module.adapt(adapter.rank, adapter.scaling)
