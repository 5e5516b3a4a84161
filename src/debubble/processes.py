"""Starts debubble's own Python processes, and says which cores each of them has.

Run as a script, `python processes.py PARENT MODULE ARGUMENT...`, this file runs a module that ends with its parent.  It
imports nothing but the standard library, so that the first thing such a process does is to ask for that.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import runpy
import signal
import sys

PYTHON = (sys.executable, "-P")
"""This interpreter, without the current folder on the path: a user's `random.py` there is not the library's."""

_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): the signal that a process gets when its parent ends."""


def child_command(module: str, *arguments: str) -> list[str]:
    """The command of a process that runs a module and ends with the thread that starts it, however that ends."""
    return [*PYTHON, __file__, str(os.getpid()), module, *arguments]


def end_with_parent(parent: int | None = None) -> None:
    """Let the system end this process when the thread that has started it ends (on Linux).

    Args:
        parent: The process that has started this one, which ends at once if that is gone; None: whichever it is now.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != expected:  # it ended before the system was asked
        os._exit(1)


def is_stopped(process: int) -> bool:
    """Tell whether a signal has stopped a process of this machine, which SIGCONT continues (on Linux)."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or the system is another one
        return False


GC_THRESHOLD = 100_000
"""New objects between two looks of the garbage collector in a process that plans."""


def raise_gc_threshold() -> None:
    """Let the garbage collector look at more new objects at a time than Python's 700, and at none when this ends.

    Orders are many small tuples, which are in no cycle: to look for cycles among them took up to a quarter of the time.
    """
    gc.set_threshold(GC_THRESHOLD)
    atexit.register(gc.freeze)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Cores for each rank of this machine."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
