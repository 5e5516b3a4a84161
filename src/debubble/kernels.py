"""Compiles kernels with numba, which caches their machine code on disk.

Planners start several processes at once, and on a fresh machine each would compile the same kernels for most of a
minute.  With a lock file next to a kernel's machine code one process compiles it, and the others wait and load it.
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


def jit(function: C, *, inline: Literal["never", "always"] = "never", count_references: bool = True) -> C:
    """Compile the function when it is first called; without numba it is returned unchanged."""
    try:
        # This import takes longer than a search that ends at its start.
        from numba import njit
    except ImportError:
        return function
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "inline": inline}
    # Kernels are not called from C; compiling the wrapper for that would take a seventh of the compile time.
    options["no_cfunc_wrapper"] = True
    options["_nrt"] = count_references
    kernel: Any = njit(**options)(function)
    _stamp(kernel)
    _compile_in_one_process(kernel)
    return cast("C", kernel)


def jit_without_refcounts(function: C) -> C:
    """Compile a function that neither creates nor returns arrays, without counting references to its arguments.

    Counting took two fifths of the time of the order search.
    """
    return jit(function, count_references=False)


def inlined(function: C) -> C:
    """Compile the function into its callers, if passing its arguments takes longer than its work.

    Functions with one caller are inlined too; otherwise the compiler would compile them twice.
    """
    return jit(function, inline="always")


def as_block(values: NDArray[Entry]) -> NDArray[Entry]:
    """A one-dimensional array that kernels access fast, because they assume that indices are not negative.

    It shares the memory of the array if that is contiguous.  Without the compiler the array itself is returned.
    """
    try:
        # This loads the compiler.
        from debubble.blocks import Block
    except ImportError:
        return values
    return np.ascontiguousarray(values).view(Block)


MAX_COMPILE_SECONDS = 60.0
"""Upper limit on the wall-clock seconds to compile the kernels, once per machine."""


def is_compiled(kernel: Any) -> bool:
    """Tell whether the machine code of a kernel is cached on disk; without the compiler there is none to wait for."""
    cached = getattr(kernel, "_cache", None)
    try:
        return cached is None or bool(cached._cache_file._load_index())
    except (AttributeError, ImportError, OSError):
        return False


class _Lock:
    """A file lock between processes, which the operating system releases when its holder dies."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = -1
        self.is_locked = False

    def acquire(self) -> None:
        """Wait for the lock.  If the file cannot be locked, every process compiles for itself."""
        self.is_locked = True
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except OSError:
            pass

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self.is_locked, self._descriptor = False, -1


@cache
def _announce() -> None:
    """Log once that this process compiles, to explain the wait."""
    logging.getLogger("debubble").info(
        "Compiling the search's kernels, which takes up to a minute and is done once on a machine ..."
    )


def _stamp(kernel: Any) -> None:
    """Make the stamp of the cached machine code depend on the kernels and constants compiled into this kernel.

    numba's stamp covers only the kernel's own file, so it would load code that contains an old version of a callee.
    Kernels and constants defined later in the file are not seen here, so a kernel has to be defined after its callees.
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
    """Make a process hold the kernel's lock from a cache miss until the kernel is compiled.

    Callees are compiled meanwhile under their own locks; as there is no recursion, processes cannot deadlock.
    """
    from numba.core.compiler_lock import global_compiler_lock

    cache, compile_kernel = kernel._cache, kernel.compile
    load = cache.load_overload
    lock = _Lock(Path(cache.cache_path) / f"{kernel.__module__}.{kernel.__qualname__}.lock")

    def load_or_forget(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except (AttributeError, ImportError):
            # The file refers to classes of another version of this package; numba unpickles it before checking stamps.
            cache.flush()
            return None

    def load_or_lock(signature: Any, context: Any) -> Any:
        overload = load_or_forget(signature, context)
        if overload is None and not lock.is_locked:
            lock.acquire()
            overload = load_or_forget(signature, context)
            if overload is None:
                _announce()
        return overload

    def compile_and_unlock(signature: Any) -> Any:
        with global_compiler_lock:
            outermost = not lock.is_locked
            try:
                return compile_kernel(signature)
            finally:
                if outermost:
                    lock.release()

    cache.load_overload, kernel.compile = load_or_lock, compile_and_unlock
