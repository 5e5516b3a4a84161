"""FlagScale's YAML of a training: Megatron-LM's arguments in parts and sections, which it takes the names of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.frameworks.megatron.arguments import is_off
from debubble.frameworks.megatron.bridge import argument
from debubble.ir import InputError

_PARTS = ("system.", "model.", "data.")
_WIDTH, _FFN = "--hidden-size", "--ffn-hidden-size"
_MULTIPLE, _MULTIPLIER = "--multiple-of", "--hidden-dim-multiplier"

_NOT_PREDICTED = {"--enable-hetero": "mesh for each stage", "--schedules-method": "own order of operations"}


def is_flagscale(settings: Mapping[str, Any]) -> bool:
    """Tell whether a file's settings stand in FlagScale's parts."""
    return all(any(name.startswith(part) for name in settings) for part in _PARTS[:2])


def read_flagscale(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as arguments, `--name` -> value, by the last part of their names; those that are off are left out.

    Source: FlagScale, flagscale/runner/utils.py, flatten_dict_to_args.

    Raises:
        InputError: if stages have different meshes, or their order is one of FlagScale's own.
    """
    arguments = {
        f"--{name.rpartition('.')[2].replace('_', '-')}": argument(value)
        for name, value in settings.items()
        if name.startswith(_PARTS) and not is_off(name.rpartition(".")[2], value)
    }
    for name, words in _NOT_PREDICTED.items():
        if name in arguments:
            raise InputError(f"FlagScale's {words} ({name}) is not predicted: leave it out of a copy.")
    return {**_ffn(arguments), **arguments}


def _ffn(arguments: dict[str, Any]) -> dict[str, Any]:
    """The width of the FFN by FlagScale's own arguments, which are taken out; nothing where it is not by them."""
    multiple, multiplier = arguments.pop(_MULTIPLE, None), arguments.pop(_MULTIPLIER, "1")
    try:
        of, width = int(multiple or 0), int(int(4 * int(arguments.get(_WIDTH, 0)) * 2 / 3) * float(multiplier))
    except (TypeError, ValueError):
        return {}
    return {_FFN: str(-(-width // of) * of)} if of > 0 and width > 0 else {}
