"""The call that this process answers, as plans record it."""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime

from debubble import __version__
from debubble.ir import Origin


def this_call() -> Origin:
    """The command line, the time and the version."""
    return Origin(
        command=shlex.join(["debubble", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        version=__version__,
    )
