"""Starts a plan's ranks on this machine with torchrun's elastic agent, and ends them all when one fails.

Each rank is a process of its own that runs a module's `main(argument)`.  The first failure is what the caller hears of;
the other ranks are ended within seconds, by force if they do not listen.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from debubble.ir import DebubbleError, InputError
from debubble.processes import PYTHON
from debubble.runtime.failures import REPORTED, exit_rank

T = TypeVar("T")

GRACE = 3
"""Seconds that a rank gets to end before it is killed."""


class RankFailedError(DebubbleError):
    """A rank died or raised; the sentence says which one and why."""


def start(module: str, argument: str, *, ranks: int) -> None:
    """Run a module's `main(argument)` as `ranks` ranks: here, or as the one that torchrun has started this process for.

    Raises InputError if torchrun started another number, and what `launch` raises.
    """
    if not is_torchrun_rank():
        launch(module, argument, ranks=ranks)
        return
    started = int(os.environ["WORLD_SIZE"])
    if started != ranks:
        raise InputError(f"The plan is for {ranks} ranks, but torchrun started {started}: start {ranks}.")
    run_rank(importlib.import_module(module).main, argument)


def launch(module: str, argument: str, *, ranks: int, threads: int = 1) -> None:
    """Run `python -m module argument` as `ranks` processes and wait for all of them.

    The port is chosen by the system.  Of this process, neither environment, loggers nor signal handlers are changed
    when the ranks have ended.  Raises RankFailedError if one fails, KeyboardInterrupt on Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # A rank that is ended leaves its DataLoader's semaphores to Python's resource tracker, which has the last word.
    silent = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    warnings = ",".join(filter(None, silent))
    environment = {"OMP_NUM_THREADS": str(threads), REPORTED: "1", "PYTHONWARNINGS": warnings}
    with (
        tempfile.TemporaryDirectory(prefix="debubble-") as scratch,
        _environment(environment),
        _quiet("torch.distributed.elastic"),  # what it has to say is raised instead
        _own_signal_handlers(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=scratch),
        )
        if hasattr(config, "shutdown_timeout"):  # torch 2.9 does not have it, and waits for 30 seconds.
            config.shutdown_timeout = GRACE
        try:
            elastic_launch(config, PYTHON[0])(*PYTHON[1:], "-m", module, argument)
        except ChildFailedError as error:
            raise _report(error.failures, _last_words(Path(scratch))) from None
        except SignalException as error:
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RankFailedError(f"The run was ended by {error.sigval.name}.") from None


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started here; afterwards the environment is what it was."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _quiet(package: str) -> Iterator[None]:
    """Let the loggers of a package say nothing."""
    levels = {
        name: logging.getLogger(name).level for name in logging.root.manager.loggerDict if name.startswith(package)
    }
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Put back the handlers that torch's agent replaces, which it does on the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    replaced = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in replaced}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def encode_options(options: Any) -> str:
    """A dataclass of options as a rank's argument; `decode_options` reads it."""
    return msgspec.json.encode(options, enc_hook=str).decode()


def decode_options(argument: str, kind: type[T]) -> T:
    """The options of a rank's argument."""
    return msgspec.json.decode(argument, type=kind, dec_hook=lambda wanted, text: wanted(text))


def is_torchrun_rank() -> bool:
    """Tell whether this process is already a rank, started by torchrun."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def run_rank(main: Callable[[str], None], argument: str | None = None) -> None:
    """Run a rank's `main`, and leave the launcher the reason if it fails.

    The rank ends at once on Ctrl-C, and with the launcher, even while it waits for a message.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    _reserve_standard_output()
    try:
        main(sys.argv[1] if argument is None else argument)
    except Exception as error:
        exit_rank(error)


def end_with_parent() -> None:
    """Let the system end this process when the thread that has started it ends (on Linux)."""
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def _reserve_standard_output() -> None:
    """Send to standard error what libraries write to standard output from C++, as torch 2.9's Gloo does."""
    sys.stdout.flush()
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(own, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115


class _Word(msgspec.Struct):
    """The content of torchrun's error file, which a failing rank writes."""

    message: str
    doing: str
    moment: float
    py_callstack: str
    ended: bool
    of_run: bool


def _last_words(scratch: Path) -> dict[int, _Word]:
    """The error file of each rank that has left one, also of those that the agent has ended."""
    words: dict[int, _Word] = {}
    for file in scratch.glob("**/error.json"):
        content = json.loads(file.read_text())["message"]
        if isinstance(content, dict) and "doing" in content["extraInfo"]:
            words[int(file.parent.name)] = msgspec.convert(
                {"message": content["message"], **content["extraInfo"]}, _Word
            )
    return words


def _report(failures: dict[int, Any], words: dict[int, _Word]) -> RankFailedError:
    """The failure that came first: a rank killed by a signal, else the earliest exception.

    The ranks that lose a peer fail too, often before the agent has noticed the cause; the agent then ends the others
    with SIGTERM.
    """
    of_run = [word for word in words.values() if word.of_run]
    if of_run:
        # A later one has found the first one gone.
        return RankFailedError(min(of_run, key=lambda word: word.moment).message)
    # The agent may notice a rank that lost its peer before the peer, which it then ends: the failures lack that one.
    failed = failures.keys() | {rank for rank, word in words.items() if not word.ended}
    rank = min(failed, key=lambda r: _order(failures.get(r), words.get(r)))
    word = words.get(rank)
    others = _others({r: w for r, w in words.items() if r != rank})
    if word is not None and not word.ended:
        sys.stderr.write(word.py_callstack)
        doing = f" (It {word.doing}{others}.)" if word.doing else ""
        return RankFailedError(f"Rank {rank} failed: {word.message}{doing}")
    failure = failures[rank]
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankFailedError(f"Rank {rank} was killed by {name}{others}; the other ranks were ended.")
    return RankFailedError(f"Rank {rank} ended with exit code {failure.exitcode}{others}; the other ranks were ended.")


SHOWN = 4
"""Ranks of which an error tells what they were doing."""


def _others(words: dict[int, _Word]) -> str:
    doing = [f"; rank {rank} {word.doing}" for rank, word in sorted(words.items()) if word.doing]
    return "".join(doing[:SHOWN])


def _order(failure: Any, word: _Word | None) -> tuple[int, float]:
    if word is not None:
        return (1 if not word.ended else 2), word.moment
    return (2 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp
