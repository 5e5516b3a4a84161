"""A thread that stays, for one thing after another."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event, Thread
from weakref import finalize

_Queue = SimpleQueue[tuple[Callable[[], None], Event] | None]


class LaneThread:
    """Does what it is given, in order; ends when nobody has it any more.

    It is a daemon: one that waits for a message that never comes does not keep the process from ending.
    """

    def __init__(self) -> None:
        self._queue: _Queue = SimpleQueue()
        Thread(target=_serve, args=(self._queue,), daemon=True).start()
        finalize(self, self._queue.put, None)

    def start(self, work: Callable[[], None]) -> Event:
        """Do the work, which raises nothing; the event is set when it is done."""
        done = Event()
        self._queue.put((work, done))
        return done


def _serve(queue: _Queue) -> None:
    while (given := queue.get()) is not None:
        work, done = given
        work()
        del given, work  # what it refers to is a step's
        done.set()
