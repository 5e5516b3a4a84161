"""Progress events of planning, for a listener."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from debubble.ir.degrees import Degrees


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of planning.

    Attributes:
        stage: `Ruling out by memory`, `Ranking` (`with hosts`, `larger micro-batches`), `Planning the best`, or
            `Planning`.
        done: Number of finished items; choices of degrees that are pruned count as done.
        total: Number of all items.
        counted: The items: `configurations` of degrees, or `planners`.
        best: The fastest so far: degrees, or the planner that found it.
        step_time: Step of the best so far, in the costs' unit.
    """

    stage: str
    done: int
    total: int
    counted: str = "configurations"
    best: Degrees | str | None
    step_time: float | None


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A complete plan that fits, faster than those before it.

    Attributes:
        planner: The planner that found it.
        schedule: The name of its schedule.
        step_time: Time of a step, in the costs' unit.
        gap: Upper limit on the fraction of that time that a better plan could save.
    """

    planner: str
    schedule: str
    step_time: float
    gap: float


Listener = Callable[[Progress | Improvement], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def progress_listener(listener: Listener | None) -> Iterator[None]:
    """Call the listener for every `tell` in this context."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@contextmanager
def changing_events(change: Callable[[Progress | Improvement], Progress | Improvement]) -> Iterator[None]:
    """Pass events in this context through `change` before they reach the listener."""
    listener = _listener.get()
    with progress_listener(None if listener is None else lambda event: listener(change(event))):
        yield


def tell(progress: Progress | Improvement) -> None:
    """Pass an event to the listener, if there is one."""
    listener = _listener.get()
    if listener is not None:
        listener(progress)
