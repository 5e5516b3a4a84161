"""Handle of the search process: it runs at idle priority, never blocks training, and ends with it.

It has a dedicated core if training leaves one free.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from debubble.plans import Plan
from debubble.processes import PYTHON
from debubble.training.online.scheduler import PLAN, RESULT, BetterOrder, load_order


def spare_core(processes: int) -> int | None:
    """A core that this number of single-threaded processes leaves free; None if there is none."""
    if sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1] if len(cores) > processes else None


def leave_core(core: int) -> None:
    """Remove a core from the affinity of this process and of the threads that it starts later."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {core})


def run_at_idle_priority(process: int, core: int | None) -> None:
    """Set a new process to idle priority, and bind it to the core if one is given."""
    if sys.platform != "linux":
        os.setpriority(os.PRIO_PROCESS, process, 19)
        return
    os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    if core is not None:
        os.sched_setaffinity(process, {core})


class SearchProcess:
    """A process that searches a better order or partition for a plan.

    Args:
        plan: Initial plan of the search, with measured costs.
        steps_left: Remaining steps over which moving units must amortize; 0: units stay in their stages.
        effort: Effort of the search, in seconds of the reference machine.
        core: The core to bind the process to; None: any.
    """

    def __init__(self, plan: Plan, steps_left: int = 0, *, effort: float, core: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="debubble-search-")
        self.folder = Path(self._folder.name)
        """Folder of the files that the two processes exchange."""
        self._seen = 0
        plan.save(self.folder / PLAN)
        with (self.folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", "debubble.training.online.scheduler", self._folder.name, str(effort), str(steps_left)],
                stdin=subprocess.PIPE,  # closed when the parent ends, which ends the process
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is handled by the training process, which then ends this one
            )
        run_at_idle_priority(self._process.pid, core)

    @property
    def pid(self) -> int:
        """Process id of the search."""
        return self._process.pid

    def newest(self) -> BetterOrder | None:
        """The best result, if it is newer than at the last call."""
        try:
            written = (self.folder / RESULT).stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if written == self._seen:
            return None
        self._seen = written
        return load_order(self.folder / RESULT)

    def failure(self) -> str | None:
        """The reason if the process has failed; None while it runs, and after a regular end."""
        if not self._process.poll():
            return None
        errors = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        return errors[-1] if errors else f"exit code {self._process.returncode}"

    def wait(self) -> None:
        """Wait until the process has ended."""
        self._process.wait()

    def close(self) -> None:
        """Kill the process and remove its files."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._folder.cleanup()
