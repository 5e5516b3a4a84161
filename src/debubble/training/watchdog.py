"""Watchdog: detects that a run hangs, and reports the rank it hangs in and what the other ranks wait for.

Every rank periodically publishes a heartbeat with its status.  A rank without progress for the timeout reads all
heartbeats, and ends the run with a report.
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
"""A phase that may exceed the timeout."""
START_TIMEOUT = 300
"""Minimum seconds that the data process may take to start."""
REQUEST_TIMEOUT = 10
"""Seconds that a rank with an end request waits for other ranks, which may have ended already."""
MAX_WAITING_SHOWN = 4
"""Maximum number of waiting ranks that an error names."""


class HangError(RunError):
    """A run made no progress for too long; the message names the hanging rank and what the others wait for."""


def watch(
    pipeline: Pipeline, *, timeout: float = 600, request_end: Callable[[signal.Signals], None] | None = None
) -> Watchdog:
    """Create the context of a training loop that ends this rank if the run hangs, or on SIGTERM.

    All ranks enter it on their main threads; torch.distributed must be initialized.

    Args:
        pipeline: The pipeline of this rank.
        timeout: Seconds without progress on any rank after which the run counts as hanging.
        request_end: Called on another thread on SIGTERM and SIGUSR1, instead of ending at once, so that the loop ends
            after its step.  Without debubble's launcher, which turns Ctrl-C into SIGTERM, also called on SIGINT.
    """
    launched = os.environ.get(LAUNCH_FOLDER)
    store = PrefixStore("watchdog", _get_default_store()) if launched is None else HeartbeatFolder(Path(launched))
    transport = pipeline.ranks.transport
    return Watchdog(
        pipeline.status, store=store, rank=transport.rank, ranks=transport.size, timeout=timeout, exit_rank=exit_rank,
        request_end=request_end, requests=END_SIGNALS if launched else (*END_SIGNALS, signal.SIGINT),
    )  # fmt: skip


class HeartbeatFolder:
    """Store of heartbeats in the launcher's folder on this machine, with the methods of torch's stores.

    It replaces torch's FileStore, whose file grows with every heartbeat.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def set(self, key: str, value: str) -> None:
        """Replace the heartbeat of a rank."""
        try:
            (self._folder / key / "next").write_text(value)
            (self._folder / key / "next").rename(self._folder / key / "heartbeat")
        except FileNotFoundError as error:
            raise RuntimeError("The launcher has ended.") from error

    def get(self, key: str) -> str:
        """Read an existing heartbeat."""
        return (self._folder / key / "heartbeat").read_text()

    def check(self, keys: list[str]) -> bool:
        """Tell whether heartbeats of all these ranks exist."""
        return all((self._folder / key / "heartbeat").exists() for key in keys)


class Heartbeat(NamedTuple):
    """The last published status of a rank."""

    number: int
    local: bool
    """True if it does not wait for another rank."""
    doing: str


class Watchdog(AbstractContextManager["Watchdog"]):
    """Context in which this rank's progress is watched; it is entered on the main thread.

    An error that leaves the context gets a note with the rank's status.

    Args:
        status: Status of this rank.
        store: Store shared by all ranks.
        rank: Index of this rank.
        ranks: Number of ranks.
        timeout: Seconds without progress after which the run counts as hanging.
        exit_rank: Ends this process because of an error.
        period: Seconds between heartbeats.
        request_end: As in `watch`.
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
        self._context.enter_context(signal_listener(self._handle_signal, END_SIGNAL, *self._requests))
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(str(self._status))
            report_failure(error)  # first, because the launcher may end this rank during cleanup
        self.stop()
        self._context.close()

    def start(self) -> None:
        """Start watching on a separate thread, without handling signals."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
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
            return  # the store's host is gone: the launcher ends or restarts this rank

    def _beat(self) -> None:
        self._count += 1
        self._store.set(str(self._rank), json.dumps([self._count, self._status.local, str(self._status)]))

    def _hang(self, since: float) -> HangError | None:
        """The error that names the hanging rank; None while a checkpoint is written, or at the end of the run.

        It is also None while a data process starts, for up to START_TIMEOUT seconds.
        """
        before = self._heartbeats()
        for _ in range(3):
            if self._end.wait(self._period):
                return None
            self._beat()
        beats = self._heartbeats()
        slow_phases = {SAVING_PHASE, STARTING_PHASE} if time.monotonic() - since < START_TIMEOUT else {SAVING_PHASE}
        if any(beat is not None and beat.doing in slow_phases and beat != before[r] for r, beat in beats.items()):
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

    def _handle_signal(self, received: signal.Signals) -> None:
        """Pass an end request on to the loop, or end the rank."""
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
