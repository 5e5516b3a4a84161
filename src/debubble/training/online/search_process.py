"""The search as the training sees it: a process that is never waited for, at idle priority, gone when the training is.

It has a core of its own where the training has one to spare.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from debubble.plans import Plan
from debubble.processes import PYTHON
from debubble.training.online.scheduler import FOUND, PLAN, BetterOrder, load_order


def spare_core(processes: int) -> int | None:
    """A core that so many processes of one thread can do without; None if there is none."""
    if sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1] if len(cores) > processes else None


def leave_core(core: int) -> None:
    """Leave a core to others: this process, with threads that it starts later, computes on all others from now on."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {core})


def run_at_idle_priority(process: int, core: int | None) -> None:
    """Give a process that has just begun only time that nobody else wants, on that core alone if there is one."""
    if sys.platform != "linux":
        os.setpriority(os.PRIO_PROCESS, process, 19)
        return
    os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    if core is not None:
        os.sched_setaffinity(process, {core})


class SearchProcess:
    """A process that searches a better order of a plan's operations, or a better partition of its units.

    Args:
        plan: Where the search starts; its costs are the measured ones.
        steps_left: Steps in which moving units has to pay; 0: units stay in their stages.
        effort: Work of the search, in seconds of the reference machine.
        core: The core that the process computes on; None: any.
    """

    def __init__(self, plan: Plan, steps_left: int = 0, *, effort: float, core: int | None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="debubble-search-")
        self.folder = Path(self._folder.name)
        """Folder of the files between the two processes."""
        self._seen = 0
        plan.save(self.folder / PLAN)
        with (self.folder / "errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [*PYTHON, "-m", "debubble.training.online.scheduler", self._folder.name, str(effort), str(steps_left)],
                stdin=subprocess.PIPE,  # its end tells the process that its parent is gone
                stdout=subprocess.DEVNULL,
                stderr=errors,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the training, which then ends this
            )
        run_at_idle_priority(self._process.pid, core)

    @property
    def pid(self) -> int:
        """Process id of the search."""
        return self._process.pid

    def newest(self) -> BetterOrder | None:
        """The best order found, if it is newer than at the last call."""
        try:
            written = (self.folder / FOUND).stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if written == self._seen:
            return None
        self._seen = written
        return load_order(self.folder / FOUND)

    def failure(self) -> str | None:
        """The reason why the process ended before its time; None while it runs, and if it has done its work."""
        if not self._process.poll():
            return None
        said = (self.folder / "errors").read_text(errors="replace").strip().splitlines()
        return said[-1] if said else f"exit code {self._process.returncode}"

    def wait(self) -> None:
        """Wait until the search is over."""
        self._process.wait()

    def close(self) -> None:
        """End the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._folder.cleanup()
