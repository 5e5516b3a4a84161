"""Megatron-Bridge (NeMo): the YAML of a run's ConfigContainer, or of an override, as Megatron-LM's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from debubble.imports.settings import read_settings
from debubble.ir import InputError

PARTS = ("model", "train", "ddp", "optimizer", "comm_overlap", "checkpoint")
"""The parts of the configuration whose settings are arguments."""
_NAMES = {
    "num_moe_experts": "num-experts",
    "gated_linear_unit": "swiglu",
    "virtual_pipeline_model_parallel_size": "num-virtual-stages-per-pipeline-rank",
    "num_layers_in_first_pipeline_stage": "decoder-first-pipeline-num-layers",
    "num_layers_in_last_pipeline_stage": "decoder-last-pipeline-num-layers",
}
"""Settings that Megatron-LM calls otherwise."""
_STAGES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def read_bridge(path: Path) -> Mapping[str, Any]:
    """The settings as arguments, `--name` -> value, and the model's name as `model`; those that are off are left out.

    Raises:
        InputError: if the file is no configuration of Megatron-Bridge.
    """
    settings = {
        name: value
        for name, value in read_settings(path).items()
        if value not in (None, False, []) and not name.rpartition(".")[2].startswith("_")
    }
    if not any(name.startswith("model.") for name in settings):
        raise InputError(f"{path} has no model, as configurations of Megatron-Bridge have.")
    return dict(_arguments(settings))


def _arguments(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for path, value in settings.items():
        part, _, name = path.partition(".")
        if path == "model.hf_model_id":
            yield "model", value
        elif path == "mixed_precision":
            yield from _precision(str(value))
        elif name == "pipeline_model_parallel_layout":
            yield "--pipeline-model-parallel-layout", value if isinstance(value, str) else _layout(value)
        elif part in PARTS and name:
            yield f"--{_NAMES.get(name, name.replace('_', '-'))}", argument(value)
        elif part != "mixed_precision":
            yield path, value
    if not settings.get("model.share_embeddings_and_output_weights"):
        yield "--untie-embeddings-and-output-weights", True
    if settings.get("model.num_query_groups") is not None:
        yield "--group-query-attention", True


def _precision(recipe: str) -> Iterator[tuple[str, Any]]:
    """The dtypes of a recipe such as `bf16_with_fp8_delayed_scaling_mixed`."""
    yield "--fp16" if recipe.startswith("fp16") else "--bf16", True
    if "fp8" in recipe:
        yield "--fp8-format", "hybrid"


def _layout(stages: Sequence[Any]) -> str:
    """A layout string of lists of names, one for each stage."""
    return "|".join("".join(_STAGES.get(str(name), "t") for name in stage) for stage in stages)


def argument(value: Any) -> Any:
    """A value as it stands behind an argument: True, a word, or a tuple of words."""
    if isinstance(value, list):
        return tuple(map(str, value))
    return True if value is True else str(value)
