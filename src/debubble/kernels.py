"""The compiler of kernels: numba, which keeps their machine code on disk.

Planners start several processes at once, and on a fresh machine each would compile the same kernels for most of a
minute.  A lock on a file lets one of them compile; the others wait, and load what it has written.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

from debubble.files import user_cache

C = TypeVar("C", bound=Callable[..., object])


def jit(function: C, *, inline: Literal["never", "always"] = "never") -> C:
    """Compile the function when it is first called; without numba it stays as it is."""
    try:
        # Its import takes longer than a search that ends at its start.
        from numba import njit
    except ImportError:
        return function
    options: dict[str, Any] = {"cache": True, "nogil": True, "error_model": "numpy", "inline": inline}
    # Nobody calls a kernel from C: the wrapper for that would be a seventh of the time that it takes to compile.
    options["no_cfunc_wrapper"] = True
    kernel: Any = njit(**options)(function)
    _compile_in_one_process(kernel)
    return cast("C", kernel)


def inlined(function: C) -> C:
    """Compile the function into its callers: handing over its arguments takes longer than what a short one does."""
    return jit(function, inline="always")


class _CompilerLock:
    """A lock between processes, which the operating system releases when its holder dies."""

    held = False
    _file = -1

    def acquire(self) -> None:
        """Wait until this process has the lock.  Where no file can be locked, every process compiles for itself."""
        self.held = True
        try:
            folder = user_cache("kernels")
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(folder / "compiler.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError:
            pass

    def release(self) -> None:
        """Let other processes have the lock, if this one has it."""
        if self._file >= 0:
            os.close(self._file)
        self.held, self._file = False, -1


_LOCK = _CompilerLock()


def _compile_in_one_process(kernel: Any) -> None:
    """Let the kernel hold the lock from when it is not found on the disk until it is compiled."""
    from numba.core.compiler_lock import global_compiler_lock

    cache, compile_kernel = kernel._cache, kernel.compile
    load = cache.load_overload

    def load_or_forget(signature: Any, context: Any) -> Any:
        try:
            return load(signature, context)
        except (AttributeError, ImportError):
            # The file names classes of another version of this package; numba reads it before it compares its stamp.
            cache.flush()
            return None

    def load_or_lock(signature: Any, context: Any) -> Any:
        found = load_or_forget(signature, context)
        if found is None and not _LOCK.held:
            _LOCK.acquire()
            found = load_or_forget(signature, context)
        return found

    def compile_and_unlock(signature: Any) -> Any:
        with global_compiler_lock:
            outermost = not _LOCK.held
            try:
                return compile_kernel(signature)
            finally:
                if outermost:
                    _LOCK.release()

    cache.load_overload, kernel.compile = load_or_lock, compile_and_unlock
