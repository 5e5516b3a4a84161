"""Starts a plan's ranks on this machine, and ends them all when one fails.

Each rank is a process of its own that runs a module's `main(argument)`.  The first failure is what the caller hears of;
the other ranks are ended within seconds, by force if they do not listen.  Ranks find each other through a file in a
folder that only this user can open, and talk over the loopback device: nothing listens to the network.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from debubble.processes import child_command, end_with_parent, is_stopped
from debubble.runtime.launch.failures import LAUNCH_FOLDER, exit_rank
from debubble.runtime.launch.rank_reports import (
    InterruptedRunError,
    RankFailedError,
    first_failure,
    reasons_in,
    stopped_rank,
)
from debubble.torchrun import TORCHRUN_VARIABLES, check_started, is_torchrun_rank

T = TypeVar("T")
RankProcess = subprocess.Popen[bytes]

GRACE_SECONDS = 3.0
"""Seconds that a rank gets to end before it is killed."""
REQUESTED_GRACE_SECONDS = 30.0
"""Seconds that the others get when the first rank has ended on request."""
POLL_INTERVAL = 0.05
"""Seconds between two looks at the ranks."""
HANG_TIMEOUT = 600.0
"""Seconds that a signal may stop a rank."""

END_SIGNAL = signal.SIGHUP
"""Tells a rank to end without another step."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals with which a scheduler asks a run to end: ranks that write checkpoints write one first."""
ENDING_MESSAGE = (
    "Ending after the step that runs, with a checkpoint, or at once before the first; Ctrl-C again ends at once."
)
FINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end all ranks at once."""


def start(
    module: str, argument: str, *, ranks: int, hang_timeout: float = HANG_TIMEOUT, interrupts: bool = True
) -> None:
    """Run a module's `main(argument)` as `ranks` ranks: here, or as the one that torchrun has started this process for.

    Raises InputError if torchrun started another number, and what `launch` raises.
    """
    if not is_torchrun_rank():
        launch(module, argument, ranks=ranks, hang_timeout=hang_timeout, interrupts=interrupts)
        return
    check_started(ranks)
    run_rank(importlib.import_module(module).main, argument)


def launch(
    module: str,
    argument: str,
    *,
    ranks: int,
    hang_timeout: float = HANG_TIMEOUT,
    interrupts: bool = True,
) -> None:
    """Run `python -m module argument` as `ranks` processes and wait for all of them.

    SIGTERM and SIGUSR1 are forwarded to the ranks, as the request to end, and so is the first Ctrl-C as SIGTERM unless
    it `interrupts`: ranks that write checkpoints write one first.  Signal handlers of this process are as they
    were when the ranks have ended.  Raises RankFailedError if one fails, or a signal has stopped it for `hang_timeout`
    seconds (the others may have ended, and then none sees it), InterruptedRunError if one ends after a Ctrl-C that was
    forwarded, KeyboardInterrupt on Ctrl-C.
    """
    with tempfile.TemporaryDirectory(prefix="debubble-") as folder, _received_signals() as received:
        environments = [_environment(Path(folder), rank, ranks=ranks) for rank in range(ranks)]
        processes: list[RankProcess] = []
        requested: signal.Signals | None = None
        interrupted = False
        stops: dict[int, float] = {}
        try:
            processes += (start_rank(module, argument, environment) for environment in environments)
            while not (failed := _failures(processes)) and any(process.poll() is None for process in processes):
                for number in _taken(received):
                    if number == signal.SIGINT and not interrupts and requested is None:
                        print(ENDING_MESSAGE, file=sys.stderr)
                        number, interrupted = signal.SIGTERM, True
                    if number in FINAL_SIGNALS:
                        _end(processes)
                        if number == signal.SIGINT:
                            raise KeyboardInterrupt
                        raise RankFailedError(f"The run was ended by {number.name}.")
                    requested = number
                    for process in processes:
                        process.send_signal(number)
                if (stopped := _stopped_for(hang_timeout, processes, stops)) is not None:
                    _end(processes)
                    raise stopped_rank(stopped, reasons_in(Path(folder)), seconds=hang_timeout)
                time.sleep(POLL_INTERVAL)
            if failed:
                # A rank that lost its peer may end before the system says that the peer did; on request all end alike.
                _wait(processes, POLL_INTERVAL if requested is None else REQUESTED_GRACE_SECONDS)
                failed, ending = _failures(processes), time.monotonic()
                _end(processes)
                failure = first_failure(failed, reasons_in(Path(folder)), ending=ending, requested=requested)
                raise InterruptedRunError(str(failure)) if interrupted else failure
        finally:
            _end(processes)


def start_rank(module: str, argument: str, environment: Mapping[str, str]) -> RankProcess:
    """Start the process of a rank, which ends with this one; Ctrl-C in a terminal does not reach it."""
    return subprocess.Popen(child_command(module, argument), env=environment, start_new_session=True)


def _environment(folder: Path, rank: int, *, ranks: int) -> dict[str, str]:
    """The environment of a rank's process."""
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    own = folder / str(rank)
    own.mkdir()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # A rank that is ended leaves its DataLoader's semaphores to Python's resource tracker, which has the last word.
    silent = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    return inherited | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": ",".join(filter(None, silent)),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TORCHELASTIC_ERROR_FILE": str(own / "error.json"),
        LAUNCH_FOLDER: str(folder),
    }


def _failures(processes: Sequence[RankProcess]) -> dict[int, int]:
    """Exit codes of the ranks that have ended with another one than 0."""
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


def _stopped_for(seconds: float, processes: Sequence[RankProcess], stops: dict[int, float]) -> int | None:
    """A rank that a signal has stopped for so long; `stops` has when each that is stopped was first seen so."""
    for rank, process in enumerate(processes):
        if not is_stopped(process.pid):
            stops.pop(rank, None)
        elif time.monotonic() - stops.setdefault(rank, time.monotonic()) > seconds:
            return rank
    return None


def _wait(processes: Sequence[RankProcess], seconds: float) -> None:
    """Wait until all have ended, for so long at most."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL / 5)


def _end(processes: Sequence[RankProcess]) -> None:
    """End all that still run, by force if they do not listen."""
    for process in processes:
        process.send_signal(END_SIGNAL)
    _wait(processes, GRACE_SECONDS)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    _wait(processes, GRACE_SECONDS)


@contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that ask this process to end, but for those that it ignores; only the main thread has any."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    heard = [
        number for number in (*FORWARDED_SIGNALS, *FINAL_SIGNALS) if signal.getsignal(number) is not signal.SIG_IGN
    ]  # as of nohup
    before = {number: signal.signal(number, receive) for number in heard}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _taken(received: list[signal.Signals]) -> Iterator[signal.Signals]:
    """Take the signals off the list, oldest first."""
    while received:
        yield received.pop(0)


def encode_options(options: Any) -> str:
    """A dataclass of options as a rank's argument; `decode_options` reads it."""
    return msgspec.json.encode(options, enc_hook=str).decode()


def decode_options(argument: str, kind: type[T]) -> T:
    """The options of a rank's argument."""
    return msgspec.json.decode(argument, type=kind, dec_hook=lambda wanted, text: wanted(text))


def open_process_group(backend: str) -> None:
    """Join the run's process group: by the launcher's folder, which no other user can open, or as torchrun says."""
    if LAUNCH_FOLDER not in os.environ:
        dist.init_process_group(backend)
        return
    dist.init_process_group(
        backend,
        init_method=(Path(os.environ[LAUNCH_FOLDER]) / "rendezvous").as_uri(),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )


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


def _reserve_standard_output() -> None:
    """Send to standard error what libraries write to standard output from C++, as torch 2.9's Gloo does."""
    sys.stdout.flush()
    own = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(own, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
