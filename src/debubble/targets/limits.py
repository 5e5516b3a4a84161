"""Rules on runs that a framework refuses, each a sentence that says what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from debubble.costs.step import MOMENTS
from debubble.ir import RunOptions
from debubble.models import Model
from debubble.models.module_bases import why_not_plain
from debubble.models.runtime_limits import beyond_runtime


@dataclass(frozen=True)
class Refusal:
    """A rule for which the framework's title, the run's options `o` and the model are all that its sentence needs.

    Attributes:
        refuses: Tells whether the framework refuses a run with these options of this model.
        sentence: What it says then, as a format of `title`, `o` and `model`.
    """

    refuses: Callable[[RunOptions, Model], bool]
    sentence: str

    def __call__(self, title: str, options: RunOptions, model: Model) -> str | None:
        """Say why the framework of that title refuses the run; None if this rule does not refuse it."""
        return self.sentence.format(title=title, o=options, model=model) if self.refuses(options, model) else None


def only_one(option: str) -> Refusal:
    """A parallel degree that the framework does not have next to a pipeline."""
    return Refusal(
        lambda o, model: getattr(o, option) != 1,
        f"{{title}}'s pipeline has no {option} parallelism inside it; plan again with --{option} 1.",
    )


def one_of(option: str, values: Collection[str]) -> Refusal:
    """An option of which the framework has some values."""
    return Refusal(
        lambda o, model: getattr(o, option) not in values,
        f"{{title}} has no {option} '{{o.{option}}}' that debubble can write; plan again with --{option}"
        f" {' or '.join(values)}.",
    )


_DEFAULT = RunOptions()


def unset(option: str) -> Refusal:
    """An option that debubble writes for other frameworks alone."""
    return Refusal(
        lambda o, model: getattr(o, option) != getattr(_DEFAULT, option),
        f"debubble writes no --{'no-' * (getattr(_DEFAULT, option) is True)}{option.replace('_', '-')} for {{title}};"
        " plan again without it, or --for megatron.",
    )


divided_tokens = Refusal(
    lambda o, model: o.sequence_length % _token_parts(o) > 0,
    "{title} divides the tokens of a sequence among tensor- and context-parallel ranks in equal parts; plan again with"
    " a --sequence-length that they divide.",
)
"""Lengths that sequence and context parallelism do not divide; the latter in two parts for every rank."""


def _token_parts(options: RunOptions) -> int:
    return (options.tensor if options.sequence_parallel else 1) * (2 * options.context if options.context > 1 else 1)


whole_sequences = Refusal(
    lambda o, model: o.slices > 1,
    "{title} passes whole sequences through its pipeline; plan again without --slices.",
)
"""Slices of sequences, which debubble's own runtime alone has."""


def fused_attention(*dtypes: str) -> Refusal:
    """Dtypes in which attention keeps no scores."""
    return Refusal(
        lambda o, model: o.dtype not in dtypes,
        "The plan's memory counts on attention that keeps no scores, which {title} has in bf16 and fp16 alone;"
        " plan again with --dtype bf16.",
    )


whole_experts = Refusal(
    lambda o, model: model.experts is not None and model.experts.count % (o.expert * o.expert_shards) != 0,
    "{title} gives every rank whole experts, and {model.experts.count} experts cannot be divided over the {o.expert}"
    " expert- x {o.expert_shards} tensor-parallel ranks; plan again with a smaller --tensor.",
)
"""Experts that are not whole where ranks divide them, expert- and tensor-parallel ones alike."""

divided_experts = Refusal(
    lambda o, model: o.expert_shards != o.tensor,
    "{title} divides every expert over the tensor-parallel ranks; plan again with --expert-tensor {o.tensor}.",
)
"""Experts that the tensor-parallel ranks do not divide as they do everything else."""

untied = Refusal(
    lambda o, model: bool(model.tied if (said := model.config.get("tie_word_embeddings")) is None else said),
    "{title} does not train tied embeddings over a pipeline; set tie_word_embeddings to false in the model's config and"
    " plan again.",
)
"""Models whose head is their embedding."""

FURTHER_TOKENS = (
    "debubble does not write multi-token-prediction layers for {title}; plan the model without them, or export to"
    " megatron."
)

next_token_alone = Refusal(lambda o, model: model.mtp_layers > 0, FURTHER_TOKENS)
"""Multi-token-prediction layers, whose modules debubble cannot name."""

text_alone = Refusal(
    lambda o, model: model.vision is not None,
    "debubble writes no vision tower for {title}; plan the model's text_config.",
)
"""Vision towers."""

eight_bits_divided = Refusal(
    lambda o, model: o.optimizer == "adamw-8bit" and not o.zero,
    "{title} has no optimizer 'adamw-8bit' that debubble can write; plan again with --zero 1, or with --optimizer"
    f" {' or '.join(name for name in MOMENTS if name != 'adamw-8bit')}.",
)
"""8-bit moments without Megatron-LM's distributed optimizer."""

optimizers_of_fsdp = Refusal(
    lambda o, model: o.zero >= 2 and o.optimizer not in ("adamw", "adam", "momentum", "sgd"),
    "{title} divides gradients (Megatron-FSDP) for adam and sgd alone, not for '{o.optimizer}'; plan again with"
    " --zero 1, or with another --optimizer.",
)
"""Gradients that are divided (Megatron-FSDP) under optimizers that do not step them."""

fsdp_with_a_pipeline = Refusal(
    lambda o, model: o.zero >= 2,
    "Gradients are divided by Megatron-FSDP, and none of Megatron-LM's functional tests runs it with a pipeline: try a"
    " few steps first, or plan again with --zero 1.",
)
"""Megatron-FSDP in a pipeline, which its checks take and its tests do not run."""

adam_on_hosts = Refusal(
    lambda o, model: o.host_optimizer > 0 and not (o.optimizer in ("adamw", "adam") and o.zero),
    "{title} moves optimizer states to hosts for a distributed Adam alone; plan again with --zero 1 and --optimizer"
    " adamw, or without --host-optimizer.",
)
"""Optimizer states on hosts that are not Adam's, or not those of a distributed optimizer."""

whole_optimizer_on_hosts = Refusal(
    lambda o, model: o.host_optimizer not in (0, 1),
    "{title} keeps all optimizer states on the host or none; plan again with --host-optimizer 1, or without.",
)
"""A share of the optimizer states on hosts."""

small_moments_divided = Refusal(
    lambda o, model: o.moment_dtype != "fp32" and not (o.optimizer in ("adamw", "adam") and o.zero),
    "{title} has moments in '{o.moment_dtype}' in its distributed Adam alone; plan again with --zero 1 and --optimizer"
    " adamw, or without --moment-dtype.",
)
"""Moments of fewer bytes without Megatron-LM's distributed optimizer."""

no_weights_in_4_bits = Refusal(
    lambda o, model: o.quantize is not None,
    "{title} has no frozen weights in 4 bits; plan again without --quantize, or --for automodel, deepspeed or torch.",
)
"""Quantised weights, in frameworks that train next to adapters on weights of the run's dtype alone."""

fp32_masters = Refusal(
    lambda o, model: o.master_dtype != "fp32",
    "{title} steps weights in fp32; plan again without --master-dtype, or --for debubble, torchtitan, automodel or"
    " deepspeed.",
)
"""Weights that the optimizer steps in 16 bits."""

experts_to_overlap = Refusal(
    lambda o, model: o.expert_overlap and o.expert < 2,
    "{title} overlaps what expert-parallel ranks exchange; plan again with --expert 2 or more.",
)
"""Combined 1F1B where no tokens travel."""


def plain_model(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse models that are more than embedding, layers, norm and head in a row."""
    why = why_not_plain(model.config)
    if why is None:
        return None
    return f"{title} would train another model over a pipeline: {why}; export to torch or megatron."


def runtime(title: str, options: RunOptions, model: Model) -> str | None:
    """Refuse what debubble's own runtime does not run."""
    return beyond_runtime(options, model)


WITHOUT_OPTIONS = (
    whole_sequences,
    *map(unset, ("expert_overlap", "gradient_dtype", "moment_dtype", "flash_attention")),
)
"""Rules of the frameworks for which debubble writes none of these options."""
PLAIN = (*WITHOUT_OPTIONS, unset("host_optimizer"))
"""Rules of the frameworks that besides do not step optimizers on hosts."""
FSDP = (one_of("dtype", ("bf16", "fp32")), next_token_alone, text_alone)
"""Rules of the frameworks on torch's FSDP, the last of theirs."""
