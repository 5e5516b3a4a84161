"""Reading a user's file, writing one whole or not at all, and where the user's caches are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TypeVar

import msgspec

from debubble.errors import InputError

T = TypeVar("T")


def read_file(path: Path, what: str) -> bytes:
    """Read a file that a user named; raises InputError, which calls it `what`, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The {what} {path} cannot be read: {error.strerror}.") from error


def decode_json(content: bytes, type_: type[T]) -> T:
    """Decode JSON of that type; raises msgspec.DecodeError for all other content, whatever it is."""
    try:
        return msgspec.json.decode(content, type=type_)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("it is not UTF-8") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before work is done for it.

    Raises:
        InputError: If it is a folder, or its folder takes no files.
    """
    if path.is_dir():
        raise InputError(f"{path} cannot be written: it is a folder.")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: {folder} takes no new files.")


def write_whole(path: Path, content: bytes) -> None:
    """Write the file beside its place and rename it, so that it is never half there.

    Raises InputError if it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    except BaseException:
        os.unlink(temporary)
        raise


def user_cache(name: str) -> Path:
    """The user's cache folder of that name: $XDG_CACHE_HOME/debubble/NAME, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "debubble" / name
