"""Fixtures of all tests."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from debubble.cli import main

# The time of an example depends on the load of the machine.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_finish() -> None:
    """Exclude imported objects from garbage collection, which took a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(700, 10, 100)


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test reads or writes the user's cache or sees an earlier run's."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of one megabyte."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser, which takes longer to start than most tests of a page."""
    from tests.support.browsers import started_browser

    with started_browser() as opened:
        yield opened


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Call `debubble` with arguments; returns (exit code, standard output, standard error)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["debubble", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def json_of(run: Any) -> Any:
    """Call `debubble` with valid arguments and `--json`; returns the object that it prints."""

    def call(*arguments: str) -> Any:
        code, out, err = run(*arguments, "--json")
        assert code == 0, err
        return json.loads(out)

    return call


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks and processes of a DataLoader that this process starts are forked."""
    import torch.multiprocessing

    from debubble.runtime.launch import launcher
    from tests.support import forked

    context = torch.multiprocessing.get_context(forked.START_METHOD)
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: context)
    monkeypatch.setattr(launcher, "start_rank", forked.start_rank)
