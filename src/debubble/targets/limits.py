"""Rules on runs that a framework refuses, each a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Collection

from debubble.costs.step import MOMENTS
from debubble.ir import RunOptions
from debubble.models import Model
from debubble.models.module_bases import why_not_plain
from debubble.models.runtime_limits import beyond_runtime
from debubble.targets.target import Rule


def only_one(option: str) -> Rule:
    """A parallel degree that the framework does not have beside a pipeline."""

    def rule(title: str, options: RunOptions, model: Model) -> str | None:
        if getattr(options, option) == 1:
            return None
        return f"{title}'s pipeline has no {option} parallelism beside it; plan again with --{option} 1."

    return rule


def one_of(option: str, values: Collection[str]) -> Rule:
    """An option of which the framework has some values."""

    def rule(title: str, options: RunOptions, model: Model) -> str | None:
        value = getattr(options, option)
        if value in values:
            return None
        return (
            f"{title} has no {option} '{value}' that debubble can write; plan again with --{option}"
            f" {' or '.join(values)}."
        )

    return rule


def unset(option: str) -> Rule:
    """An option that debubble writes for other frameworks alone."""
    words = option.replace("_", "-")

    def rule(title: str, options: RunOptions, model: Model) -> str | None:
        if not getattr(options, option):
            return None
        return f"debubble writes no --{words} for {title}; plan again without it, or --for megatron."

    return rule


def fused_attention(*dtypes: str) -> Rule:
    """Dtypes in which attention keeps no scores."""

    def rule(title: str, options: RunOptions, model: Model) -> str | None:
        if options.dtype in dtypes:
            return None
        return (
            f"The plan's memory counts on attention that keeps no scores, which {title} has in bf16 and fp16 alone;"
            " plan again with --dtype bf16."
        )

    return rule


def whole_experts(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse experts that are not whole where ranks divide them, expert- and tensor-parallel ones alike."""
    degree = options.expert * options.expert_shards
    if model.experts is None or model.experts.count % degree == 0:
        return None
    return (
        f"{title} gives every rank whole experts, and {model.experts.count} experts cannot be divided over the"
        f" {options.expert} expert- x {options.expert_shards} tensor-parallel ranks; plan again with a smaller"
        " --tensor."
    )


def divided_experts(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse experts that the tensor-parallel ranks do not divide as they do everything else."""
    if options.expert_shards == options.tensor:
        return None
    return f"{title} divides every expert over the tensor-parallel ranks; plan again without --expert-tensor."


def untied(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse models whose head is their embedding."""
    said = model.config.get("tie_word_embeddings")
    if not (model.tied if said is None else said):
        return None
    return (
        f"{title} does not train tied embeddings over a pipeline; set tie_word_embeddings to false in the model's"
        " config and plan again."
    )


def next_token_alone(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse multi-token-prediction layers, whose modules debubble cannot name."""
    return no_further_tokens(title) if model.mtp_layers else None


def no_further_tokens(title: str) -> str:
    """Say that multi-token-prediction layers are not written."""
    return (
        f"debubble does not write multi-token-prediction layers for {title}; plan the model without them, or export to"
        " megatron."
    )


def plain_model(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse models that are more than embedding, layers, norm and head in a row."""
    why = why_not_plain(model.config)
    if why is None:
        return None
    return f"{title} would train another model over a pipeline: {why}; export to torch or megatron."


def text_alone(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse vision towers."""
    if model.vision is None:
        return None
    return f"debubble writes no vision tower for {title}; plan the model's text_config."


def runtime(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse what debubble's own runtime does not run."""
    return beyond_runtime(options, model.config)


def eight_bits_divided(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse 8-bit moments without Megatron-LM's distributed optimizer."""
    if options.optimizer != "adamw-8bit" or options.zero:
        return None
    others = " or ".join(name for name in MOMENTS if name != "adamw-8bit")
    return (
        f"{title} has no optimizer 'adamw-8bit' that debubble can write; plan again with --zero 1, or with"
        f" --optimizer {others}."
    )


FSDP_OPTIMIZERS = ("adamw", "adam", "momentum", "sgd")


def optimizers_of_fsdp(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse gradients that are divided (Megatron-FSDP) under optimizers that do not step them."""
    if options.zero < 2 or options.optimizer in FSDP_OPTIMIZERS:
        return None
    return (
        f"{title} divides gradients (Megatron-FSDP) for adam and sgd alone, not for '{options.optimizer}'; plan again"
        " with --zero 1, or with another --optimizer."
    )


def adam_on_hosts(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse optimizer states on hosts that are not Adam's, or not those of a distributed optimizer."""
    if not options.host_optimizer or (options.optimizer in ("adamw", "adam") and options.zero):
        return None
    return (
        f"{title} moves optimizer states to hosts for a distributed Adam alone; plan again with --zero 1 and"
        " --optimizer adamw, or without --host-optimizer."
    )


def experts_to_overlap(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse combined 1F1B where no tokens travel."""
    if not options.expert_overlap or options.expert > 1:
        return None
    return f"{title} overlaps what expert-parallel ranks exchange; plan again with --expert 2 or more."
