"""Where the search computes: behind everything else, and on a core of its own where the training has one to spare."""

from __future__ import annotations

import os
import sys


def spare_core(processes: int) -> int | None:
    """A core that so many processes of one thread can do without; None if there is none."""
    if sys.platform != "linux":
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1] if len(cores) > processes else None


def leave(core: int) -> None:
    """Compute on other cores than this from now on; threads that are started later do too."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {core})


def step_back(process: int, core: int | None) -> None:
    """Let a process that has just begun have only time that nobody else wants, on that core alone if there is one."""
    if sys.platform != "linux":
        os.setpriority(os.PRIO_PROCESS, process, 19)
        return
    os.sched_setscheduler(process, os.SCHED_IDLE, os.sched_param(0))
    if core is not None:
        os.sched_setaffinity(process, {core})
