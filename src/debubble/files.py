"""Reading of users' files, atomic writing of files, and the user's cache folder."""

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
from debubble.parse_errors import reason_of, validation_words

S = TypeVar("S")
T = TypeVar("T")


def read_file(path: Path, kind: str) -> bytes:
    """Read a user's file; raises InputError if it cannot be read, with `kind` as the word for it."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"The {kind} {path} cannot be read: {error.strerror}.") from error


def parse(read: Callable[[S], T], content: S, refusal: str, *errors: type[Exception]) -> T:
    """Parse untrusted content with a library's function.

    Args:
        read: The function.
        content: Its argument.
        refusal: The beginning of the message if it cannot parse the content.
        errors: Exceptions that it raises for such content, besides ValueError.

    Raises:
        InputError: If it cannot parse the content.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, RecursionError, *errors)
    try:
        return read(content)
    except kinds as error:
        raise InputError(f"{refusal}: {reason_of(error)}.") from error


def decode_json(content: bytes, type_: type[T]) -> T:
    """Decode JSON to a type; raises msgspec.DecodeError in plain words, and nothing else, for other content."""
    prepare(type_)
    try:
        content.decode()
        return msgspec.json.decode(content, type=type_)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(reason_of(error)) from error
    except msgspec.DecodeError as error:
        raise type(error)(validation_words(str(error), content)) from error


def prepare(type_: Any) -> None:
    """Let msgspec look up the fields of a type, under a lock: it crashes if two threads do so at once (0.22)."""
    with _PREPARING:
        if type_ not in _PREPARED:
            msgspec.json.Decoder(type_)
            _PREPARED.add(type_)


_PREPARING = Lock()
_PREPARED: set[Any] = set()


def convert(entries: Any, type_: type[T], *, strict: bool = True) -> T:
    """Convert plain values to a type; raises msgspec.ValidationError in plain words if they do not fit."""
    prepare(type_)
    try:
        return msgspec.convert(entries, type_, strict=strict)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(validation_words(str(error))) from error


COMMANDS_FOR = {
    "plan": "`debubble show PLAN {0}` compares two plans",
    "trace": "`debubble show PLAN --trace {0}` and `debubble compare PLAN {0}` take it",
}
"""Kind of debubble's files -> advice if such a file is passed in place of another kind."""


def decode_versioned(content: bytes, type_: type[T], *, kind: str, name: str, version: int, advice: str) -> T:
    """Decode a plan or a trace file.

    Args:
        content: The file's content.
        type_: The type of the content.
        kind: `plan` or `trace`; the file has its version in the entry `debubble_KIND`.
        name: The file's name, with which errors begin.
        version: The supported version.
        advice: How to replace a file of another version, as the end of a sentence.

    Raises:
        InputError: If the file is of another kind or version, or truncated.
    """
    entry = f"debubble_{kind}"
    if not content.strip():
        raise InputError(f"{name} is empty: {advice}.")
    try:
        header = decode_json(content, dict[str, msgspec.Raw])
        file_version = decode_json(bytes(header.get(entry, b"null")), object)
        if file_version is None:
            other = next((k for k in COMMANDS_FOR if k != kind and f"debubble_{k}" in header), None)
            if other is not None:
                raise InputError(f"{name} is a {other}, not a {kind}: {COMMANDS_FOR[other].format(name)}.")
            raise InputError(f"{name} is not a debubble {kind}: it has no entry '{entry}'.")
        if file_version != version:
            raise InputError(
                f"{name} has {kind} version {file_version}; this debubble reads version {version}: {advice}."
            )
        return decode_json(content, type_)
    except msgspec.DecodeError as error:
        raise InputError(f"{name} is not a whole {kind} file: {error}.") from error


def check_writable(*files: Path | None, makes_folders: bool = False) -> None:
    """Check, before the work for them starts, that files can be written; None is skipped.

    Args:
        files: The files.
        makes_folders: Whether the writer creates missing folders.

    Raises:
        InputError: For the first file that is a folder, or whose folder is missing or not writable.
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
    """Raise InputError if a path is a folder, or another file that must not be replaced, such as /dev/null."""
    if file.exists() and not file.is_file():
        kind = "a folder" if file.is_dir() else "no ordinary file"
        raise InputError(f"{file} cannot be written: it is {kind}.")


def check_folder(folder: Path | None, option: str) -> None:
    """Raise InputError if the folder of an option is a file, or not writable; None is skipped."""
    if folder is None:
        return
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{option}: {folder} is a file, not a folder.")
    if not _takes_files(folder.absolute()):
        raise InputError(f"{option}: {folder} takes no new files.")


def _takes_files(folder: Path) -> bool:
    """Tell whether files can be written to a folder, or to its first existing parent."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        # Permissions do not cover read-only mounts, nor folders such as /proc.
        tempfile.TemporaryFile(dir=existing).close()
    except OSError:
        return False
    return True


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: under a temporary name in the same folder, then rename it.

    Raises InputError if it cannot be written.
    """
    _check_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        # Not mkstemp, whose files are private whatever the umask.
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
    """Write an indented JSON file atomically."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


def user_cache(name: str) -> Path:
    """The user's cache folder `name`: $XDG_CACHE_HOME/debubble/NAME, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "debubble" / name
