"""Resuming: all ranks agree on a checkpoint, verify it, and load it.

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
from debubble.training.checkpoint.dcp_planners import ReshardError, ShardLoadPlanner, State, WrongModelError, tensors
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
from debubble.training.options import DAMAGED_ADVICE, TrainOptions, refuse_if_all_damaged, start_of

T = TypeVar("T")


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run continues from."""

    checkpoint: Path
    progress: RunProgress
    notes: tuple[str, ...] = ()
    """Sentences for the user on the choice of the checkpoint."""


def checkpoint_to_resume(options: TrainOptions) -> Start | None:
    """The checkpoint to resume, the same on all ranks; None for a new run.

    With --auto-resume, damaged checkpoints are renamed and the newest intact one is used.  Raises InputError if the one
    to --resume is damaged, or all are.
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
                raise InputError(f"{error} {DAMAGED_ADVICE}") from error
            damaged.append(error)
    refuse_if_all_damaged(folder, damaged)
    return None


def _read_or_refuse(checkpoint: Path, damaged: Sequence[DamagedError]) -> Start:
    """Start from this checkpoint instead of the damaged ones.  Raises DamagedError if it is damaged, too."""
    has_checksums = verify(checkpoint)
    progress = ask_rank_0(lambda: progress_of(checkpoint))
    notes = [f"{error} It is put aside, and the run goes on from {checkpoint.name}." for error in damaged]
    if not has_checksums:
        notes.append(f"{checkpoint} has no checksums: an earlier version wrote it, and not all damage can be seen.")
    ask_rank_0(lambda: [_put_aside(error.checkpoint) for error in damaged])
    return Start(checkpoint, progress, tuple(notes))


def _put_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint, so that it no longer counts as one when old checkpoints are deleted."""
    numbers = itertools.chain([""], itertools.count(2))
    places = (checkpoint.with_name(f"{checkpoint.name}.damaged{number}") for number in numbers)
    aside = next(place for place in places if not place.exists())
    try:
        checkpoint.rename(aside)
    except OSError as error:
        raise InputError(f"{checkpoint} cannot be renamed to {aside.name}: {error.strerror}.") from error
    return aside


def verify(checkpoint: Path) -> bool:
    """Verify the files of a checkpoint, distributed over the ranks; returns whether it has checksums.

    Raises the same DamagedError on all ranks if the checkpoint is damaged.
    """
    manifest = ask_rank_0(lambda: _checked_manifest(checkpoint))
    if manifest is None:
        return False
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: list[DamagedError | None] = [None] * ranks
    damage: DamagedError | None = None
    try:
        check_contents(checkpoint, manifest, sorted(manifest.files)[rank::ranks])
    except DamagedError as error:
        damage = error
    dist.all_gather_object(results, damage)
    for result in results:
        if result is not None:
            raise result
    # The metadata is read only after its checksum has been verified.
    ask_rank_0(lambda: len(read_metadata(checkpoint).state_dict_metadata))
    return True


def load(checkpoint: Path, state: State) -> None:
    """Load a checkpoint into the tensors of `state`.  Every rank calls it with its shards.

    Raises InputError if the checkpoint is of another model, DamagedError if it cannot be read.
    """
    reader = CheckpointReader(checkpoint, ask_rank_0(lambda: read_metadata(checkpoint)))
    try:
        state_dict_loader.load(tensors(state), storage_reader=reader, planner=ShardLoadPlanner(state))
    except (OSError, CheckpointException) as error:
        cause = first_failure(error)
        if isinstance(cause, ReshardError):
            raise InputError(
                f"The optimizer's states in {checkpoint} have a form of their own (8 bits), which is not divided anew:"
                " resume with the tensor, data, context and expert degrees and the ZeRO level that it was written with,"
                " or train anew from saved weights (--load)."
            ) from error
        if isinstance(cause, WrongModelError):
            raise InputError(f"The checkpoint {checkpoint} does not belong to this model: {cause}.") from error
        raise DamagedError(checkpoint, f"its tensors cannot be read ({type(cause).__name__})") from error


def saved_group_numbers(checkpoint: Path) -> dict[str, TensorShard]:
    """Empty tensors for the numbers of param groups in a checkpoint, by name.  Every rank calls it."""

    def find() -> dict[str, torch.dtype]:
        entries = read_metadata(checkpoint).state_dict_metadata.items()
        tensor_entries = {name: entry for name, entry in entries if isinstance(entry, TensorStorageMetadata)}
        return {name: entry.properties.dtype for name, entry in tensor_entries.items() if GROUP_MARK in name}

    return {name: TensorShard.unsharded(torch.zeros((), dtype=dtype)) for name, dtype in ask_rank_0(find).items()}


def precision_note(checkpoint: Path, masters: str) -> str | None:
    """A sentence on the conversion of weights if the checkpoint's dtype differs from the run's; otherwise None."""
    entries = read_metadata(checkpoint).state_dict_metadata.items()
    weights = [e for name, e in entries if isinstance(e, TensorStorageMetadata) and name.startswith("model.")]
    dtypes = {entry.properties.dtype for entry in weights}
    if torch.float32 in dtypes and masters != "fp32":
        return f"The checkpoint's fp32 weights and optimizer states are rounded to {masters}, as this run keeps them."
    if torch.bfloat16 in dtypes and torch.float32 not in dtypes and masters == "fp32":
        return "The checkpoint's weights have 16 bits, of a run without fp32 masters: fp32 masters are made of them."
    return None


def _checked_manifest(checkpoint: Path) -> Manifest | None:
    """Check that a checkpoint's files exist, by its manifest, or else by its metadata; returns the manifest."""
    manifest = check_sizes(checkpoint)
    if manifest is None:
        read_metadata(checkpoint)
    return manifest


def ask_rank_0(look: Callable[[], T]) -> T:
    """Return rank 0's result or raise its InputError on all ranks: hosts may see a shared folder in other states."""
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
