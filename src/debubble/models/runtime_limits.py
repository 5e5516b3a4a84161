"""Limits of debubble's runtime: plans beyond them have a remark, and the runtime does not run them."""

from __future__ import annotations

from math import gcd

from debubble.ir import InputError, Placement
from debubble.ir.plan_entries import RunOptions
from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig
from debubble.models.mixers import LatentAttention
from debubble.models.quantization import NF4_BLOCK, NF4_DQ

DTYPES = ("fp32", "bf16", "fp16", "fp64")
"""The compute dtypes of the runtime."""

_LAYERS_APART = "its layers need more than the hidden states that those before them return: no other plan trains it."
UNDIVIDED = {
    **dict.fromkeys(("gemma4_unified_text", "hrm_text", "rwkv"), _LAYERS_APART),
    "openai-gpt": "transformers does not say with what its weights start: no other plan trains it.",
}
"""Family that is priced, but whose modules in transformers cannot be partitioned between layers -> the reason."""


def beyond_runtime(options: RunOptions, config: ModelConfig | None) -> str | None:
    """A sentence on why the runtime cannot run a plan with these options; None if it can.

    `config` is the model's; None for abstract costs.
    """
    reason = (
        _missing_degrees(options, config)
        or _missing_numbers(options, config)
        or _missing_overlap(options)
        or _missing_slices(options, config)
        or (None if config is None else _missing_in_units(config))
    )
    return None if reason is None else f"The runtime cannot run this plan, because {reason}"


def sharing_stages(model: ModelConfig, placement: Placement) -> frozenset[int]:
    """The stages on different devices that share a tied table, whose gradients are reduced after the pipeline."""
    shared = model.tied and placement.device_of[0] != placement.device_of[-1]
    return frozenset({0, placement.stages - 1}) if shared else frozenset()


def _missing_degrees(options: RunOptions, config: ModelConfig | None) -> str | None:
    """The reason why the runtime does not support the degrees or the ZeRO level; None if it does."""
    if options.context > 1 and (reason := _missing_in_context(options, config)) is not None:
        return f"{reason}: make the plan with context 1 to train it."
    if options.expert > 1 and (config is None or config.whole_layers or config.experts is None):
        return (
            "it divides the experts of its own units alone, Mixtral's and Qwen3-MoE's: make the plan with expert 1 to"
            " train it."
        )
    if options.expert_shards != options.tensor:
        degree = gcd(options.expert, options.data * options.context)
        fewer = "" if degree == options.expert else f" --expert {degree}"
        return (
            "the runtime divides each expert over all tensor-parallel ranks: make the plan with --tensor"
            f" {options.tensor} --expert-tensor {options.tensor}{fewer}."
        )
    if options.zero > 0 and options.optimizer == "muon":
        return "ZeRO leaves every replica rows of each parameter and Muon needs whole ones: make the plan with zero 0."
    return None


def _missing_numbers(options: RunOptions, config: ModelConfig | None) -> str | None:
    """The reason why the runtime does not support the dtype, adapters or quantized weights; None if it does."""
    if options.dtype not in DTYPES:
        return f"it computes in {', '.join(DTYPES)}, not in '{options.dtype}': make the plan with one of them."
    if options.dtype == "fp16" and options.post_validation:
        return "fp16 skips steps, so it cannot update before the norm is known: make the plan without post-validation."
    if options.dtype == "fp16" and config is not None and config.router_balance:
        return (
            "fp16 has a scaled loss, and the routers' auxiliary loss has no scale: make the plan with bf16, or set"
            " output_router_logits to false."
        )
    if options.lora and config is not None and config.whole_layers:
        return f"it has no LoRA for '{config.family}', which runs with {_modules(config)}: make the plan without."
    if options.quantize and (config is None or config.whole_layers):
        of_others = "" if config is None else f", and '{config.family}' runs with {_modules(config)}"
        return f"it quantises the linear layers of its own units alone{of_others}: make the plan without --quantize."
    if options.quantize and options.zero > 2:
        return "ZeRO-3 divides no quantised weights: make the plan with ZeRO up to 2, or without --quantize."
    if options.quantize == NF4_DQ and options.tensor > 1:
        return "it quantises the scales of whole weights: make the plan with nf4 in place of nf4-dq, or --tensor 1."
    if options.quantize and options.tensor > 1 and config is not None:
        return _missing_blocks(options.tensor, config)
    return None


def _modules(config: ModelConfig) -> str:
    """A phrase on the modules of a model without debubble's units, with the reason if its family has them."""
    because = "" if config.beyond_units is None else f" because its config has '{config.beyond_units}'"
    return f"transformers' modules{because}"


def _missing_blocks(tensor: int, config: ModelConfig) -> str | None:
    """The reason why sharded layers cannot be quantized: incomplete blocks of weights; None if they can."""
    dense = any(not isinstance(layer.mlp, Experts) for layer in config.per_layer)
    inner = config.ffn if dense else 0
    if not any(width % NF4_BLOCK for width in (config.hidden, config.attention_width / tensor, inner / tensor)):
        return None
    return (
        f"rows of its linear layers, divided among {tensor} ranks, are no whole blocks of {NF4_BLOCK} quantised"
        " weights: make the plan with a smaller --tensor, or without --quantize."
    )


def _missing_overlap(options: RunOptions) -> str | None:
    """The reason why an overlap, dtype or kernel option exists only in other frameworks; None if there is none."""
    if options.host_optimizer:
        return (
            "hosts step the stages that a planner chooses, and not a share of every stage: make the plan without"
            " --host-optimizer to train it."
        )
    if options.expert_overlap:
        return "it waits for what ranks of experts exchange: make the plan without --expert-overlap to train it."
    if {options.gradient_dtype, options.moment_dtype} != {"fp32"}:
        return "it keeps gradients and moments in fp32: make the plan without --gradient-dtype and --moment-dtype."
    if not options.flash_attention:
        return "its attention keeps no scores: make the plan without --no-flash-attention to train it."
    if options.tensor > 1 and not options.sequence_parallel:
        return "its ranks divide norms, too: make the plan without --no-sequence-parallel to train it."
    return None


def check_averages(options: RunOptions) -> None:
    """Raise InputError if the weights have too few bits for a running average."""
    if options.master_dtype != "fp32":
        raise InputError(
            f"An average of weights in {options.master_dtype} rounds away what a step adds: train without it, or make"
            " the plan without --master-dtype."
        )


def _missing_slices(options: RunOptions, config: ModelConfig | None) -> str | None:
    """The reason why sequences cannot be computed in slices; None if they can."""
    if options.slices == 1:
        return None
    if config is None or config.whole_layers:
        of_others = "" if config is None else f", and '{config.family}' runs with {_modules(config)}"
        return f"it cuts the sequences of its own units alone into slices{of_others}: make the plan without --slices."
    if config.router_balance:
        return (
            "the routers' auxiliary loss is one over whole sequences: set output_router_logits to false, or make the"
            " plan without --slices."
        )
    return None


def _missing_in_context(options: RunOptions, config: ModelConfig | None) -> str | None:
    """The reason why sequences cannot be sharded over context-parallel ranks; None if they can."""
    if config is None or config.whole_layers:
        of_others = "" if config is None else f", and '{config.family}' runs with {_modules(config)}"
        return f"it has context parallelism for its own units alone{of_others}"
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
    """The reason why the runtime's units do not support the model; None if they do."""
    if model.config.get("quantization_config"):
        return (
            "it reads no quantised weights: make the plan from the unquantised model, and quantise that by --quantize."
        )
    if model.vision is not None:
        return "it has no vision towers: make the plan for the model's text_config to train that alone."
    if model.mtp_layers:
        return "it predicts the next token alone: set num_nextn_predict_layers to 0."
    if model.family in UNDIVIDED:
        return UNDIVIDED[model.family]
    if any(isinstance(layer.attention, LatentAttention) and layer.attention.reuses_choice for layer in model.per_layer):
        return _LAYERS_APART
    if model.config.get("use_bidirectional_attention") is True or model.config.get("is_causal") is False:
        return "it predicts tokens from those before them: remove use_bidirectional_attention and is_causal."
    return None
