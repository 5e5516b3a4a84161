"""Notices that a run hangs, and says which rank it hangs in and what the others wait for.

Every rank writes where all can read it, again and again, what it is doing.  A rank in which nothing has begun or ended
for long reads what the others do, and ends the run with that.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from debubble.runtime.execution.status import RankStatus
from debubble.runtime.launch.failures import (
    LAUNCH_FOLDER,
    EndedError,
    RunError,
    exit_rank,
    report_failure,
    signal_listener,
)
from debubble.runtime.launch.launcher import END_SIGNAL
from debubble.runtime.pipeline import Pipeline
from debubble.training.data.datasets import STARTING_PHASE
from debubble.training.end_request import END_SIGNALS

SAVING_PHASE = "writes a checkpoint"
"""A phase that may take long."""
START_TIMEOUT = 300
"""Seconds that the process which reads data may take to start, at least."""
REQUEST_TIMEOUT = 10
"""Seconds in which a rank that is to end after its step may wait for others, which may have ended before it."""
MAX_WAITING_SHOWN = 4
"""Waiting ranks that an error names one by one."""


class HangError(RunError):
    """No operation has begun or ended for too long; the sentence says in which rank, and what the others wait for."""


def watch(
    pipeline: Pipeline, *, timeout: float = 600, request_end: Callable[[signal.Signals], None] | None = None
) -> Watchdog:
    """Make the context of a training loop in which a rank ends if the run hangs, or on SIGTERM.

    All ranks enter it, on their main threads; torch.distributed is initialised.

    Args:
        pipeline: This rank's.
        timeout: Seconds in which no operation begins or ends, on any rank, after which the run hangs.
        request_end: Called on SIGTERM and SIGUSR1, on another thread, in place of ending at once: the loop is to end
            after its step.  So it is on Ctrl-C where no launcher of debubble's passes that on as SIGTERM.
    """
    launched = os.environ.get(LAUNCH_FOLDER)
    store = PrefixStore("watchdog", _get_default_store()) if launched is None else HeartbeatFolder(Path(launched))
    transport = pipeline.ranks.transport
    return Watchdog(
        pipeline.status, store=store, rank=transport.rank, ranks=transport.size, timeout=timeout, exit_rank=exit_rank,
        request_end=request_end, requests=END_SIGNALS if launched else (*END_SIGNALS, signal.SIGINT),
    )  # fmt: skip


class HeartbeatFolder:
    """Heartbeats in the folder of a launcher on this machine: torch's store in a file would grow with each of them.

    Its methods are those of torch's stores.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Put a heartbeat in the place of the one before it."""
        try:
            (self._folder / key / "next").write_text(value)
            (self._folder / key / "next").rename(self._folder / key / "heartbeat")
        except FileNotFoundError as error:
            raise RuntimeError("The launcher has ended.") from error

    def get(self, key: str) -> str:
        """A heartbeat that is there."""
        return (self._folder / key / "heartbeat").read_text()

    def check(self, keys: list[str]) -> bool:
        """Tell whether all of these are there."""
        return all((self._folder / key / "heartbeat").exists() for key in keys)


class Heartbeat(NamedTuple):
    """A rank's last word of itself."""

    number: int
    local: bool
    """True if it waits for no other rank."""
    doing: str


class Watchdog(AbstractContextManager["Watchdog"]):
    """Watches a run's ranks while it is entered, by the main thread.

    What the rank was doing is added as a note to an error that passes through.

    Args:
        status: Status of this rank.
        store: Shared by all ranks.
        rank: This rank.
        ranks: Their number.
        timeout: Seconds without progress after which the run hangs.
        exit_rank: Ends this process because of an error.
        period: Seconds between heartbeats.
        request_end: As `watch` has it.
    """

    def __init__(
        self,
        status: RankStatus,
        *,
        store: Store | HeartbeatFolder,
        rank: int,
        ranks: int,
        timeout: float,
        exit_rank: Callable[[BaseException], None],
        period: float = 1.0,
        request_end: Callable[[signal.Signals], None] | None = None,
        requests: Sequence[signal.Signals] = END_SIGNALS,
    ) -> None:
        self._status, self._rank, self._ranks = status, rank, ranks
        self._store, self._timeout, self._exit_rank, self._period = store, timeout, exit_rank, period
        self._request_end, self._requests = request_end, (signal.SIGTERM,) if request_end is None else requests
        self._requested: signal.Signals | None = None
        self._end, self._count = Event(), 0
        self._context = ExitStack()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self._context.enter_context(signal_listener(self._act, END_SIGNAL, *self._requests))
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(str(self._status))
            report_failure(error)  # the launcher may end this rank on its way out
        self.stop()
        self._context.close()

    def start(self) -> None:
        """Watch on a thread of its own, without listening to signals."""
        self._thread.start()

    def stop(self) -> None:
        """Watch no longer."""
        self._end.set()
        self._thread.join()

    def _watch(self) -> None:
        progress, since = -1, time.monotonic()
        try:
            while not self._end.wait(self._period):
                self._beat()
                if self._status.progress != progress:
                    progress, since = self._status.progress, time.monotonic()
                elif self._requested and not self._status.local and time.monotonic() - since > REQUEST_TIMEOUT:
                    self._end_rank(self._requested)
                elif time.monotonic() - since > self._timeout and (error := self._hang(since)) is not None:
                    self._exit_rank(error)
        except RuntimeError:
            return  # the store's host is gone: the launcher ends this rank, or starts it anew

    def _beat(self) -> None:
        self._count += 1
        self._store.set(str(self._rank), json.dumps([self._count, self._status.local, str(self._status)]))

    def _hang(self, since: float) -> HangError | None:
        """An error that names the rank in which the run hangs; None while a checkpoint is written, or at the end.

        Nor does it hang while a process to read data starts, unless nothing has moved since very long.
        """
        before = self._heartbeats()
        for _ in range(3):
            if self._end.wait(self._period):
                return None
            self._beat()
        beats = self._heartbeats()
        patient = {SAVING_PHASE, STARTING_PHASE} if time.monotonic() - since < START_TIMEOUT else {SAVING_PHASE}
        if any(beat is not None and beat.doing in patient and beat != before[r] for r, beat in beats.items()):
            return None
        silent = [f"rank {r} does not answer{_heartbeat_words(beat)}" for r, beat in beats.items() if beat == before[r]]
        answering = {r: beat for r, beat in beats.items() if beat is not None and beat != before[r]}
        delayed = [f"rank {r} {beat.doing} and does not end" for r, beat in answering.items() if beat.local]
        waiting = [f"rank {r} {beat.doing}" for r, beat in answering.items() if not beat.local]
        rest = [f"{len(waiting) - MAX_WAITING_SHOWN} more ranks wait"] if len(waiting) > MAX_WAITING_SHOWN else []
        findings = "; ".join([*silent, *delayed, *waiting[:MAX_WAITING_SHOWN], *rest])
        return HangError(f"The run hangs, nothing has moved for {self._timeout:g} s: {findings}.")

    def _heartbeats(self) -> dict[int, Heartbeat | None]:
        return {
            rank: Heartbeat(*json.loads(self._store.get(str(rank)))) if self._store.check([str(rank)]) else None
            for rank in range(self._ranks)
        }

    def _act(self, received: signal.Signals) -> None:
        """Pass a request on to the loop, or end the rank."""
        if self._request_end is None or received == END_SIGNAL:
            self._end_rank(received)
        else:
            self._request_end(received)
            self._requested = received

    def _end_rank(self, received: signal.Signals) -> None:
        error = EndedError(received)
        error.add_note(str(self._status))
        self._exit_rank(error)


def _heartbeat_words(beat: Heartbeat | None) -> str:
    return "" if beat is None else f" (it was last seen when it {beat.doing})"
