"""What a profile was measured of, so that it is not taken for another model's or another run's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from debubble.ir import InputError, RunOptions
from debubble.models.config import ModelConfig


class Measured(msgspec.Struct):
    """The entry `measured` of a profile."""

    model: dict[str, Any]
    """Hugging Face config."""
    dtype: str
    sequence_length: int
    micro_batch_size: int
    lora: int
    device: str
    """What it ran on, for people."""


class _Header(msgspec.Struct):
    measured: Measured | None = None


def check_measured(profile: Mapping[str, Any], model: ModelConfig, options: RunOptions) -> None:
    """Raise InputError if the profile says that it measures another model or another kind of run.

    A units file that says nothing of this was written by hand.
    """
    try:
        measured = msgspec.convert(profile, _Header).measured
    except msgspec.ValidationError as error:
        raise InputError(f"The profile is no profile: {error}.") from error
    if measured is None:
        return
    if ModelConfig.from_hf(measured.model) != model:
        raise InputError("The profile measures another model: run `debubble profile` for this one.")
    for name in ("dtype", "sequence_length", "micro_batch_size", "lora"):
        then, now = getattr(measured, name), getattr(options, name)
        if then != now:
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"The profile was measured with {option} {then}, not {now}: give {option} {then}, or profile again."
            )
