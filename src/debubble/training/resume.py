"""Reads checkpoints: all ranks choose one together, look through it, and load it.

Every rank of the process group calls `checkpoint_to_resume`, `verify` and `load`; all see the same folder.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from debubble.ir import InputError
from debubble.runtime.distributed.sharding import TensorShard
from debubble.training.checkpoint.dcp_planners import LoadPieces, OtherModelError, OtherPartsError, State, tensors
from debubble.training.checkpoint.folder import (
    DamagedError,
    Manifest,
    RunProgress,
    check_contents,
    check_sizes,
    checkpoints,
    progress_of,
)
from debubble.training.checkpoint.metadata import CheckpointReader, read_metadata
from debubble.training.checkpoint.saver import first_failure
from debubble.training.checkpoint.state import GROUP_MARK
from debubble.training.options import INSTEAD_OF_DAMAGED, TrainOptions, refuse_if_all_damaged, start_of

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run continues from."""

    checkpoint: Path
    progress: RunProgress
    notes: tuple[str, ...] = ()
    """Sentences for the user on the choice."""


def checkpoint_to_resume(options: TrainOptions) -> Start | None:
    """The checkpoint to resume, the same on all ranks; None where the run begins.

    With --auto-resume, damaged ones are put aside for the newest that is whole.  Raises InputError if the one to
    --resume is damaged, or all are.
    """
    folder = options.checkpoint
    if folder is None or ask_rank_0(lambda: start_of(options)) is None:
        return None
    damaged: list[DamagedError] = []
    for checkpoint in ask_rank_0(lambda: checkpoints(folder)[::-1]):
        try:
            return _read_or_refuse(checkpoint, damaged)
        except DamagedError as error:
            if not options.auto_resume:
                raise InputError(f"{error} {INSTEAD_OF_DAMAGED}") from error
            damaged.append(error)
    refuse_if_all_damaged(folder, damaged)
    return None


def _read_or_refuse(checkpoint: Path, damaged: Sequence[DamagedError]) -> Start:
    """Go on from this checkpoint instead of the damaged ones, if it is whole.  Raises DamagedError if not."""
    has_checksums = verify(checkpoint)
    progress = ask_rank_0(lambda: progress_of(checkpoint))
    notes = [f"{error} It is put aside, and the run goes on from {checkpoint.name}." for error in damaged]
    if not has_checksums:
        notes.append(f"{checkpoint} has no checksums: an earlier version wrote it, and not all damage can be seen.")
    ask_rank_0(lambda: [_put_aside(error.checkpoint) for error in damaged])
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


def verify(checkpoint: Path) -> bool:
    """Read every file of a checkpoint, each rank its share, and say whether there were checksums to compare.

    Raises DamagedError, on all ranks the same, if it is not what was written.
    """
    found = ask_rank_0(lambda: _looked_through(checkpoint))
    if found is None:
        return False
    rank, ranks = dist.get_rank(), dist.get_world_size()
    answers: list[DamagedError | None] = [None] * ranks
    mine: DamagedError | None = None
    try:
        check_contents(checkpoint, found, sorted(found.files)[rank::ranks])
    except DamagedError as error:
        mine = error
    dist.all_gather_object(answers, mine)
    for answer in answers:
        if answer is not None:
            raise answer
    # Only now is it known that this is the metadata that was written.
    ask_rank_0(lambda: len(read_metadata(checkpoint).state_dict_metadata))
    return True


def load(checkpoint: Path, state: State) -> None:
    """Fill the tensors of `state` in place.  Every rank calls this, with what it holds.

    Raises InputError if it is another model's, DamagedError if it cannot be read.
    """
    reader = CheckpointReader(checkpoint, ask_rank_0(lambda: read_metadata(checkpoint)))
    try:
        state_dict_loader.load(tensors(state), storage_reader=reader, planner=LoadPieces(state))
    except (OSError, CheckpointException) as error:
        cause = first_failure(error)
        if isinstance(cause, OtherPartsError):
            raise InputError(
                f"The optimizer's states in {checkpoint} have a form of their own (8 bits), which is not divided anew:"
                " resume with the tensor, data, context and expert degrees and the ZeRO level that it was written with,"
                " or train anew from saved weights (--load)."
            ) from error
        if isinstance(cause, OtherModelError):
            raise InputError(f"The checkpoint {checkpoint} does not belong to this model: {cause}.") from error
        raise DamagedError(checkpoint, f"its tensors cannot be read ({type(cause).__name__})") from error


def group_numbers_in(checkpoint: Path) -> dict[str, TensorShard]:
    """Places for the numbers of optimizers' groups that a checkpoint has, by name.  Every rank calls this."""

    def find() -> dict[str, torch.dtype]:
        entries = read_metadata(checkpoint).state_dict_metadata.items()
        whole = {name: found for name, found in entries if isinstance(found, TensorStorageMetadata)}
        return {name: found.properties.dtype for name, found in whole.items() if GROUP_MARK in name}

    return {name: TensorShard.unsharded(torch.zeros((), dtype=dtype)) for name, dtype in ask_rank_0(find).items()}


def precision_note(checkpoint: Path, masters: str) -> str | None:
    """Say what becomes of weights that a checkpoint has in another dtype than the run keeps them; None if in that."""
    entries = read_metadata(checkpoint).state_dict_metadata.items()
    weights = [e for name, e in entries if isinstance(e, TensorStorageMetadata) and name.startswith("model.")]
    dtypes = {entry.properties.dtype for entry in weights}
    if torch.float32 in dtypes and masters != "fp32":
        return f"The checkpoint's fp32 weights and optimizer states are rounded to {masters}, as this run keeps them."
    if torch.bfloat16 in dtypes and torch.float32 not in dtypes and masters == "fp32":
        return "The checkpoint's weights have 16 bits, of a run without fp32 masters: fp32 masters are made of them."
    return None


def _looked_through(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint whose files are there; of one without a manifest, its metadata says which."""
    found = check_sizes(checkpoint)
    if found is None:
        read_metadata(checkpoint)
    return found


def ask_rank_0(look: Callable[[], T]) -> T:
    """Rank 0's result on all ranks, or its InputError: hosts may see a shared folder change at different times."""
    answer: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            answer = [look()]
        except InputError as error:
            answer = [error]
    dist.broadcast_object_list(answer)
    if isinstance(answer[0], InputError):
        raise answer[0]
    result: T = answer[0]
    return result
