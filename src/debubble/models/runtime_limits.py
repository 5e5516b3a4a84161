"""Limits of debubble's own runtime: plans beyond them are remarked on, and the runtime refuses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.ir import InputError
from debubble.ir.plan_entries import RunOptions
from debubble.models.config import ModelConfig
from debubble.models.mixers import Attention

DTYPES = ("fp32", "bf16", "fp16", "fp64")
"""The dtypes in which the runtime computes."""
ROPES = ("default", "linear", "llama3")
"""The rotary scalings that its own units have."""


def beyond_runtime(options: RunOptions, model: Mapping[str, Any] | None) -> str | None:
    """Say in one sentence why the runtime cannot run a plan with these options; None if it can.

    Args:
        options: How the plan's model is run.
        model: The model's Hugging Face config; None for abstract costs.
    """
    config = None if model is None else ModelConfig.from_hf(model)
    reason = None if config is None else _missing_in_units(config)
    divided = _missing_in_context(options, config) if options.context > 1 else None
    if divided is not None:
        reason = f"{divided}: make the plan with context 1 to train it."
    elif options.expert > 1 and (config is None or config.whole_layers or config.experts is None):
        reason = (
            "it divides the experts of its own units alone, Mixtral's and Qwen3-MoE's: make the plan with expert 1 to"
            " train it."
        )
    elif options.expert_shards != options.tensor:
        reason = "it divides each expert over all tensor-parallel ranks: make the plan without --expert-tensor."
    elif options.zero > 0 and options.optimizer == "muon":
        reason = (
            "ZeRO leaves every replica rows of each parameter and Muon needs whole ones: make the plan with zero 0."
        )
    elif options.dtype not in DTYPES:
        reason = f"it computes in {', '.join(DTYPES)}, not in '{options.dtype}': make the plan with one of them."
    elif options.dtype == "fp16" and options.post_validation:
        reason = (
            "fp16 skips steps, so it cannot update before the norm is known: make the plan without post-validation."
        )
    elif options.dtype == "fp16" and config is not None and config.router_balance:
        reason = "fp16 has a scaled loss, and the routers' auxiliary loss has no scale: make the plan with bf16."
    elif options.host_optimizer:
        reason = "it steps on hosts what a plan's operations say: make the plan without --host-optimizer to train it."
    elif options.expert_overlap:
        reason = "it waits for what ranks of experts exchange: make the plan without --expert-overlap to train it."
    elif options.lora and config is not None and config.whole_layers:
        reason = f"it has no LoRA for '{config.family}', which runs with transformers' modules: make the plan without."
    elif options.quantize and (config is None or config.whole_layers):
        reason = "it quantises the linear layers of its own units alone: make the plan without --quantize."
    elif options.quantize and (options.tensor > 1 or options.zero > 2):
        reason = "it divides no quantised weights: make the plan with tensor 1 and ZeRO up to 2, or without --quantize."
    return None if reason is None else f"The runtime cannot run this plan, because {reason}"


def _missing_in_context(options: RunOptions, config: ModelConfig | None) -> str | None:
    """Say why sequences cannot be divided among ranks; None if they can."""
    if config is None or config.whole_layers:
        return "it has context parallelism for its own units alone"
    if config.dropout:
        return "context parallelism has no dropout"
    if config.router_balance:
        return "the routers' auxiliary loss is one over whole sequences"
    if options.sequence_length % (2 * options.context):
        return f"{options.sequence_length} tokens cannot be cut into 2 x {options.context} equal parts"
    return None


def check_units(model: ModelConfig) -> None:
    """Raise InputError if the runtime has no units of its own for the model, which transformers' modules may have."""
    if model.whole_layers:
        raise InputError(f"The runtime has no half-layers for the model type '{model.family}'.")
    reason = _missing_in_units(model)
    if reason is not None:
        raise InputError(f"The runtime cannot build the model, because {reason}")


def _missing_in_units(model: ModelConfig) -> str | None:
    """Say what the runtime's units lack for the model; None if they lack nothing."""
    if model.config.get("quantization_config"):
        return (
            "it reads no quantised weights: make the plan from the unquantised model, and quantise that by --quantize."
        )
    if model.vision is not None:
        return "it has no vision towers: make the plan for the model's text_config to train that alone."
    if model.mtp_layers:
        return "it predicts the next token alone: set num_nextn_predict_layers to 0."
    if model.whole_layers:
        return None
    if model.config.get("use_bidirectional_attention"):
        return "it has causal attention alone: set use_bidirectional_attention to false."
    if model.config.get("router_jitter_noise"):
        return "it has no noise in routers: set router_jitter_noise to 0."
    for layer in model.per_layer:
        rope = layer.attention.rope if isinstance(layer.attention, Attention) else None
        if rope is not None and rope.kind not in ROPES:
            return f"it does not know the rotary scaling '{rope.kind}'; it knows {' and '.join(ROPES[1:])}."
    return None
