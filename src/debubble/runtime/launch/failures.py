"""Errors of a rank, and the exit of a failing rank: immediate, with its reason for the launcher and the user.

It does not join its threads, as those that wait for dead peers would never end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, get_ident
from types import FrameType
from typing import Any, NoReturn

import torch

from debubble.errors import StoppedError
from debubble.ir import DebubbleError, Instruction


class DeviceMemoryError(DebubbleError):
    """torch could not allocate memory for an operation of the plan."""

    def __init__(self, instruction: Instruction, cause: BaseException) -> None:
        op = instruction.op
        self.operation, self.device = op.name, instruction.device
        asked = str(cause).strip().split("\n")[0]
        super().__init__(
            f"Device {instruction.device} ran out of memory at {op.name}, micro-batch {op.micro_batch}: {asked}"
        )


class MoveMemoryError(DebubbleError):
    """A device has not enough memory for units that move to it next to its own."""

    def __init__(self, device: int, cause: BaseException) -> None:
        asked = str(cause).strip().split("\n")[0]
        super().__init__(
            f"Device {device} ran out of memory while units moved to it, next to those that it had: train without"
            f" --online, or continue from a checkpoint by the other plan. {asked}"
        )


class UserCodeError(DebubbleError):
    """User code raised; the message names the exception, `traceback` says where."""

    def __init__(self, sentence: str, traceback: str) -> None:
        super().__init__(sentence)
        self.traceback = traceback

    @staticmethod
    def from_error(error: Exception, failure: str) -> UserCodeError:
        """The error that reports `failure`, a sentence without period, because `error` was raised."""
        raised = " ".join("".join(traceback.format_exception_only(error)).split()).rstrip(".")
        return UserCodeError(f"{failure}: {raised}.", "".join(traceback.format_exception(error)))

    def __reduce__(self) -> tuple[type[UserCodeError], tuple[str, str]]:
        return type(self), (str(self), self.traceback)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether torch's allocator for the GPU or the CPU raised this error."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


@contextmanager
def explained_shortage(explain: Callable[[BaseException], DebubbleError]) -> Iterator[None]:
    """Context that replaces an allocator's error by the one that `explain` makes."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise explain(error) from error
        raise


LAUNCH_FOLDER = "DEBUBBLE_LAUNCH_FOLDER"
"""Environment variable of ranks started by debubble's launcher: its folder, which only the user can open.

It has the ranks' rendezvous file, heartbeats, and failure reports, which the launcher reads.
"""


class RunError(DebubbleError):
    """An error of the run, not of the rank that raises it."""


class StoppedRunError(RunError, StoppedError):
    """A signal has stopped the run on all ranks."""


class EndedError(DebubbleError):
    """A signal has ended this rank: the launcher's, because another rank failed, or another process's."""

    def __init__(self, received: signal.Signals) -> None:
        self.received = received
        super().__init__(f"The rank was ended by {received.name}.")


def exit_rank(error: BaseException) -> NoReturn:
    """Exit this process because of the error, and report it to the launcher or the user."""
    details = report_failure(error)
    if LAUNCH_FOLDER not in os.environ:
        rank = os.environ.get("RANK", "0")
        while_doing = f" (It {details['doing']}.)" if details["doing"] and not details["of_run"] else ""
        sys.stderr.write(f"{details['py_callstack']}debubble: rank {rank}: {details['text']}{while_doing}\n")
        sys.stderr.flush()
    os._exit(error.exit_code if isinstance(error, DebubbleError) else 1)


def report_failure(error: BaseException) -> dict[str, Any]:
    """Write the error to torchrun's error file, unless this rank has written one, and return its details.

    Called before the rank's connections close, so that its report is older than those of the peers that fail in
    consequence, and exists even if the launcher kills this rank.  Notes of the error say what the rank was doing.
    """
    details = {
        "text": str(error) if isinstance(error, DebubbleError) else f"{type(error).__name__}: {error}",
        "timestamp": str(int(time.time())),
        "moment": time.monotonic(),
        "py_callstack": _traceback(error),
        "doing": "; ".join(getattr(error, "__notes__", ())),
        "ended_by": error.received.name if isinstance(error, EndedError) else "",
        "of_run": isinstance(error, RunError),
    }
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        written = file.with_name(f"{file.name}.{get_ident()}")
        written.write_text(json.dumps({"message": {"message": details["text"], "extraInfo": details}}))
        with suppress(FileExistsError):
            os.link(written, file)  # atomic, and keeps an existing file
        written.unlink()
    return details


def _traceback(error: BaseException) -> str:
    """The traceback that the user needs besides the message."""
    if isinstance(error, UserCodeError):
        return error.traceback
    return "" if isinstance(error, DebubbleError) else "".join(traceback.format_exception(error))


@contextmanager
def signal_listener(act: Callable[[signal.Signals], None], *signals: signal.Signals) -> Iterator[None]:
    """Context in which a thread handles these signals, even while the main thread is blocked in a library."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)

    def listen() -> None:
        for number in iter(lambda: os.read(reads, 1), _END):
            if (heard := signal.Signals(number[0])) in signals:
                act(heard)

    def nothing(number: int, frame: FrameType | None) -> None: ...

    before = {number: signal.signal(number, nothing) for number in signals}
    previous = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    listener = Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.write(writes, _END)
        listener.join()
        os.close(writes)
        os.close(reads)


_END = b"\0"
"""Ends the listener; no signal has this number."""
