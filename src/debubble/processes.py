"""The command that starts debubble's own Python processes."""

from __future__ import annotations

import sys

PYTHON = (sys.executable, "-P")
"""This interpreter, without the current folder on the path: a user's `random.py` there is not the library's."""
