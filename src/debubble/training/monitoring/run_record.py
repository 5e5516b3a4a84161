"""The record of a run: lines of JSON that its first rank appends and `debubble watch` reads.  Needs no torch.

A line is a start, a step or an end.  A run that is resumed starts again in the same file, and its steps replace those
that were taken after its checkpoint.
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
    """Steps before this start."""
    steps: int
    """Steps at the run's end."""
    process: int
    """Process number of the first rank."""
    host: str
    cores: int | None = None
    """CPU cores that its devices share; None: they are GPUs, or an earlier version did not tell."""


class RunStep(Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="event", tag="step"):
    """A step; names as in `StepReport`, and None for what is not finite."""

    time: float
    """Unix time at its end."""
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
    validation_loss: float | None = None

    @staticmethod
    def of(report: StepReport) -> RunStep:
        """The step that has just been reported."""
        names = [name for name in RunStep.__struct_fields__ if name != "time"]
        return RunStep(time=time.time(), **{name: getattr(report, name) for name in names})


class RunEnd(Struct, frozen=True, kw_only=True, tag_field="event", tag="end"):
    """The end of the run."""

    error: str | None
    """The error that ended it; None: it took all its steps."""
    stopped: bool = False
    """True if that was a signal, after which it saved a checkpoint."""


@contextmanager
def record(file: Path, *, plan: Path, done: int, steps: int, cores: int | None = None) -> Iterator[Show]:
    """Append a line for every step to the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as stream:
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)  # a run that was killed may have left part of a line

        def append(line: RunStart | RunStep | RunEnd) -> None:
            stream.write(encode(line) + b"\n")
            stream.flush()

        host = socket.gethostname()
        begun = RunStart(
            plan=str(plan.resolve()), done=done, steps=steps, process=os.getpid(), host=host, cores=cores
        )  # fmt: skip
        append(begun)
        try:
            yield lambda report: append(RunStep.of(report))
        except BaseException as error:
            append(RunEnd(error=str(error) or type(error).__name__, stopped=isinstance(error, StoppedError)))
            raise
        append(RunEnd(error=None))


def has_begun(run: Path) -> bool:
    """Tell whether there is the file of a record, or a folder of checkpoints that has one, with a line in it."""
    file = _file_of(run)
    return file.is_file() and file.stat().st_size > 0


def _file_of(run: Path) -> Path:
    return run / RECORD if run.is_dir() else run


class RunRecord:
    """The record as far as it is written; `read` reads on.

    Args:
        run: The file, or the folder of checkpoints that has it.

    Raises:
        InputError: There is no such file, or it is no record.
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
        """Read the lines that were added.  Returns the starts among them.  Raises InputError if one is none."""
        starts = []
        for line in self._lines():
            try:
                read = decode_json(line, RunStart | RunStep | RunEnd)  # type: ignore[arg-type]  # a union
            except DecodeError as error:
                raise InputError(f"{self.file} is not the record of a run of `debubble train`: {error}.") from error
            match read:
                case RunStart():
                    self.steps, self.end = [step for step in self.steps if step.step <= read.done], None
                    self.start = read
                    starts.append(read)
                case RunStep():
                    self.steps.append(read)
                case RunEnd():
                    self.end = read
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
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.splitlines()

    @property
    def state(self) -> str:
        """`running`, `ended` (with all its steps), `stopped` (by a signal), `failed`, or `died` (without a word)."""
        if self.end is not None:
            return "ended" if self.end.error is None else "stopped" if self.end.stopped else "failed"
        return "running" if self.start.host != socket.gethostname() or _lives(self.start.process) else "died"


def _lives(process: int) -> bool:
    """Tell whether there is a process of this number."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
