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
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from debubble.ir import DebubbleError, InputError

T = TypeVar("T")

GRACE = 3
"""Seconds that a rank gets to end before it is killed."""


class RankFailedError(DebubbleError):
    """A rank died or raised; the sentence says which one and why."""


def start(module: str, argument: str, *, ranks: int) -> None:
    """Run a module's `main(argument)` as `ranks` ranks: here, or as the one that torchrun has started this process for.

    Raises InputError if torchrun started another number, and what `launch` raises.
    """
    if not joined():
        launch(module, argument, ranks=ranks)
        return
    started = int(os.environ["WORLD_SIZE"])
    if started != ranks:
        raise InputError(f"The plan is for {ranks} ranks, but torchrun started {started}: start {ranks}.")
    importlib.import_module(module).main(argument)


def launch(module: str, argument: str, *, ranks: int, threads: int = 1) -> None:
    """Run `python -m module argument` as `ranks` processes and wait for all of them.

    The port is chosen by the system.  Raises RankFailedError if one fails, KeyboardInterrupt on Ctrl-C.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # what it has to say is raised instead
    with tempfile.TemporaryDirectory(prefix="debubble-") as scratch:
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
            shutdown_timeout=GRACE,
        )
        try:
            elastic_launch(config, sys.executable)("-m", module, argument)
        except ChildFailedError as error:
            raise _report(error.failures) from None
        except SignalException as error:
            if error.sigval is signal.SIGINT:
                raise KeyboardInterrupt from None
            raise RankFailedError(f"The run was ended by {error.sigval.name}.") from None


def packed(options: Any) -> str:
    """A dataclass of options as a rank's argument; `unpacked` reads it."""
    return msgspec.json.encode(options, enc_hook=str).decode()


def unpacked(argument: str, kind: type[T]) -> T:
    """The options of a rank's argument."""
    return msgspec.json.decode(argument, type=kind, dec_hook=lambda wanted, text: wanted(text))


def joined() -> bool:
    """Whether this process is already a rank, started by torchrun."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def as_rank(main: Callable[[str], None]) -> None:
    """Run a launched rank's `main`, and leave the launcher the reason if it fails.

    The rank ends at once on Ctrl-C, and with the launcher, even while it waits for a message.  The reason is written
    before its connections close, so it is older than those of the peers that it takes down.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        parent_death_signal = 1
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    try:
        main(sys.argv[1])
    except Exception as error:
        own = isinstance(error, DebubbleError)
        details = {
            "timestamp": str(int(time.time())),
            "moment": time.time(),
            "py_callstack": "" if own else traceback.format_exc(),
        }
        text = str(error) if own else f"{type(error).__name__}: {error}"
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(
            json.dumps({"message": {"message": text, "extraInfo": details}})
        )
        os._exit(1)


def _report(failures: dict[int, Any]) -> RankFailedError:
    """The failure that came first: a rank killed by a signal, else the earliest exception.

    The ranks that lose a peer fail too, often before the agent has noticed the cause; the agent then ends the others
    with SIGTERM.
    """
    rank = min(failures, key=lambda r: _order(failures[r]))
    failure = failures[rank]
    if isinstance(failure.message, dict):
        sys.stderr.write(failure.message["extraInfo"]["py_callstack"])
        return RankFailedError(f"Rank {rank} failed: {failure.message['message']}")
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        return RankFailedError(f"Rank {rank} was killed by {name}; the other ranks were ended.")
    return RankFailedError(f"Rank {rank} ended with exit code {failure.exitcode}; the other ranks were ended.")


def _order(failure: Any) -> tuple[int, float]:
    if isinstance(failure.message, dict):
        return 1, float(failure.message["extraInfo"]["moment"])
    return (2 if failure.exitcode == -signal.SIGTERM else 0), failure.timestamp
