"""The record of a run: JSON lines that rank 0 appends and `debubble watch` reads.  Needs no torch.

A line is a start, a step or an end.  A resumed run appends another start to the same file; its steps replace those
after its checkpoint.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import DecodeError, Struct
from msgspec.json import encode

from debubble.errors import InputError, StoppedError
from debubble.files import decode_json
from debubble.training.monitoring.progress import Show, StepReport

RECORD = "metrics.jsonl"
"""Name of the record in a folder of checkpoints."""


class RunStart(Struct, frozen=True, kw_only=True, tag_field="event", tag="start"):
    """A start of the run."""

    plan: str
    """Path of the plan file."""
    done: int
    """Steps done before this start."""
    steps: int
    """Total steps of the run."""
    process: int
    """Process id of rank 0."""
    host: str
    cores: int | None = None
    """CPU cores that its devices share; None: they are GPUs, or an earlier version did not write it."""


class RunStep(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="step"):
    """A step, with fields as in `StepReport`; values that are not finite are None."""

    time: float
    """Unix time at the end of the step."""
    step: int
    loss: float | None
    gradient_norm: float | None
    learning_rate: float
    seconds: float
    tokens_per_second: float
    peak_memory: tuple[float, ...]
    busy: tuple[float, ...]
    loss_scale: float | None = None
    mfu: float | None = None
    bubble_fraction: float | None = None
    measured_step: int | None = None
    """The step of the peak memory, busy times and bubble; None: an earlier version did not write it."""
    validation_loss: float | None = None

    @staticmethod
    def from_report(report: StepReport) -> RunStep:
        """The entry of a step that has just ended."""
        names = [name for name in RunStep.__struct_fields__ if name != "time"]
        return RunStep(time=time.time(), **{name: getattr(report, name) for name in names})


class RunEnd(Struct, frozen=True, kw_only=True, tag_field="event", tag="end"):
    """The end of the run."""

    error: str | None
    """The error that ended the run; None: it took all its steps."""
    stopped: bool = False
    """Whether a signal ended it, after which it saved a checkpoint."""


@contextmanager
def record(file: Path, *, plan: Path, done: int, steps: int, cores: int | None = None) -> Iterator[Show]:
    """Append a line for every step to the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)  # a killed run may have left an incomplete line

        def append(line: RunStart | RunStep | RunEnd) -> None:
            stream.write(encode(line) + b"\n")
            stream.flush()

        host = socket.gethostname()
        begun = RunStart(
            plan=str(plan.resolve()), done=done, steps=steps, process=os.getpid(), host=host, cores=cores
        )  # fmt: skip
        append(begun)
        try:
            yield lambda report: append(RunStep.from_report(report))
        except BaseException as error:
            append(RunEnd(error=str(error) or type(error).__name__, stopped=isinstance(error, StoppedError)))
            raise
        append(RunEnd(error=None))


def has_begun(run: Path) -> bool:
    """Tell whether the record, a file or in a folder of checkpoints, exists and is not empty."""
    file = _file_of(run)
    return file.is_file() and file.stat().st_size > 0


def _file_of(run: Path) -> Path:
    return run / RECORD if run.is_dir() else run


class RunRecord:
    """A reader of a record that may still grow; `read` reads new lines.

    Args:
        run: The file, or the folder of checkpoints that has it.

    Raises:
        InputError: If there is no such file, or it is not a record.
    """

    def __init__(self, run: Path) -> None:
        self.file = _file_of(run)
        self._offset = 0
        self.steps: list[RunStep] = []
        self.end: RunEnd | None = None
        starts = self.read()
        if not starts:
            raise InputError(f"{self.file} has no start of a run: wait until there is one.")
        self.start = starts[-1]

    def read(self) -> list[RunStart]:
        """Read new lines and return the starts among them.  Raises InputError for an invalid line."""
        starts = []
        for line in self._lines():
            try:
                entry = decode_json(line, RunStart | RunStep | RunEnd)  # type: ignore[arg-type]  # a union
            except DecodeError as error:
                raise InputError(f"{self.file} is not the record of a run of `debubble train`: {error}.") from error
            match entry:
                case RunStart():
                    self.steps, self.end = [step for step in self.steps if step.step <= entry.done], None
                    self.start = entry
                    starts.append(entry)
                case RunStep():
                    self.steps.append(entry)
                case RunEnd():
                    self.end = entry
        return starts

    def _lines(self) -> list[bytes]:
        try:
            with self.file.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except OSError as error:
            raise InputError(
                f"The record {self.file} cannot be read: {error.strerror}.  RUN is the folder that `debubble train` got"
                " with --checkpoint, or the file of --metrics."
            ) from error
        complete = content[: content.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.splitlines()

    @property
    def state(self) -> str:
        """`running`, `ended` (after all steps), `stopped` (by a signal), `failed`, or `died` (without an end entry)."""
        if self.end is not None:
            return "ended" if self.end.error is None else "stopped" if self.end.stopped else "failed"
        return "running" if self.start.host != socket.gethostname() or _lives(self.start.process) else "died"


def _lives(process: int) -> bool:
    """Tell whether a process of this id exists."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
