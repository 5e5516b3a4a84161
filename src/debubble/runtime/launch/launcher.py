"""Starts a plan's ranks on this machine, and ends them all when one fails.

Each rank is a process that runs a module's `main(argument)`.  The caller gets the first failure; the other ranks are
ended within seconds, if necessary by SIGKILL.  Ranks find each other through a file in a folder that only this user can
open, and communicate over the loopback device: nothing listens on the network.
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
"""Seconds that a rank has to end before it is killed."""
REQUESTED_GRACE_SECONDS = 30.0
"""Seconds that the other ranks have to end when the first one has ended on request."""
POLL_INTERVAL = 0.05
"""Seconds between polls of the ranks."""
HANG_TIMEOUT = 600.0
"""Seconds that a rank may be stopped by a signal before the run fails."""

END_SIGNAL = signal.SIGHUP
"""Requests a rank to end without another step."""
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals by which a cluster scheduler requests the end of a run; ranks write a checkpoint first, if they do at all."""
ENDING_MESSAGE = (
    "Ending after the step that runs, with a checkpoint, or at once before the first; Ctrl-C again ends at once."
)
FINAL_SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end all ranks at once."""


def start(
    module: str, argument: str, *, ranks: int, hang_timeout: float = HANG_TIMEOUT, interrupts: bool = True
) -> None:
    """Run a module's `main(argument)` as `ranks` processes, or in this process if torchrun has started it as a rank.

    Raises InputError if torchrun started another number of ranks, and the errors of `launch`.
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

    SIGTERM and SIGUSR1 are forwarded to the ranks as a request to end, after a checkpoint if they write any; so is the
    first Ctrl-C, as SIGTERM, unless it `interrupts`.  Signal handlers of this process are restored at the end.

    Raises RankFailedError if a rank fails, or was stopped by a signal for `hang_timeout` seconds; InterruptedRunError
    if one ends after a forwarded Ctrl-C; KeyboardInterrupt on Ctrl-C.
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
                # A rank that lost its peer may be seen to end before the peer; on request all ranks end anyway.
                _wait(processes, POLL_INTERVAL if requested is None else REQUESTED_GRACE_SECONDS)
                failed, ending = _failures(processes), time.monotonic()
                _end(processes)
                failure = first_failure(failed, reasons_in(Path(folder)), ending=ending, requested=requested)
                raise InterruptedRunError(str(failure)) if interrupted else failure
        finally:
            _end(processes)


def start_rank(module: str, argument: str, environment: Mapping[str, str]) -> RankProcess:
    """Start the process of a rank, which ends with this one and does not get a terminal's Ctrl-C."""
    return subprocess.Popen(child_command(module, argument), env=environment, start_new_session=True)


def _environment(folder: Path, rank: int, *, ranks: int) -> dict[str, str]:
    """The environment of a rank's process."""
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN_VARIABLES}
    rank_folder = folder / str(rank)
    rank_folder.mkdir()
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    # A rank that is killed leaves its DataLoader's semaphores to Python's resource tracker, which would warn.
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
        "TORCHELASTIC_ERROR_FILE": str(rank_folder / "error.json"),
        LAUNCH_FOLDER: str(folder),
    }


def _failures(processes: Sequence[RankProcess]) -> dict[int, int]:
    """Nonzero exit codes of ranks that have ended."""
    return {rank: code for rank, process in enumerate(processes) if (code := process.poll())}


def _stopped_for(seconds: float, processes: Sequence[RankProcess], stops: dict[int, float]) -> int | None:
    """A rank that was stopped by a signal for more than `seconds`; `stops` has when each stop was first seen."""
    for rank, process in enumerate(processes):
        if not is_stopped(process.pid):
            stops.pop(rank, None)
        elif time.monotonic() - stops.setdefault(rank, time.monotonic()) > seconds:
            return rank
    return None


def _wait(processes: Sequence[RankProcess], seconds: float) -> None:
    """Wait until all have ended, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL / 5)


def _end(processes: Sequence[RankProcess]) -> None:
    """End all running ranks, after a grace period by SIGKILL."""
    for process in processes:
        process.send_signal(END_SIGNAL)
    _wait(processes, GRACE_SECONDS)
    for process in processes:
        process.send_signal(signal.SIGKILL)
    _wait(processes, GRACE_SECONDS)


@contextmanager
def _received_signals() -> Iterator[list[signal.Signals]]:
    """Collect the signals that request this process to end, except ignored ones; only in the main thread."""
    received: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def receive(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    heard = [
        number for number in (*FORWARDED_SIGNALS, *FINAL_SIGNALS) if signal.getsignal(number) is not signal.SIG_IGN
    ]  # under nohup, SIGHUP is ignored
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
    """Encode a dataclass of options as a rank's argument, for `decode_options`."""
    return msgspec.json.encode(options, enc_hook=str).decode()


def decode_options(argument: str, kind: type[T]) -> T:
    """Decode a rank's argument."""
    return msgspec.json.decode(argument, type=kind, dec_hook=lambda wanted, text: wanted(text))


def open_process_group(backend: str) -> None:
    """Join the run's process group, through the launcher's folder or torchrun's environment."""
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
    """Run a rank's `main`, and report its failure to the launcher.

    The rank ends at once on Ctrl-C and when the launcher ends, even while it waits for a message.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    _reserve_standard_output()
    try:
        main(sys.argv[1] if argument is None else argument)
    except Exception as error:
        exit_rank(error)


def _reserve_standard_output() -> None:
    """Redirect what C++ libraries write to standard output, such as torch 2.9's Gloo, to standard error."""
    sys.stdout.flush()
    stdout = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(stdout, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)  # noqa: SIM115
