"""Processes that tests watch, whether children or not."""

import os
import select
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def wait_for_end(processes: Iterable[int]) -> None:
    """Wait without computing until none of them runs."""
    for process in processes:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(process)
            select.select([handle], [], [])
            os.close(handle)


def children(process: int) -> list[int]:
    """Children of a process in the order in which its threads started them; none if it is gone."""
    with suppress(FileNotFoundError):
        threads = Path(f"/proc/{process}/task").iterdir()
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    return []
