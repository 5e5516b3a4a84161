"""Checks of a run's options against the model: its sizes must be divisible, and its layers support LoRA and slices."""

from __future__ import annotations

from debubble.ir import InputError, RunOptions
from debubble.models.architecture import Architecture
from debubble.models.mixers import Attention
from debubble.models.quantization import FORMATS
from debubble.models.vision import as_trained

MAX_TOKENS = 10**9
"""Maximum tokens of a micro-batch, so that byte counts fit in 64 bits."""


def check(model: Architecture, options: RunOptions) -> None:
    """Raise InputError for options that the model cannot be run with."""
    model = as_trained(model, options)
    _check_tokens(model, options)
    _check_tensor(model, options)
    _check_adapters(model, options)
    _check_experts(model, options)


def _check_tokens(model: Architecture, options: RunOptions) -> None:
    size, length = options.micro_batch_size, options.sequence_length
    if size < 1 or length < 1:
        raise InputError(f"Micro-batches need at least one sequence of at least one token, not {size} of {length}.")
    if size * length > MAX_TOKENS:
        raise InputError(f"A micro-batch may have up to {MAX_TOKENS:,} tokens, not {size} sequences of {length}.")
    if length % options.context:
        raise InputError(f"A sequence of {length} cannot be divided over {options.context} context-parallel ranks.")
    if model.positions and length > model.positions:
        raise InputError(
            f"The model has learned positions for {model.positions} tokens; a sequence of {length} is too long."
        )
    if model.vision is not None and model.vision.images * model.vision.tokens > length:
        images, merged = model.vision.images, model.vision.merged
        fewer = ", fewer --images" if images > 1 else ""
        smaller = "" if model.vision.sizes == "one" else f", or --image-patches {length // images * merged} or fewer"
        image = f"{'An image' if images == 1 else f'Each of {images} images'} of {model.vision.patches} patches takes"
        raise InputError(
            f"{image} {model.vision.tokens} tokens, and a sequence has {length}: give a larger --sequence-length"
            f"{fewer}{smaller}."
        )


def _check_tensor(model: Architecture, options: RunOptions) -> None:
    divided = {"attention heads": model.heads, "columns of the MLP": model.ffn}
    if model.vision is not None:
        tower = model.vision.tower
        divided |= {"attention heads of the vision tower": tower.heads, "columns of its MLP": tower.ffn}
    for name, size in divided.items():
        if size % options.tensor:
            raise InputError(f"{size} {name} cannot be divided over {options.tensor} tensor-parallel ranks.")


def _check_adapters(model: Architecture, options: RunOptions) -> None:
    if not 0 <= options.lora <= model.hidden:
        raise InputError(
            f"The rank of LoRA adapters must be at least 1 (or 0 for none) and at most the {model.hidden} features of a"
            f" layer, not {options.lora}."
        )
    if options.lora and any(not isinstance(layer.attention, Attention) for layer in model.per_layer):
        raise InputError(f"LoRA adapters are not priced for '{model.family}', whose layers mix tokens in other ways.")
    if options.quantize not in (None, *FORMATS):
        raise InputError(f"Frozen weights may be quantised to {' or '.join(FORMATS)}, not to '{options.quantize}'.")
    if options.quantize and not options.lora:
        raise InputError("Quantised weights are frozen, and something must train with them: give --lora RANK, too.")


def check_has_experts(model: Architecture, options: RunOptions) -> None:
    """Raise InputError for expert-parallel degrees of a model without experts."""
    if model.experts is None and (options.expert > 1 or options.expert_tensor is not None):
        raise InputError("The model has no experts: leave out --expert and --expert-tensor.")


def _check_experts(model: Architecture, options: RunOptions) -> None:
    check_has_experts(model, options)
    experts = model.experts
    if experts is None:
        return
    if options.expert > 1 and experts.count % options.expert:
        raise InputError(f"{experts.count} experts cannot be divided over {options.expert} expert-parallel ranks.")
    if options.expert_tensor is not None and experts.ffn % options.expert_tensor:
        raise InputError(
            f"{experts.ffn} columns of an expert cannot be divided over {options.expert_tensor}"
            " expert-tensor-parallel ranks."
        )


def check_slices(model: Architecture, options: RunOptions) -> None:
    """Raise InputError if the model cannot compute the slices of a sequence one after the other."""
    slices, length = options.slices, options.sequence_length
    if slices < 1 or length % slices:
        raise InputError(f"A sequence of {length} tokens cannot be cut into {slices} equal slices.")
    if options.context > 1:
        raise InputError("Slices of sequences are not planned together with context-parallel ranks: use one of them.")
    if not options.flash_attention:
        raise InputError("Slices of sequences are priced with a fused attention core alone: leave out its option.")
    if model.vision is not None:
        raise InputError(f"Sequences of '{model.family}' are not cut into slices: its vision tower sees whole images.")
    if any(not isinstance(layer.attention, Attention) for layer in model.per_layer):
        raise InputError(
            f"Sequences of '{model.family}' are not cut into slices: only layers of causal attention with keys and"
            " values of their own hand them on."
        )
