"""Bytes of model states (weights, gradients, optimizer states) per parameter.

Mixed precision as in Megatron-LM: bf16 weights (2), fp32 gradients (4), fp32 master weights (4) and moments (8 for
Adam): 18 bytes without ZeRO, 6 + 12/n with a distributed optimizer (ZeRO-1) over n ranks.  In fp32 there are no
master weights: 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

from debubble.ir import InputError, RunOptions

MOMENTS: Mapping[str, int] = {
    "adamw": 8,
    "adam": 8,
    "adamw-8bit": 2,
    "lion": 4,
    "muon": 4,
    "momentum": 4,
    "sgd": 0,
}
"""Bytes per parameter that each optimizer keeps beside the weights."""

ELEMENT: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of a number in each dtype."""


def state_bytes(options: RunOptions, *, shards: float, gradient_bytes: int) -> float:
    """Bytes per parameter on one device, when `shards` ranks divide what ZeRO divides.

    `gradient_bytes` holds in mixed precision.  Raises InputError for an unknown optimizer, dtype or ZeRO level.
    """
    if options.optimizer not in MOMENTS:
        raise InputError(f"There is no optimizer '{options.optimizer}'; there are: {', '.join(MOMENTS)}.")
    weight = element_bytes(options.dtype)
    mixed = weight == 2
    gradient = gradient_bytes if mixed else 4
    optimizer = MOMENTS[options.optimizer] + (4 if mixed else 0)
    match options.zero:
        case 0:
            return weight + gradient + optimizer
        case 1:
            return weight + gradient + optimizer / shards
        case 2:
            return weight + (gradient + optimizer) / shards
        case 3:
            return (weight + gradient + optimizer) / shards
        case level:
            raise InputError(f"ZeRO has the levels 0, 1, 2 and 3, not {level}.")


def element_bytes(dtype: str) -> int:
    """Bytes of a number; raises InputError for an unknown dtype."""
    if dtype not in ELEMENT:
        raise InputError(f"There is no dtype '{dtype}'; there are: {', '.join(ELEMENT)}.")
    return ELEMENT[dtype]
