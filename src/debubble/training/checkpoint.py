"""Checkpoints: torch.distributed.checkpoint files, whole or not there, the newest few kept.

A checkpoint is the folder `step-N` with every rank's tensors under their parameters' names, so that another
partition finds them too, and `progress.json`.  It is written beside its place and renamed when all ranks are done.
Every rank of the process group calls `save` and `load`.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from debubble.ir import DebubbleError, InputError

State = Mapping[str, Mapping[str, Tensor]]
"""Parts (`model`, `optimizer`) of tensors, by the parameters' names."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is: what resuming needs beside tensors."""

    step: int
    """Steps done."""
    samples: int
    """Sequences seen."""
    seed: int
    model: Mapping[str, Any]
    """The model's config, to refuse a checkpoint of another one."""


class CheckpointError(DebubbleError):
    """A checkpoint could not be written; the one before it is untouched."""


def save(folder: Path, state: State, progress: Progress, *, keep: int) -> Path:
    """Write `folder/step-N` from all ranks and remove all but the newest `keep`.  Every rank calls this."""
    final = folder / f"step-{progress.step:06d}"
    unfinished = folder / f".{final.name}.unfinished"
    leader = dist.get_rank() == 0
    if leader:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    try:
        state_dict_saver.save(dict(state), checkpoint_id=unfinished)
    except (OSError, CheckpointException) as error:
        cause = "the disk is full" if _full(folder, state) else _cause(error)
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(
            f"The checkpoint {final} could not be written: {cause}; those before it are whole."
        ) from error
    if leader:
        (unfinished / "progress.json").write_bytes(msgspec.json.encode(progress))
        shutil.rmtree(final, ignore_errors=True)
        unfinished.rename(final)
        for old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first."""
    return sorted(p for p in folder.glob("step-*") if re.fullmatch(r"step-\d{6,}", p.name))


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


def load(checkpoint: Path, state: State) -> None:
    """Fill the tensors of `state` in place.  Every rank calls this, with the tensors it holds."""
    try:
        state_dict_loader.load(dict(state), checkpoint_id=checkpoint)
    except (OSError, RuntimeError, CheckpointException) as error:
        raise InputError(f"The checkpoint {checkpoint} does not belong to this model: {_cause(error)}.") from error


def _full(folder: Path, state: State) -> bool:
    """Whether the disk has less room than this rank's tensors take."""
    needed = sum(tensor.nbytes for part in state.values() for tensor in part.values())
    return folder.exists() and shutil.disk_usage(folder).free < needed


def _cause(error: BaseException) -> str:
    """The first rank's own error, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().split("\n")[0].rstrip(".")
