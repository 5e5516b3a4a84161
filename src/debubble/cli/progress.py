"""Progress of a search of degrees, on standard error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from debubble.cli.output import log

if TYPE_CHECKING:
    from rich.status import Status

    from debubble.planners.degrees import Progress


class SearchProgress:
    """Shows how many configurations are done and the best so far: in the spinner, or a line a second where piped."""

    def __init__(self, status: Status) -> None:
        self._status = status
        self._terminal = log().is_terminal
        self._next = time.monotonic() + 1

    def __call__(self, progress: Progress) -> None:
        """Show this state of the search; where output is piped, at most once a second."""
        now = time.monotonic()
        if not self._terminal and now < self._next:
            return
        self._next = now + 1
        words = f"{progress.stage}: {progress.done} of {progress.total} configurations"
        if progress.best is not None:
            words += f", best so far {progress.step_time:.4g} s ({progress.best})"
        if self._terminal:
            self._status.update(words)
        else:
            log().print(words, soft_wrap=True)
