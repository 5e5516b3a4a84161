"""The command that starts debubble's own Python processes, and the cores that each of them has."""

from __future__ import annotations

import os
import sys

PYTHON = (sys.executable, "-P")
"""This interpreter, without the current folder on the path: a user's `random.py` there is not the library's."""


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Cores for each rank of this machine."""
    return max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
