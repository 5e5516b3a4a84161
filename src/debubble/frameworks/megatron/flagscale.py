"""Reads FlagScale's YAML, which has Megatron-LM's arguments in nested sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.frameworks.megatron.arguments import is_off
from debubble.frameworks.megatron.bridge import argument
from debubble.ir import InputError

_SECTIONS = ("system.", "model.", "data.")
_WIDTH, _FFN = "--hidden-size", "--ffn-hidden-size"
_MULTIPLE, _MULTIPLIER = "--multiple-of", "--hidden-dim-multiplier"

_NOT_PREDICTED = {"--enable-hetero": "mesh for each stage", "--schedules-method": "own order of operations"}


def is_flagscale(settings: Mapping[str, Any]) -> bool:
    """Tell whether a file has FlagScale's sections."""
    return all(any(name.startswith(section) for name in settings) for section in _SECTIONS[:2])


def read_flagscale(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as arguments, `--name` -> value, by the last component of their names, without those that are off.

    Source: FlagScale, flagscale/runner/utils.py, flatten_dict_to_args.

    Raises:
        InputError: if stages have different meshes, or the schedule is FlagScale's own.
    """
    arguments = {
        f"--{name.rpartition('.')[2].replace('_', '-')}": argument(value)
        for name, value in settings.items()
        if name.startswith(_SECTIONS) and not is_off(name.rpartition(".")[2], value)
    }
    for name, words in _NOT_PREDICTED.items():
        if name in arguments:
            raise InputError(f"FlagScale's {words} ({name}) is not predicted: leave it out of a copy.")
    return {**_ffn(arguments), **arguments}


def _ffn(arguments: dict[str, Any]) -> dict[str, Any]:
    """The FFN width from FlagScale's own arguments, which are removed; empty if they do not set it."""
    multiple, multiplier = arguments.pop(_MULTIPLE, None), arguments.pop(_MULTIPLIER, "1")
    try:
        divisor, width = int(multiple or 0), int(int(4 * int(arguments.get(_WIDTH, 0)) * 2 / 3) * float(multiplier))
    except (TypeError, ValueError):
        return {}
    return {_FFN: str(-(-width // divisor) * divisor)} if divisor > 0 and width > 0 else {}
