"""Rules on runs that a framework refuses, each a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Collection

from debubble.ir import RunOptions
from debubble.models import Model
from debubble.models.module_bases import not_plain
from debubble.models.runtime_limits import beyond_runtime
from debubble.targets.target import Rule


def only_one(option: str, *, title: str) -> Rule:
    """A parallel degree that the framework does not have beside a pipeline."""

    def rule(options: RunOptions, model: Model) -> str | None:
        if getattr(options, option) == 1:
            return None
        return f"{title}'s pipeline has no {option} parallelism beside it; plan again with --{option} 1."

    return rule


def one_of(option: str, values: Collection[str], *, title: str) -> Rule:
    """An option of which the framework has some values."""

    def rule(options: RunOptions, model: Model) -> str | None:
        value = getattr(options, option)
        if value in values:
            return None
        return (
            f"{title} has no {option} '{value}' that debubble can write; plan again with --{option}"
            f" {' or '.join(values)}."
        )

    return rule


def fused_attention(dtypes: Collection[str], *, title: str) -> Rule:
    """Dtypes in which attention keeps no scores."""

    def rule(options: RunOptions, model: Model) -> str | None:
        if options.dtype in dtypes:
            return None
        return (
            f"The plan's memory counts on attention that keeps no scores, which {title} has in bf16 and fp16 alone;"
            " plan again with --dtype bf16."
        )

    return rule


def whole_experts(*, title: str) -> Rule:
    """Experts that are divided by rank, expert- and tensor-parallel ones alike."""

    def rule(options: RunOptions, model: Model) -> str | None:
        degree = options.expert * options.expert_shards
        if model.experts is None or model.experts.count % degree == 0:
            return None
        return (
            f"{title} gives every rank whole experts, and {model.experts.count} experts cannot be divided over the"
            f" {options.expert} expert- x {options.expert_shards} tensor-parallel ranks; plan again with a smaller"
            " --tensor."
        )

    return rule


def divided_experts(*, title: str) -> Rule:
    """Experts that tensor-parallel ranks divide as they do everything else."""

    def rule(options: RunOptions, model: Model) -> str | None:
        if options.expert_shards == options.tensor:
            return None
        return f"{title} divides every expert over the tensor-parallel ranks; plan again without --expert-tensor."

    return rule


def untied(*, title: str) -> Rule:
    """Models whose head is not their embedding."""

    def rule(options: RunOptions, model: Model) -> str | None:
        said = model.config.get("tie_word_embeddings")
        if not (model.tied if said is None else said):
            return None
        return (
            f"{title} does not train tied embeddings over a pipeline; set tie_word_embeddings to false in the model's"
            " config and plan again."
        )

    return rule


def next_token_alone(*, title: str) -> Rule:
    """Models without multi-token-prediction layers, whose modules debubble cannot name."""

    def rule(options: RunOptions, model: Model) -> str | None:
        return no_further_tokens(title) if model.mtp_layers else None

    return rule


def no_further_tokens(title: str) -> str:
    """Say that multi-token-prediction layers are not written."""
    return (
        f"debubble does not write multi-token-prediction layers for {title}; plan the model without them, or export to"
        " megatron."
    )


def plain_model(*, title: str) -> Rule:
    """Models that are embedding, layers, norm and head in a row."""

    def rule(options: RunOptions, model: Model) -> str | None:
        why = not_plain(model.config)
        if why is None:
            return None
        return f"{title} would train another model over a pipeline: {why}; export to torch or megatron."

    return rule


def text_alone(*, title: str) -> Rule:
    """Models without a vision tower."""

    def rule(options: RunOptions, model: Model) -> str | None:
        if model.vision is None:
            return None
        return f"debubble writes no vision tower for {title}; plan the model's text_config."

    return rule


def runtime(options: RunOptions, model: Model) -> str | None:
    """Refuse what debubble's own runtime does not run."""
    return beyond_runtime(options, model.config)
