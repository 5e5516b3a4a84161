"""A lock on the folders that a run writes, which excludes concurrent runs.

The operating system releases the lock when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from debubble.ir import InputError

LOCK = ".lock"
"""Name of the locked file; it contains the lock's owner."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder, which is created if it does not exist.

    On a file system without locks it has no effect.  Raises InputError if another run holds the lock.
    """
    file = folder / LOCK
    handle = _take(file)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                file.unlink()
            os.close(handle)


def _take(file: Path) -> int | None:
    """Open and lock the file; None if its file system has no locks."""
    while True:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise InputError(f"{file.parent} cannot be written: {error.strerror}.") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(file) and os.path.samestat(os.fstat(handle), os.stat(file)):
                with suppress(OSError):  # such as a full disk: the lock is valid without the owner's name
                    os.ftruncate(handle, 0)
                    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except BlockingIOError:
            holder = os.pread(handle, 200, 0).decode(errors="replace") or "a process that does not say its number"
            os.close(handle)
            raise InputError(
                f"Another run, {holder}, writes to {file.parent}: wait for its end, or give another folder."
            ) from None
        except OSError:
            os.close(handle)
            return None
        os.close(handle)  # the previous owner has just removed the file
