"""Progress of planning, on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from threading import Timer
from typing import TYPE_CHECKING, ParamSpec

from debubble.cli.output import log
from debubble.formatting import time_words

if TYPE_CHECKING:
    from rich.status import Status

    from debubble.planners.progress import Progress


PATIENCE = 2.0
"""Seconds after which a command says what it does."""

P = ParamSpec("P")


def with_delayed_message(doing: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Let a command that takes longer than two seconds say on standard error what it is doing."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def call(*arguments: P.args, **options: P.kwargs) -> None:
            timer = Timer(PATIENCE, lambda: log().print(f"{doing} ..."))
            timer.daemon = True
            timer.start()
            try:
                command(*arguments, **options)
            finally:
                timer.cancel()

        return call

    return decorate


class SearchProgress:
    """Shows how much is done and the best so far: in the spinner, or a line a second where piped.

    Args:
        status: The spinner.
        seconds: Whether times are seconds, and not abstract units.
    """

    def __init__(self, status: Status, *, seconds: bool = True) -> None:
        self._status = status
        self._seconds = seconds
        self._terminal = log().is_terminal
        self._next = time.monotonic() + 1

    def __call__(self, progress: Progress) -> None:
        """Show this state of the search; where output is piped, at most once a second."""
        now = time.monotonic()
        if not self._terminal and now < self._next:
            return
        self._next = now + 1
        words = f"{progress.stage}: {progress.done} of {progress.total} {progress.counted}"
        if progress.best is not None and progress.step_time is not None:
            words += f", best so far {time_words(progress.step_time, seconds=self._seconds)} ({progress.best})"
        if self._terminal:
            self._status.update(words)
        else:
            log().print(words, soft_wrap=True)
