"""Output: results as tables or JSON on standard output; progress and remarks on standard error."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from fractions import Fraction
from functools import wraps
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from debubble.errors import InputError
from debubble.files import check_writable, write_whole
from debubble.formatting import ANSWER_VERSION, time_words, wrapped

if TYPE_CHECKING:
    from rich.status import Status

    from debubble.planners.progress import Improvement, Progress
    from debubble.plans import Plan

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object instead of tables.", rich_help_panel="Output")
]


def console() -> Console:
    """The console of results."""
    return Console(highlight=False)


def log() -> Console:
    """The console of progress and remarks."""
    return Console(stderr=True, highlight=False)


def warn_of_other_costs(plan: Plan) -> None:
    """Warn, on rank 0 only, if a plan's costs do not match its stages, as after edits."""
    from debubble.planners.analysis.remarks import OTHER_COSTS, has_other_costs

    if has_other_costs(plan) and os.environ.get("RANK", "0") == "0":
        log().print(OTHER_COSTS)


def print_wrapped(text: str, **style: Any) -> None:
    """Print sentences wrapped at the console's width, or at 80 characters if piped."""
    shown = console()
    shown.print(wrapped(text, shown.width), soft_wrap=True, markup=False, **style)


def figure_table(*columns: str, **style: Any) -> Table:
    """A borderless table with names in the first column and figures in the others."""
    table = Table(*columns, box=None, header_style="bold", **style)
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    return table


SUFFIXES = {".html", ".png", ".svg", ".pdf", ".jpg", ".jpeg", ".gif", ".webp"}
"""File suffixes of picture and page formats."""


def check_pictures(**files: Path | None) -> None:
    """Raise InputError for picture files, by format, that cannot be written or have another format's suffix."""
    check_writable(*files.values())
    for form, file in files.items():
        if file is not None and file.suffix.lower() in SUFFIXES - {f".{form}"}:
            raise InputError(
                f"--{form} {file}: that is no name of {form.upper()}; write {file.with_suffix(f'.{form}')}."
            )


def write_pictures(draw: Callable[[str], bytes], **files: Path | None) -> None:
    """Write the requested pictures, by format, and print their paths."""
    for form, path in files.items():
        if path is not None:
            write_whole(path, draw(form))
            log().print(f"Wrote {path}.")


def print_answer(**entries: Any) -> None:
    """Print one JSON object with its schema version."""
    print_json({"schema": ANSWER_VERSION, **entries})


def print_line(**entries: Any) -> None:
    """Print one JSON object with its schema version as a line of a stream."""
    print_json({"schema": ANSWER_VERSION, **entries}, indent=None)


def print_json(value: Any, *, indent: int | None = 1) -> None:
    """Print one JSON object; dataclasses become objects."""
    json.dump(msgspec.to_builtins(value, enc_hook=_plain), sys.stdout, indent=indent)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, Fraction | float):
        return float(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


MESSAGE_DELAY = 2.0
"""Delay of a command's message on what it does, in seconds."""

P = ParamSpec("P")


def with_delayed_message(doing: str) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a command to print what it does on standard error if it takes longer than two seconds."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @wraps(command)
        def call(*arguments: P.args, **options: P.kwargs) -> None:
            timer = Timer(MESSAGE_DELAY, lambda: log().print(f"{doing} ..."))
            timer.daemon = True
            timer.start()
            try:
                command(*arguments, **options)
            finally:
                timer.cancel()

        return call

    return decorate


PAUSE, LONG_PAUSE = 3.0, 30.0
"""Seconds between lines of piped progress: if the stage or the best plan has changed, and otherwise."""


class SearchProgress:
    """Shows a search's progress and best plan: in the spinner, or as occasional lines if piped.

    Args:
        status: The spinner.
        subject: The name of this search, if there are several.
        seconds: Whether times are in seconds; False: in abstract units.
        stream: Whether every better plan is printed as a JSON line on standard output.
    """

    def __init__(
        self, status: Status, *, subject: str | None = None, seconds: bool = True, stream: bool = False
    ) -> None:  # fmt: skip
        self._status = status
        self._prefix = "" if subject is None else f"{subject}: "
        self._seconds = seconds
        self._stream = stream
        self._terminal = log().is_terminal
        self._begin = self._printed = time.monotonic()
        self._best: tuple[float, str] | None = None
        self._stage, self._done = "", "Planning"
        self._shown: set[tuple[str, tuple[float, str] | None]] = set()

    def begin(self) -> None:
        """Show that the search begins."""
        if not self._terminal:
            log().print(f"{self._prefix}planning ...", soft_wrap=True)
        self._status.update(f"{self._prefix}planning ...")

    def __call__(self, news: Progress | Improvement) -> None:
        """Show this progress, or this plan if it is the fastest so far."""
        from debubble.planners.progress import Improvement

        if isinstance(news, Improvement):
            self._improve(news)
            return
        self._stage, self._done = news.stage, f"{news.stage}: {news.done} of {news.total} {news.counted}"
        if news.step_time is not None and (self._best is None or news.step_time < self._best[0]):
            self._best = news.step_time, str(news.best)
        self._show()

    def _improve(self, plan: Improvement) -> None:
        if self._best is not None and plan.step_time >= self._best[0]:
            return
        made = dict.fromkeys((plan.planner, plan.schedule))
        self._best = plan.step_time, f"{', '.join(made)}, gap {plan.gap:.1%}"
        if self._stream:
            seconds = round(time.monotonic() - self._begin, 2)
            print_line(event="plan", seconds=seconds, **asdict(plan))
        self._show()

    def _show(self) -> None:
        """Show the state; if piped, at most every few seconds."""
        words = f"{self._prefix}{self._done}"
        if self._best is not None:
            words += f", best so far {time_words(self._best[0], seconds=self._seconds)} ({self._best[1]})"
        if self._terminal:
            self._status.update(words)
            return
        now, news = time.monotonic(), (self._stage, self._best)
        if now - self._printed >= (LONG_PAUSE if news in self._shown else PAUSE):
            self._printed = now
            self._shown.add(news)
            log().print(words, soft_wrap=True)
