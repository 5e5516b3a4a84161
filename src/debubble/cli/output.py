"""Standard output: rich tables for people, or one JSON object; progress and everything else goes to standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from functools import wraps
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from debubble.formatting import ANSWER_VERSION, time_words

if TYPE_CHECKING:
    from rich.status import Status

    from debubble.planners.progress import Progress

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel="Output")
]


def console() -> Console:
    """The console of results that people read."""
    return Console(highlight=False)


def log() -> Console:
    """The console of progress and remarks."""
    return Console(stderr=True, highlight=False)


def figure_table(*columns: str, **style: Any) -> Table:
    """A table without lines: names in the first column, figures in the others."""
    table = Table(*columns, box=None, header_style="bold", **style)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def print_answer(**entries: Any) -> None:
    """Print one JSON object with the version of its keys, and nothing else."""
    print_json({"schema": ANSWER_VERSION, **entries})


def print_json(value: Any) -> None:
    """Print one JSON object, in which dataclasses are objects too, and nothing else."""
    json.dump(msgspec.to_builtins(value, enc_hook=_plain), sys.stdout, indent=1)
    sys.stdout.write("\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction | float):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


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
        self._best: tuple[float, object] | None = None

    def __call__(self, progress: Progress) -> None:
        """Show this state of the search; where output is piped, at most once a second.

        The best of an earlier part stays until a later one has a better.
        """
        if progress.step_time is not None and (self._best is None or progress.step_time < self._best[0]):
            self._best = progress.step_time, progress.best
        now = time.monotonic()
        if not self._terminal and now < self._next:
            return
        self._next = now + 1
        words = f"{progress.stage}: {progress.done} of {progress.total} {progress.counted}"
        if self._best is not None:
            words += f", best so far {time_words(self._best[0], seconds=self._seconds)} ({self._best[1]})"
        if self._terminal:
            self._status.update(words)
        else:
            log().print(words, soft_wrap=True)
