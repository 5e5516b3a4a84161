"""Writes checkpoints atomically and asynchronously, in the format of torch.distributed.checkpoint.

A checkpoint is the folder `step-N` with every rank's tensors under their parameters' names, which do not depend on the
partition, `progress.json`, and the manifest with every file's checksum.  It is written to a temporary folder while
training continues, and renamed when all ranks are done.  Every rank of the process group calls `save`; all see the same
folder.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.storage import WriteResult

from debubble.files import write_whole
from debubble.ir import DebubbleError
from debubble.training.checkpoint.dcp_planners import ShardSavePlanner, State, tensors
from debubble.training.checkpoint.folder import METADATA, PROGRESS, Digest, RunProgress, checkpoints, write_manifest


class CheckpointError(DebubbleError):
    """A checkpoint could not be written; earlier checkpoints are not affected."""


class Saver:
    """Writes the checkpoints of one run, one at a time, and keeps the newest `keep`.  Every rank has one."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder, self._keep = folder, keep
        # A separate group, because saving communicates concurrently with training.
        self._group = dist.new_group(backend="gloo")
        self._leader = dist.get_rank() == 0
        self._writing: tuple[Path, State, Future[Metadata]] | None = None
        self.newest: Path | None = None
        """The last complete checkpoint."""
        if self._leader:
            for leftover in folder.glob(".step-*.unfinished"):
                shutil.rmtree(leftover, ignore_errors=True)

    def save(self, state: State, progress: RunProgress) -> None:
        """Copy the state and start writing the copy.  Waits for the previous checkpoint.

        Raises CheckpointError if the previous one could not be written.
        """
        self.wait()
        final = self._folder / f"step-{progress.step:06d}"
        writing = async_save(
            tensors(state),
            storage_writer=_Writer(final, progress, keep=self._keep),
            planner=ShardSavePlanner(state),
            process_group=self._group,
        )
        assert isinstance(writing, Future)
        self._writing = final, state, writing

    def check(self) -> None:
        """Complete the pending checkpoint if it is done.  Raises CheckpointError if it could not be written."""
        if self._writing is not None and self._writing[2].done():
            self.wait()

    def wait(self) -> None:
        """Wait until the pending checkpoint is complete.  Raises CheckpointError if it could not be written."""
        if self._writing is None:
            return
        (final, state, writing), self._writing = self._writing, None
        try:
            writing.result()
        except (OSError, CheckpointException) as error:
            cause = "the disk is full" if _disk_full(self._folder, state) else _cause(error)
            if self._leader:
                shutil.rmtree(_unfinished(final), ignore_errors=True)
            raise CheckpointError(
                f"The checkpoint {final} could not be written: {cause}; those before it are whole."
            ) from error
        self.newest = final


class _Writer(FileSystemWriter):
    """Writes to a temporary folder, which the coordinator renames when all ranks have written."""

    def __init__(self, final: Path, progress: RunProgress, *, keep: int) -> None:
        super().__init__(_unfinished(final))
        self._final, self._progress, self._keep = final, progress, keep

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's files; their digests are sent to the coordinator as additional results."""
        results = super().write_data(plan, planner).wait()
        digests = [
            WriteResult(MetadataIndex(name), 0, Digest.from_file(_unfinished(self._final) / name))
            for name in sorted({result.storage_data.relative_path for result in results})
        ]
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*results, *digests])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {r.index.fqn: r.storage_data for rank in results for r in rank if isinstance(r.storage_data, Digest)}
        super().finish(metadata, [[r for r in rank if not isinstance(r.storage_data, Digest)] for rank in results])
        unfinished = _unfinished(self._final)
        write_whole(unfinished / PROGRESS, msgspec.json.encode(self._progress))
        files |= {name: Digest.from_file(unfinished / name) for name in (METADATA, PROGRESS)}
        write_manifest(unfinished, files)
        shutil.rmtree(self._final, ignore_errors=True)
        unfinished.rename(self._final)
        for old in checkpoints(self._final.parent)[: -self._keep]:
            shutil.rmtree(old)


def _unfinished(final: Path) -> Path:
    return final.with_name(f".{final.name}.unfinished")


def _disk_full(folder: Path, state: State) -> bool:
    """Tell whether the disk has less free space than this rank's tensors need."""
    needed = sum(shard.tensor.nbytes for shard in state.values())
    return folder.exists() and shutil.disk_usage(folder).free < needed


def first_failure(error: BaseException) -> BaseException:
    """The error of the first rank that failed."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _cause(error: BaseException) -> str:
    """The error of the first rank that failed, in one line."""
    return str(first_failure(error)).strip().split("\n")[0].rstrip(".")
