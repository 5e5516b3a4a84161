"""Ctrl-C where Python cannot raise KeyboardInterrupt by itself: in native solvers and in imports.

A signal's handler runs in the main thread between two instructions of Python, for which a native solver keeps it
waiting.  Modules written in C that are being imported drop what the handler raises, or turn it into an ImportError.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
SENTENCE = "debubble: interrupted.\n"
STOP_SECONDS = 2.0
"""Seconds that a solver is given to stop."""
RETRY_SECONDS = 0.05
"""Seconds from one look whether an import is over to the next."""

T = TypeVar("T")

_abandoned: list[threading.Thread] = []


def solve_interruptibly(solve: Callable[[], T], stop: Callable[[], object] | None = None) -> T:
    """Run a native solver in a thread, so that a Ctrl-C ends the wait for it.

    Args:
        solve: Calls the solver, which must leave SIGINT alone.
        stop: Has the solver stop; None if it cannot: it then goes on until the limit of its time, unheard.
    """
    if threading.current_thread() is not threading.main_thread():  # signals reach the main thread alone
        return solve()
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(solve())
        except BaseException as error:
            answer.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()
        return answer.result()
    finally:
        if not answer.done():
            if stop is not None:
                stop()
                wait([answer], timeout=STOP_SECONDS)
            _abandoned.append(thread)


def exit_process(end: SystemExit) -> None:
    """Raise this end of the program, or end it at once where a solver goes on, whose memory an orderly end would free.

    Everything that is to be written has been.
    """
    # `python -m` forgets the exit code once a KeyboardInterrupt has left an `exec`, until another one ends well.
    exec("")
    if any(thread.is_alive() for thread in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))
    raise end


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Put Ctrl-C off; processes that are started meanwhile never get it, and are for their parent to end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def raise_after_imports() -> None:
    """Let Ctrl-C raise KeyboardInterrupt once no import runs; a second one meanwhile ends the program."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _InterruptHandler())


class _InterruptHandler:
    """Handler of SIGINT."""

    def __init__(self) -> None:
        self._waits = self._retries = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        retries, self._retries = self._retries, False
        if not _imports(frame):
            self._waits = False
            raise KeyboardInterrupt
        if self._waits and not retries:
            os.write(2, SENTENCE.encode())
            os._exit(INTERRUPTED)
        self._waits = True
        timer = threading.Timer(RETRY_SECONDS, self._retry)
        timer.daemon = True
        timer.start()

    def _retry(self) -> None:
        self._retries = True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _imports(frame: FrameType | None) -> bool:
    """Tell whether a module is being imported here."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
