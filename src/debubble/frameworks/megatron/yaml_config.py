"""Reads the YAML of Megatron-LM's --yaml-cfg, which replaces the arguments of the command line.

Source: Megatron-LM, megatron/training/yaml_arguments.py and examples/gpt3/gpt_config.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.frameworks.megatron.arguments import is_off
from debubble.frameworks.megatron.bridge import argument
from debubble.imports.harmless import LAUNCHER_FLAGS
from debubble.imports.settings import TURNED_OFF, YAML_ENTRIES
from debubble.imports.unread import listed_names, misspelt
from debubble.ir import InputError

_SECTIONS = ("language_model.", "model_parallel.")
_ARGUMENT = "--yaml-cfg"
_NAMES = {"num_moe_experts": "--num-experts", "encoder_num_layers": "--num-layers"}
_ACTIVATIONS = {"swiglu": "--swiglu", "squaredrelu": "--squared-relu"}
_PLAIN_ACTIVATION = ("activation_func", "gelu")
_REPLACED = (
    "swiglu", "squared_relu", "gated_linear_unit", "virtual_pipeline_model_parallel_size", "group_query_attention",
)  # fmt: skip
"""Entries without effect, because others decide the same."""
_FEATURES = ("tp_comm_overlap", "cpu_offloading")
_OF_FEATURES = ("tp_comm_", "cpu_offloading_", "_cpu_offloading_")
"""Features, and prefixes of the entries that configure them."""
HARMLESS = """
    model_parallel.tp_comm_* model_parallel.*cpu_offloading_* model_parallel.*_func batch_p2p_*
    deallocate_pipeline_outputs clone_scatter_output_in_embedding layernorm_zero_centered_gamma
"""
"""Entries that cost neither time nor memory of a step, or nothing without the feature that they configure."""


def is_yaml_config(settings: Mapping[str, Any]) -> bool:
    """Tell whether a file is one for --yaml-cfg."""
    return any(name.startswith(_SECTIONS[1]) for name in settings) and not any(
        name.startswith(("model.", "train.")) for name in settings
    )


def with_yaml_config(arguments: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The arguments of a script, replaced by those of the file that its --yaml-cfg names.

    Raises:
        InputError: if the file is neither written by the script nor next to it.
    """
    if _ARGUMENT not in arguments:
        return arguments
    entries = {
        name.removeprefix(YAML_ENTRIES): value for name, value in arguments.items() if name.startswith(YAML_ENTRIES)
    }
    if not entries:
        raise InputError(f"{path} has its arguments in {arguments[_ARGUMENT]}, which is not next to it: put it there.")
    started = {name: value for name, value in arguments.items() if name in LAUNCHER_FLAGS or name[:2] != "--"}
    of_launch = {name: value for name, value in started.items() if not name.startswith(YAML_ENTRIES)}
    return {**of_launch, **read_yaml_config(entries)}


def read_yaml_config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The file's entries as arguments, `--name` -> value, without those that are off."""
    return dict(_arguments(settings))


def _arguments(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    known = {f"--{name}" for name in listed_names("megatron", "flags.txt")}
    has_features = any(settings.get(f"{_SECTIONS[1]}{feature}") for feature in _FEATURES)

    def is_unused(name: str) -> bool:
        return name.startswith(_OF_FEATURES) and name not in _FEATURES and not has_features

    for path, value in settings.items():
        name = next((path.removeprefix(section) for section in _SECTIONS if path.startswith(section)), path)
        named = _NAMES.get(name, f"--{name.replace('_', '-')}")
        if name == "activation_func" and str(value) in _ACTIVATIONS:
            yield _ACTIVATIONS[str(value)], True
        elif name in TURNED_OFF and value is False:
            yield TURNED_OFF[name], True
        elif value is None or name in (*_REPLACED, *TURNED_OFF) or (name, value) == _PLAIN_ACTIVATION:
            continue
        elif is_unused(name) or not (named in known or misspelt([named], known)):
            yield path, value
        elif not is_off(name, value):
            yield named, argument(value)
    if settings.get("language_model.num_query_groups") is not None:
        yield "--group-query-attention", True
