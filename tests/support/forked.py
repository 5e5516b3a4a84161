"""Processes of tests that are forked from one that has imported torch, which takes longer than most of them work."""

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher import api

from debubble.runtime.launcher import run_rank

START_METHOD: Final = "forkserver"

multiprocessing.set_forkserver_preload(["debubble.training.rank", "torch._dynamo", "torch.distributed.checkpoint"])

_elastic_launch = api.elastic_launch


def elastic_launch(config: api.LaunchConfig, entrypoint: str) -> Callable[..., None]:
    """Torch's for `python -m module argument`, with forked ranks."""

    def run(*command: str) -> None:
        *_, module, argument = command
        _launch(config, _run_rank, module, argument)

    return run


def run_forked(script: Path, *, ranks: int) -> None:
    """Run a script as `torchrun --standalone` does, with forked ranks."""
    one_node: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "max_restarts": 0, "local_addr": "localhost"}
    with tempfile.TemporaryDirectory() as logs:
        config = api.LaunchConfig(
            nproc_per_node=ranks, run_id=script.stem, rdzv_backend="c10d", rdzv_endpoint="localhost:0",
            logs_specs=DefaultLogsSpecs(logs), **one_node,
        )  # fmt: skip
        _launch(config, _run_script, str(script), os.getcwd())


def _launch(config: api.LaunchConfig, work: Callable[..., None], *arguments: str) -> None:
    """Start `work(*arguments)` on forked ranks, whose output this process writes when they end."""
    assert isinstance(config.logs_specs, DefaultLogsSpecs)
    logs = config.logs_specs.root_log_dir
    redirected = replace(config, start_method=START_METHOD, logs_specs=DefaultLogsSpecs(logs, redirects=Std.ALL))
    try:
        _elastic_launch(redirected, work)(*arguments)
    finally:
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            for file in sorted(Path(logs).glob(f"**/{name}.log")):
                stream.write(file.read_text())


def _run_rank(module: str, argument: str) -> None:
    torch.set_num_threads(1)
    run_rank(importlib.import_module(module).main, argument)


def _run_script(script: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    runpy.run_path(script, run_name="__main__")
