"""A script that kills a workbench's searches and removes its folder, its argument, once the workbench has ended.

It uses only the standard library, and waits for the end of its standard input, which the workbench keeps open.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processes_in(folder: Path) -> Iterator[int]:
    """The processes whose working directory is below a folder (Linux only)."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder in Path(os.readlink(entry / "cwd")).parents:
                yield int(entry.name)


def main(folder: Path) -> None:
    """Wait for the workbench to end, then kill its searches and remove its folder."""
    sys.stdin.buffer.read()
    while processes := list(processes_in(folder)):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
