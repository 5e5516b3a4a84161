"""Reading a user's file, writing one whole or not at all, and where the user's caches are."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import msgspec

from debubble.errors import InputError

S = TypeVar("S")
T = TypeVar("T")


def read_file(path: Path, what: str) -> bytes:
    """Read a file that a user named; raises InputError, which calls it `what`, if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The {what} {path} cannot be read: {error.strerror}.") from error


def parse(read: Callable[[S], T], content: S, refusal: str, *errors: type[Exception]) -> T:
    """Parse content of unknown origin with a library's function.

    Args:
        read: The function.
        content: What it reads.
        refusal: The beginning of the sentence on content that it cannot read.
        errors: What it raises for such content, besides ValueError.

    Raises:
        InputError: It cannot read it.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, *errors)
    try:
        return read(content)
    except RecursionError as error:
        raise InputError(f"{refusal}: it is nested too deeply.") from error
    except kinds as error:
        raise InputError(f"{refusal}: {str(error).splitlines()[0].rstrip('.')}.") from error


def decode_json(content: bytes, type_: type[T]) -> T:
    """Decode JSON of that type; raises msgspec.DecodeError for all other content, whatever it is."""
    prepare(type_)
    try:
        content.decode()
        return msgspec.json.decode(content, type=type_)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError("it is not a text file") from error
    except RecursionError as error:
        raise msgspec.DecodeError("it is nested too deeply") from error


def prepare(type_: Any) -> None:
    """Have msgspec look up the fields of a type, which crashes where two threads do it at once (0.22)."""
    with _PREPARING:
        if type_ not in _PREPARED:
            msgspec.json.Decoder(type_)
            _PREPARED.add(type_)


_PREPARING = Lock()
_PREPARED: set[Any] = set()


def convert(entries: Any, type_: type[T], *, strict: bool = True) -> T:
    """Convert plain values to that type; raises msgspec.ValidationError for others."""
    prepare(type_)
    return msgspec.convert(entries, type_, strict=strict)


TAKEN_BY = {
    "plan": "`debubble show PLAN {0}` compares two plans",
    "trace": "`debubble show PLAN --trace {0}` and `debubble compare PLAN {0}` take it",
}
"""The kinds of debubble's own files, and what takes each where another kind is asked for."""


def decode_versioned(content: bytes, type_: type[T], *, what: str, name: str, version: int, again: str) -> T:
    """Decode a file of debubble's own: a plan, or a trace.

    Args:
        content: The file's.
        type_: The type of its content.
        what: The word for it; its version stands in the entry `debubble_WHAT`.
        name: The file's name, with which errors begin.
        version: The version that is read.
        again: How another version's is made again, as the end of a sentence.

    Raises:
        InputError: If it is no such file, cut short, or of another version.
    """
    entry = f"debubble_{what}"
    if not content.strip():
        raise InputError(f"{name} is empty: {again}.")
    try:
        header = decode_json(content, dict[str, msgspec.Raw])
        found = msgspec.json.decode(header.get(entry, b"null"), type=int | None)
        if found is None:
            other = next((kind for kind in TAKEN_BY if kind != what and f"debubble_{kind}" in header), None)
            if other is not None:
                raise InputError(f"{name} is a {other}, not a {what}: {TAKEN_BY[other].format(name)}.")
            raise InputError(f"{name} is not a debubble {what}: it has no entry '{entry}'.")
        if found != version:
            raise InputError(f"{name} has {what} version {found}; this debubble reads version {version}: {again}.")
        return decode_json(content, type_)
    except msgspec.DecodeError as error:
        raise InputError(f"{name} is not a whole {what} file: {error}.") from error


def check_writable(*files: Path | None, makes_folders: bool = False) -> None:
    """Refuse files that could not be written, before work is done for them; None is no file.

    Args:
        files: The files.
        makes_folders: Whether folders that are missing are made, as a run makes its own.

    Raises:
        InputError: With the first that is a folder, or whose folder is missing or takes no files.
    """
    for file in files:
        if file is not None:
            _check_replaceable(file)
            folder = file.absolute().parent
            if not makes_folders and not folder.exists():
                raise InputError(f"{file} cannot be written: there is no folder {folder}; make it first.")
            if not _takes_files(folder):
                raise InputError(f"{file} cannot be written: {folder} takes no new files.")


def _check_replaceable(file: Path) -> None:
    """Refuse to put a file in the place of a folder, or of something like /dev/null; raises InputError."""
    if file.exists() and not file.is_file():
        kind = "a folder" if file.is_dir() else "no ordinary file"
        raise InputError(f"{file} cannot be written: it is {kind}.")


def check_folder(folder: Path | None, option: str) -> None:
    """Refuse a folder, given with this option, in which no files could be written; None is no folder.

    Raises:
        InputError: If it is a file, or takes no files.
    """
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{option}: {folder} is a file, not a folder.")
    if not _takes_files(folder.absolute()):
        raise InputError(f"{option}: {folder} takes no new files.")


def _takes_files(folder: Path) -> bool:
    """Tell whether files can be written to a folder, which may have to be made."""
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    try:
        # Permissions alone do not tell of read-only mounts, nor of folders such as /proc.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError:
        return False
    return True


def write_whole(path: Path, content: bytes) -> None:
    """Write the file next to its place and rename it, so that it is never half there.

    Raises InputError if it cannot be written there.
    """
    _check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        # Not mkstemp, whose files are the user's alone whatever the umask says.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        os.unlink(temporary)
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, content: object) -> None:
    """Write a JSON file with indents, whole or not at all, as `write_whole` does."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def user_cache(name: str) -> Path:
    """The user's cache folder of that name: $XDG_CACHE_HOME/debubble/NAME, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "debubble" / name
