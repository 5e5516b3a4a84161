"""Writing a file whole or not at all, and where the user's caches are."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from debubble.ir.errors import InputError


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
