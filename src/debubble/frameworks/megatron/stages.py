"""Layers per stage in Megatron-LM: by a layout, evenly, with other first and last stages, or as DeepSpeed divides."""

from __future__ import annotations

import re

from debubble.frameworks.deepspeed.partition import partitioned_layers
from debubble.frameworks.megatron.arguments import Arguments
from debubble.frameworks.megatron.orders import has_v
from debubble.imports.job import even_layers
from debubble.imports.settings import RECIPE
from debubble.ir import InputError
from debubble.models import Model

LAYOUT = "--pipeline-model-parallel-layout"
_FIRST, _LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
_PER_VIRTUAL, _VIRTUAL = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
MANUAL = "--decoder-pipeline-manual-split-list"
"""Primus's list of the number of layers per stage."""
_PARTITION = "--pp-partition-method"
SPLITS = (
    _PER_VIRTUAL, _VIRTUAL, _FIRST, _LAST, MANUAL, "--num-layer-list",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments that Megatron-LM rejects together with a layout."""
_RECIPES_ENDS = (
    ", or what the recipe has, such as --args 'model.account_for_embedding_in_pipeline_split=true"
    " model.account_for_loss_in_pipeline_split=true'"
)
"""Advice on the first and last stage, which recipes of Megatron-Bridge set."""


def stages_of(arguments: Arguments, model: Model, pipeline: int) -> tuple[tuple[int, ...], int | None]:
    """Layers per stage, and the stage of the multi-token-prediction layers (None: the last).

    Raises:
        InputError: if Megatron-LM cannot divide the layers this way.
    """
    layers, layout = model.layers, arguments.word(LAYOUT)
    if layout is not None:
        return _by_layout(layout, model, pipeline)
    if _PARTITION in arguments or arguments.flag("--deepspeed"):
        method = arguments.word(_PARTITION, "type:transformer") or ""
        return partitioned_layers(method, model, pipeline), None
    listed = arguments.numbers(MANUAL)
    if listed:
        if len(listed) != pipeline:
            raise InputError(
                f"{arguments.path}: {MANUAL} has {len(listed)} numbers for {pipeline} pipeline devices, and only one"
                f" for each is read: say the stages with {LAYOUT}."
            )
        return tuple(listed), None
    ends = (
        int(arguments.flag("--account-for-embedding-in-pipeline-split")),
        int(arguments.flag("--account-for-loss-in-pipeline-split")),
    )
    chunks = _chunks(arguments, layers + sum(ends), pipeline)
    first, last = arguments.numbers(_FIRST), arguments.numbers(_LAST)
    if not first and not last:
        hint = _RECIPES_ENDS if RECIPE in arguments and not any(ends) else ""
        return _even_stages(layers, ends, pipeline * chunks, hint), None
    if pipeline == 1:
        raise InputError(
            f"{arguments.path}: {_FIRST if first else _LAST} is for the stages of a pipeline, and"
            " --pipeline-model-parallel-size is 1: leave it out, as Megatron-LM refuses it, or give --pipeline."
        )
    inner = pipeline - len(first) - len(last)
    if inner < 0:
        raise InputError(f"{arguments.path} says the layers of the first and the last of {pipeline} pipeline devices.")
    middle = even_layers(layers - sum(first) - sum(last), inner) if inner else ()
    device_layers = [even_layers(count, chunks) for count in (*first, *middle, *last)]
    return tuple(counts[chunk] for chunk in range(chunks) for counts in device_layers), None


def _chunks(arguments: Arguments, layers: int, pipeline: int) -> int:
    """Stages per device; `layers` include embedding and loss if the arguments count them."""
    if has_v(arguments) and pipeline > 1:
        return 2
    per_stage = arguments.count(_PER_VIRTUAL)
    if not per_stage:
        return max(arguments.count(_VIRTUAL, 1), 1)
    if layers % pipeline:
        even_layers(layers, pipeline)
    if layers // pipeline % per_stage:
        raise InputError(
            f"{arguments.path}: {_PER_VIRTUAL} is {per_stage}, which does not divide the layers of a device: {layers}"
            f" over {pipeline} pipeline devices."
        )
    return layers // pipeline // per_stage


def _even_stages(layers: int, ends: tuple[int, int], stages: int, hint: str) -> tuple[int, ...]:
    """Layers per stage for an even split in which embedding and loss count as `ends` layers."""
    total = layers + sum(ends)
    last = max(1, total - -(-total // stages) * (stages - 1))
    counts = list(even_layers(total, stages, otherwise=f", or an end's layers with --args '{_LAST} {last}'{hint}"))
    counts[0] -= ends[0]
    counts[-1] -= ends[1]
    return tuple(counts)


def _by_layout(layout: str, model: Model, pipeline: int) -> tuple[tuple[int, ...], int | None]:
    """Layers per stage of a layout, and the stage of its multi-token-prediction layers."""
    stages = _layout(layout)
    if len(stages) % pipeline:
        raise InputError(
            f"{LAYOUT} has {len(stages)} stages, which must be a multiple of the {pipeline} pipeline devices."
        )
    further = sum(stage.count("m") for stage in stages)
    if further != model.mtp_layers:
        raise InputError(
            f"{LAYOUT} places {further} multi-token-prediction layers, and the model has {model.mtp_layers}: give"
            " --mtp-num-layers, or num_nextn_predict_layers in the model's config.json."
        )
    mtp = next((s for s, stage in enumerate(stages) if "m" in stage), None)
    return tuple(stage.count("t") for stage in stages), mtp


def _layout(text: str) -> list[str]:
    """The stages of a layout such as `Et*3|(tt|)*29,m|L`, one letter per layer; raises InputError for another text."""
    flat = re.sub(r"[,\\ ]", "", text)  # YAML that passes through a shell has backslashes before special characters
    while (group := re.search(r"\(([^()]*)\)(?:\*(\d+))?", flat)) is not None:
        flat = flat[: group.start()] + group[1] * int(group[2] or 1) + flat[group.end() :]
    flat = re.sub(r"([EtmL])\*(\d+)", lambda match: match[1] * int(match[2]), flat)
    if re.fullmatch(r"[EtmL|]+", flat) is None:
        raise InputError(f"{LAYOUT} is '{text}', which is no layout of E, t, m, L and |.")
    return flat.split("|")
