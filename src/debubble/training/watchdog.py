"""Notices that a run hangs, and says which rank it hangs in and what the others wait for.

Every rank tells a store, again and again, what it is doing.  A rank in which nothing has begun or ended for long asks
the store what the others do, and ends the run with that.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from threading import Event, Thread
from types import TracebackType
from typing import NamedTuple

from torch.distributed.distributed_c10d import Store

from debubble.runtime.execution.status import Activity
from debubble.runtime.failures import EndedError, RunError, heard_while_waiting, leave_word

SAVING = "writes a checkpoint"
"""A phase that may take long."""
SHOWN = 4
"""Waiting ranks that an error names one by one."""


class HangError(RunError):
    """No operation has begun or ended for too long; the sentence says in which rank, and what the others wait for."""


class Beat(NamedTuple):
    """What a rank tells of itself."""

    number: int
    own: bool
    """Whether it waits for no other rank."""
    doing: str


class Watchdog(AbstractContextManager["Watchdog"]):
    """Watches a run's ranks while it is entered; `leave` ends this process because of an error.

    Entered by the main thread.  An error that passes through is noted what the rank was doing.
    """

    def __init__(
        self,
        activity: Activity,
        *,
        store: Store,
        rank: int,
        ranks: int,
        patience: float,
        leave: Callable[[BaseException], None],
        period: float = 1.0,
    ) -> None:
        self._activity, self._rank, self._ranks = activity, rank, ranks
        self._store, self._patience, self._leave, self._period = store, patience, leave, period
        self._end, self._count = Event(), 0
        self._context = ExitStack()
        self._thread = Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watchdog:
        self._context.enter_context(heard_while_waiting(self._ended, signal.SIGTERM))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            error.add_note(str(self._activity))
            leave_word(error)  # the launcher may end this rank on its way out
        self._end.set()
        self._thread.join()
        self._context.close()

    def _watch(self) -> None:
        moved, since = -1, time.monotonic()
        try:
            while not self._end.wait(self._period):
                self._tell()
                if self._activity.moved != moved:
                    moved, since = self._activity.moved, time.monotonic()
                elif time.monotonic() - since > self._patience and (error := self._hang()) is not None:
                    self._leave(error)
        except RuntimeError:
            return  # the store's host is gone: the launcher ends this rank, or starts it anew

    def _tell(self) -> None:
        self._count += 1
        self._store.set(str(self._rank), json.dumps([self._count, self._activity.own, str(self._activity)]))

    def _hang(self) -> HangError | None:
        """What holds the run up, unless a checkpoint is being written or this rank is at an end."""
        before = self._beats()
        for _ in range(3):
            if self._end.wait(self._period):
                return None
            self._tell()
        beats = self._beats()
        if any(beat is not None and beat.doing == SAVING and beat != before[r] for r, beat in beats.items()):
            return None
        silent = [f"rank {r} does not answer{_last_seen(beat)}" for r, beat in beats.items() if beat == before[r]]
        heard = {r: beat for r, beat in beats.items() if beat is not None and beat != before[r]}
        held_up = [f"rank {r} {beat.doing} and does not end" for r, beat in heard.items() if beat.own]
        waiting = [f"rank {r} {beat.doing}" for r, beat in heard.items() if not beat.own]
        rest = [f"{len(waiting) - SHOWN} more ranks wait"] if len(waiting) > SHOWN else []
        told = "; ".join([*silent, *held_up, *waiting[:SHOWN], *rest])
        return HangError(f"The run hangs, nothing has moved for {self._patience:g} s: {told}.")

    def _beats(self) -> dict[int, Beat | None]:
        return {rank: self._beat(rank) for rank in range(self._ranks)}

    def _beat(self, rank: int) -> Beat | None:
        if not self._store.check([str(rank)]):
            return None
        return Beat(*json.loads(self._store.get(str(rank))))

    def _ended(self, heard: signal.Signals) -> None:
        error = EndedError(f"The rank was ended by {heard.name}.")
        error.add_note(str(self._activity))
        self._leave(error)


def _last_seen(beat: Beat | None) -> str:
    return "" if beat is None else f" (it was last seen when it {beat.doing})"
