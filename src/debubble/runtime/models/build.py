"""Builds stages from a Hugging Face config, with initial weights that do not depend on the partition.

Every parameter is initialised from the seed and its Hugging Face name.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from debubble.ir import InputError, PlannedUnit
from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import check_units
from debubble.processes import own_cores
from debubble.runtime.models.experts import MoeMlp
from debubble.runtime.models.gpt2 import Gpt2Attention, Gpt2Embedding, Gpt2Mlp
from debubble.runtime.models.hf.model import on_meta
from debubble.runtime.models.hf.names import TABLE
from debubble.runtime.models.hf.units import build_hf_stage
from debubble.runtime.models.llama import GemmaMlp, LlamaAttention, LlamaEmbedding, LlamaMlp
from debubble.runtime.models.lora import Adapters, adapt, is_adapter
from debubble.runtime.models.units import Head, UnitModule


def build_stage(
    hf_config: Mapping[str, Any], units: Sequence[PlannedUnit], *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> list[UnitModule]:
    """Build the units of one stage."""
    config = ModelConfig.from_hf(hf_config)
    if config.whole_layers:
        return [*build_hf_stage(hf_config, units, seed=seed, dtype=dtype)]
    check_units(config)
    built = [_empty_unit(config, unit).to(dtype) for unit in units]
    # A parameter's random numbers are sequential, from its own generator: parameters are initialised in parallel.
    named = [named for unit in built for named in unit.hf_parameters().items()]
    with ThreadPoolExecutor(own_cores()) as pool:
        list(pool.map(lambda item: initialise(item[1], item[0], config, seed=seed), named))
    return built


def empty_parameters(hf_config: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """All parameters and constants of a model by Hugging Face name, on the meta device."""
    config = ModelConfig.from_hf(hf_config)
    if config.whole_layers:
        state: Mapping[str, Tensor] = on_meta(hf_config).state_dict()
        return state
    with torch.device("meta"):
        units = [_empty_unit(config, unit) for unit in config.units]
    return {name: parameter for unit in units for name, parameter in unit.hf_parameters().items()}


def add_adapters(
    units: Sequence[UnitModule],
    adapters: Adapters,
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Freeze the units, and add adapters with initial weights."""
    adapt(units, adapters)
    for name, parameter in ((n, p) for unit in units for n, p in unit.hf_parameters().items() if is_adapter(n)):
        parameter.data = parameter.data.to(dtype)
        initialise(parameter, name, config, seed=seed)


def _empty_unit(config: ModelConfig, unit: PlannedUnit) -> UnitModule:
    layer = unit.layer
    if layer is not None and not 0 <= layer < config.layers:
        raise InputError(f"The plan has layer {layer}, but the model has {config.layers} layers.")
    match unit.type, layer:
        case "embedding", _:
            return Gpt2Embedding(config) if config.is_gpt2 else LlamaEmbedding(config)
        case "attention", int():
            return Gpt2Attention(config, layer) if config.is_gpt2 else LlamaAttention(config, layer)
        case "mlp", int():
            return _mlp(config, layer)
        case "head", _:
            return Head(config)
        case _:
            raise InputError(
                f"The runtime cannot build a unit of type '{unit.type}'; plans that run have embedding, attention, mlp"
                " and head."
            )


def _mlp(config: ModelConfig, layer: int) -> UnitModule:
    if config.is_gpt2:
        return Gpt2Mlp(config, layer)
    if isinstance(config.per_layer[layer].mlp, Experts):
        return MoeMlp(config, layer)
    return GemmaMlp(config, layer) if config.norms_results else LlamaMlp(config, layer)


def initialise(parameter: Tensor, name: str, config: ModelConfig, *, seed: int) -> None:
    """Initialise as Hugging Face does: matrices normal, biases zero, norms one, GPT-2's residual projections scaled.

    Norms with an offset start at 1 - offset, and the padding token's row at zero.  Adapters start as peft's: A as
    torch's linear layers, B at zero.
    """
    with torch.no_grad():
        if name.endswith("bias") or ".lora_B." in name:
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1 - config.norm_offset)
        else:
            source = TABLE[config.is_gpt2] if config.tied and name == "lm_head.weight" else name
            generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {source}".encode()))
            deviation = config.initializer_range
            if config.is_gpt2 and name.endswith("c_proj.weight"):
                deviation /= math.sqrt(2 * config.layers)
            drawn = torch.empty(parameter.shape)
            if ".lora_A." in name:
                bound = 1 / math.sqrt(parameter.shape[1])
                drawn.uniform_(-bound, bound, generator=generator)
            else:
                drawn.normal_(0, deviation, generator=generator)
            # Drawn in fp32 for any dtype, so that runs in all precisions start from the same values.
            if config.padding is not None and source == TABLE[config.is_gpt2]:
                drawn[config.padding] = 0.0
            parameter.copy_(drawn)
