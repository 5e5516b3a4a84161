"""A folder of checkpoints, looked at from outside: which are there, and how far each was.  Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from debubble.ir import InputError


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: what resuming needs beside tensors.

    Random numbers follow from `seed`, and with `step` and `samples` from nothing else.
    """

    step: int
    """Steps done."""
    samples: int
    """Sequences seen."""
    seed: int
    model: Mapping[str, Any]
    """The model's config, to refuse a checkpoint of another one."""
    recipe: Mapping[str, int | float] = field(default_factory=dict)
    """Settings of the optimizer and of its learning rate's schedule, by the options' names."""


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a folder in the order of their steps, oldest first."""
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path:
    """The newest checkpoint.  Raises InputError if there is none."""
    found = checkpoints(folder)
    if not found:
        raise InputError(f"There is no checkpoint in {folder} to resume from.")
    return found[-1]


def progress_of(checkpoint: Path) -> Progress:
    """Read how far the checkpoint's run was.  Raises InputError if it is none of ours."""
    try:
        return msgspec.json.decode((checkpoint / "progress.json").read_bytes(), type=Progress)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{checkpoint} is not a whole checkpoint: {error}.") from error
