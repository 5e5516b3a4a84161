"""Processes of tests are forked from one with torch imported, as importing it takes longer than most tests."""

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import api

from debubble.runtime.launch.launcher import run_rank

START_METHOD: Final = "forkserver"

multiprocessing.set_forkserver_preload(["debubble.training.rank", "torch._dynamo", "torch.distributed.checkpoint"])


class ForkedRank:
    """A rank's process with the interface of the launcher's; its output is printed here when it has ended."""

    def __init__(self, process: BaseProcess, output: Path) -> None:
        self._process, self._output = process, output

    @property
    def pid(self) -> int:
        """Its process ID."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        code = self._process.exitcode
        if code is not None:
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                file = self._output / name
                stream.write(file.read_text() if file.exists() else "")
                file.unlink(missing_ok=True)
        return code

    def send_signal(self, number: int, /) -> None:
        """Send it a signal, unless it has ended."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)


def start_rank(module: str, argument: str, environment: Mapping[str, str]) -> ForkedRank:
    """Start a rank as the launcher does, forked."""
    output = Path(environment["TORCHELASTIC_ERROR_FILE"]).parent
    context = multiprocessing.get_context(START_METHOD)
    process = context.Process(target=_run_launched, args=(module, argument, dict(environment), output))
    process.start()
    return ForkedRank(process, output)


def run_forked(script: Path, *, ranks: int) -> None:
    """Run a script like `torchrun --standalone` with forked ranks, whose output is printed when they end."""
    one_node: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "max_restarts": 0, "local_addr": "localhost"}
    with tempfile.TemporaryDirectory() as logs:
        config = api.LaunchConfig(
            nproc_per_node=ranks, run_id=script.stem, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            start_method=START_METHOD, logs_specs=DefaultLogsSpecs(logs, redirects=Std.ALL), **one_node,
        )  # fmt: skip
        try:
            api.elastic_launch(config, _run_script)(str(script), os.getcwd())
        finally:
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                for file in sorted(Path(logs).glob(f"**/{name}.log")):
                    stream.write(file.read_text())


def _run_launched(module: str, argument: str, environment: dict[str, str], output: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(output / name, os.O_CREAT | os.O_WRONLY), number)
    torch.set_num_threads(1)
    run_rank(importlib.import_module(module).main, argument)


def _run_script(script: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    runpy.run_path(script, run_name="__main__")
