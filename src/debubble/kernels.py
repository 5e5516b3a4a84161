"""The compiler of kernels: numba, which keeps their machine code on disk.

Planners start several processes at once, and on a fresh machine each would compile the same kernels for most of a
minute.  A lock on a file next to a kernel's machine code lets one of them compile it; whoever needs the same kernel
waits, and loads what that one has written.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

C = TypeVar("C", bound=Callable[..., object])
Entry = TypeVar("Entry", bound=np.generic)


def jit(function: C, *, inline: Literal["never", "always"] = "never", counting: bool = True) -> C:
    """Compile the function when it is first called; without numba it stays as it is."""
    try:
        # Its import takes longer than a search that ends at its start.
        from numba import njit
    except ImportError:
        return function
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "inline": inline}
    # Nobody calls a kernel from C: the wrapper for that would be a seventh of the time that it takes to compile.
    options["no_cfunc_wrapper"] = True
    options["_nrt"] = counting
    kernel: Any = njit(**options)(function)
    _stamp(kernel)
    _compile_in_one_process(kernel)
    return cast("C", kernel)


def borrowing(function: C) -> C:
    """Compile a function that makes no arrays and returns none, without counting references to those of its caller.

    That took two fifths of the time of the order search.  It is compiled into no other: see `inlined`.
    """
    return jit(function, counting=False)


def inlined(function: C) -> C:
    """Compile the function into its callers: a short one, as handing over its arguments takes longer than what it does.

    So is a function that has one caller, since else both it and the caller with it in it are compiled.
    """
    return jit(function, inline="always")


def as_block(values: NDArray[Entry]) -> NDArray[Entry]:
    """An array of one dimension for kernels, which read it fast, and give it no negative index.

    It shares the memory of the array if that is contiguous.  Without the compiler it is the array.
    """
    try:
        # It loads the compiler.
        from debubble.blocks import Block
    except ImportError:
        return values
    return np.ascontiguousarray(values).view(Block)


COMPILING = 60.0
"""Seconds on the clock in which kernels are compiled at worst, once on a machine."""


def is_compiled(kernel: Any) -> bool:
    """Tell whether the machine code of a kernel is on the disk; without the compiler there is none to wait for."""
    cached = getattr(kernel, "_cache", None)
    try:
        return cached is None or bool(cached._cache_file._load_index())
    except (AttributeError, ImportError, OSError):
        return False


class _Lock:
    """A lock between processes on a file, which the operating system releases when its holder dies."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = -1
        self.held = False

    def acquire(self) -> None:
        """Wait until this process has the lock.  Where no file can be locked, every process compiles for itself."""
        self.held = True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError:
            pass

    def release(self) -> None:
        """Let other processes have the lock, if this one has it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self.held, self._descriptor = False, -1


@cache
def _announce() -> None:
    """Log once that this process compiles, because whoever waits does not know why."""
    logging.getLogger("debubble").info(
        "Compiling the search's kernels, which takes up to a minute and is done once on a machine ..."
    )


def _stamp(kernel: Any) -> None:
    """Let the machine code on the disk be that of the kernels and the constants that are compiled into this one, too.

    numba looks at the source of the kernel alone, and takes code with an older version of another's.  Kernels and
    constants that stand below it in its file are not known here: a kernel stands below those that it uses.
    """
    scope, names = kernel.py_func.__globals__, kernel.py_func.__code__.co_names
    used = {name: scope[name] for name in names if name in scope}
    file = kernel._cache._cache_file
    stamps = {kernel.py_func.__code__.co_filename: file._source_stamp}
    for value in used.values():
        stamps |= getattr(value, "source_stamps", {})
    constants = [(name, value) for name, value in used.items() if isinstance(value, bool | int | float | str | tuple)]
    kernel.source_stamps = stamps
    file._source_stamp = sorted(stamps.items()), repr(constants)


def _compile_in_one_process(kernel: Any) -> None:
    """Let the kernel hold its lock from when it is not found on the disk until it is compiled.

    The kernels that it calls are compiled meanwhile, with locks of their own; none calls one that calls it, so that no
    two processes wait for each other.
    """
    from numba.core.compiler_lock import global_compiler_lock

    cache, compile_kernel = kernel._cache, kernel.compile
    load = cache.load_overload
    lock = _Lock(Path(cache.cache_path) / f"{kernel.__module__}.{kernel.__qualname__}.lock")

    def load_or_forget(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except (AttributeError, ImportError):
            # The file names classes of another version of this package; numba reads it before it compares its stamp.
            cache.flush()
            return None

    def load_or_lock(signature: Any, context: Any) -> Any:
        found = load_or_forget(signature, context)
        if found is None and not lock.held:
            lock.acquire()
            found = load_or_forget(signature, context)
            if found is None:
                _announce()
        return found

    def compile_and_unlock(signature: Any) -> Any:
        with global_compiler_lock:
            outermost = not lock.held
            try:
                return compile_kernel(signature)
            finally:
                if outermost:
                    lock.release()

    cache.load_overload, kernel.compile = load_or_lock, compile_and_unlock
