"""Searches of the workbench: processes of `debubble plan`, each in its own folder."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.processes import PYTHON
from debubble.serve import cleaner

State = Literal["running", "done", "failed"]

MAX_SEARCHES = 2
"""Number of searches that may run at the same time; each uses all cores."""


@dataclass
class PlanSearch:
    """A search process and its log lines so far."""

    number: int
    folder: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        """Collect log lines until the process ends."""
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip())

    @property
    def state(self) -> State:
        """State of the search."""
        code = self.process.poll()
        return "running" if code is None else "done" if code == 0 else "failed"

    @property
    def error(self) -> str | None:
        """The error message of a failed search."""
        if self.state != "failed":
            return None
        self._reader.join()
        said = [line.partition(": ")[2] for line in self.lines if line.startswith(("debubble: ", "Error: "))]
        return said[-1] if said else "The search ended without an answer."

    @property
    def plan(self) -> Plan:
        """The resulting plan.  Raises InputError if there is none yet."""
        if self.state != "done":
            raise InputError("This search has no plan.")
        return Plan.load(self.folder / "plan.json")

    def stop(self) -> None:
        """Interrupt the search as Ctrl-C does: a search of degrees then returns its best plan so far."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        """Kill the process."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait until the process has ended."""
        self.process.wait()
        self._reader.join()


class Searches:
    """All searches of a workbench, which end with it even if it is killed."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="debubble-serve-")
        # A parent-death signal, which ranks use, would end searches with the request's thread that starts them.
        self._cleaner = subprocess.Popen(
            [*PYTHON, cleaner.__file__, self._folder.name], stdin=subprocess.PIPE, start_new_session=True
        )
        self._all: list[PlanSearch] = []
        self._lock = threading.Lock()

    def start(self, arguments: Sequence[str]) -> PlanSearch:
        """Start `debubble` with these arguments.  Raises InputError if too many searches run."""
        with self._lock:
            if sum(search.state == "running" for search in self._all) >= MAX_SEARCHES:
                raise InputError(f"{MAX_SEARCHES} searches run already: wait, or stop one.")
            number = len(self._all)
            folder = Path(self._folder.name) / str(number)
            folder.mkdir()
            command = [*PYTHON, "-m", "debubble", arguments[0], "--output=plan.json", *arguments[1:]]
            process = subprocess.Popen(
                command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, start_new_session=True,
            )  # fmt: skip
            search = PlanSearch(number, folder, process)
            self._all.append(search)
        return search

    def __getitem__(self, number: int) -> PlanSearch:
        """Return a search by number.  Raises InputError if there is none."""
        if not 0 <= number < len(self._all):
            raise InputError(f"There is no search {number}.")
        return self._all[number]

    def close(self) -> None:
        """Kill all searches and remove their files."""
        for search in self._all:
            search.end()
        self._folder.cleanup()
        self._cleaner.communicate()
