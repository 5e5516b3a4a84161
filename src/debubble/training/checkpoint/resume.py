"""Which checkpoint a run goes on from: all ranks look through it together before any of it is loaded."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from debubble.ir import InputError
from debubble.training.checkpoint.folder import DamagedError, RunProgress, checkpoints, progress_of
from debubble.training.checkpoint.saver import agreed, verify
from debubble.training.options import TrainOptions, check_any_whole, start_of


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run goes on from."""

    checkpoint: Path
    progress: RunProgress
    notes: tuple[str, ...] = ()
    """Sentences for the user on the choice."""


def choose(options: TrainOptions) -> Start | None:
    """The checkpoint to resume, the same on all ranks; None where the run begins.

    With --auto-resume, damaged ones are put aside for the newest that is whole.  Raises DamagedError if the one to
    --resume is damaged, InputError if all are.
    """
    folder = options.checkpoint
    if folder is None or agreed(lambda: start_of(options)) is None:
        return None
    damaged: list[DamagedError] = []
    for checkpoint in agreed(lambda: checkpoints(folder)[::-1]):
        try:
            return _checked(checkpoint, damaged)
        except DamagedError as error:
            if not options.auto_resume:
                raise
            damaged.append(error)
    check_any_whole(folder, damaged)
    return None


def _checked(checkpoint: Path, damaged: Sequence[DamagedError]) -> Start:
    """Go on from this checkpoint instead of the damaged ones, if it is whole.  Raises DamagedError if not."""
    has_checksums = verify(checkpoint)
    progress = agreed(lambda: progress_of(checkpoint))
    notes = [f"{error} It is put aside, and the run goes on from {checkpoint.name}." for error in damaged]
    if not has_checksums:
        notes.append(f"{checkpoint} has no checksums: an earlier version wrote it, and not all damage can be seen.")
    agreed(lambda: [_put_aside(error.checkpoint) for error in damaged])
    return Start(checkpoint, progress, tuple(notes))


def _put_aside(checkpoint: Path) -> Path:
    """Rename it, so that it no longer counts among the checkpoints, of which the newest are kept."""
    numbers = itertools.chain([""], itertools.count(2))
    places = (checkpoint.with_name(f"{checkpoint.name}.damaged{number}") for number in numbers)
    aside = next(place for place in places if not place.exists())
    try:
        checkpoint.rename(aside)
    except OSError as error:
        raise InputError(f"{checkpoint} cannot be renamed to {aside.name}: {error.strerror}.") from error
    return aside
