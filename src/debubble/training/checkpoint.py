"""Checkpoints: torch.distributed.checkpoint files, whole or not there, the newest few kept.

A checkpoint is the folder `step-N` with every rank's tensors under their parameters' names, so that another
partition finds them too, and `progress.json`.  It is written beside its place, while training goes on, and renamed
when all ranks are done.  Every rank of the process group calls `save` and `load`; all see the same folder.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from debubble.ir import DebubbleError, InputError
from debubble.ir.files import write_whole
from debubble.training.checkpoint_folder import Progress, checkpoints
from debubble.training.divided import LoadPieces, SavePieces, State, tensors


class CheckpointError(DebubbleError):
    """A checkpoint could not be written; the one before it is untouched."""


class Saver:
    """Writes the checkpoints of one run, one at a time, and keeps the newest `keep`.  Every rank has one."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # A group of its own: writing talks while training does.
        self._group = dist.new_group(backend="gloo")
        self._leader = dist.get_rank() == 0
        self._writing: tuple[Path, State, Future[Metadata]] | None = None
        self.newest: Path | None = None
        """The last checkpoint that is whole."""
        if self._leader:
            for leftover in folder.glob(".step-*.unfinished"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: State, progress: Progress) -> None:
        """Copy the state and start to write the copy.  Waits for the checkpoint before it.

        Raises CheckpointError if that could not be written.
        """
        self.wait()
        final = self._folder / f"step-{progress.step:06d}"
        writing = async_save(
            tensors(state),
            storage_writer=_Writer(final, progress, keep=self._keep),
            planner=SavePieces(state),
            process_group=self._group,
        )
        assert isinstance(writing, Future)
        self._writing = final, state, writing

    def check(self) -> None:
        """Note whether the checkpoint in writing is done.  Raises CheckpointError if it could not be written."""
        if self._writing is not None and self._writing[2].done():
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint in writing is whole.  Raises CheckpointError if it could not be written."""
        if self._writing is None:
            return
        (final, state, writing), self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, CheckpointException) as error:
            cause = "the disk is full" if _full(self._folder, state) else _cause(error)
            if self._leader:
                shutil.rmtree(_unfinished(final), ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint {final} could not be written: {cause}; those before it are whole."
            ) from error
        self.newest = final


class _Writer(FileSystemWriter):
    """Writes beside the final place; the coordinator, when all ranks have written, makes it whole by renaming."""

    def __init__(self, final: Path, progress: Progress, *, keep: int) -> None:
        super().__init__(_unfinished(final))
        self._final, self._progress, self._keep = final, progress, keep

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        unfinished = _unfinished(self._final)
        write_whole(unfinished / "progress.json", msgspec.json.encode(self._progress))
        shutil.rmtree(self._final, ignore_errors=True)
        unfinished.rename(self._final)
        for old in checkpoints(self._final.parent)[: -self._keep]:
            shutil.rmtree(old)


def load(checkpoint: Path, state: State) -> None:
    """Fill the tensors of `state` in place.  Every rank calls this, with what it holds."""
    try:
        state_dict_loader.load(tensors(state), checkpoint_id=checkpoint, planner=LoadPieces(state))
    except (OSError, CheckpointException) as error:
        raise InputError(f"The checkpoint {checkpoint} does not belong to this model: {_cause(error)}.") from error


def _unfinished(final: Path) -> Path:
    return final.with_name(f".{final.name}.unfinished")


def _full(folder: Path, state: State) -> bool:
    """Whether the disk has less room than this rank's tensors take."""
    needed = sum(piece.tensor.nbytes for piece in state.values())
    return folder.exists() and shutil.disk_usage(folder).free < needed


def _cause(error: BaseException) -> str:
    """The first rank's own error, in one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return str(error).strip().split("\n")[0].rstrip(".")
