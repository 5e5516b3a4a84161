"""Two runs in one folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import InputError
from debubble.runtime.launch.failures import RunError
from debubble.training.checks import check, check_unlocked
from debubble.training.run_lock import LOCK, locked
from tests.support.training_cases import train_alone

TAKEN = rf"Another run, process {os.getpid()} on .*, writes to .*: wait for its end, or give another folder\."


def test_lock_is_removed_with_its_run(tmp_path: Path) -> None:
    with locked(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
    assert not list((tmp_path / "new").iterdir())


def test_stale_lock_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("process 1 on here")
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_files_of_a_dead_run_are_removed(tmp_path: Path, options: Any) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    (folder / LOCK).write_text("process 1 on here")
    check_unlocked(replace(options, checkpoint=folder))
    assert not list(folder.iterdir())


@pytest.mark.parametrize("option", ["checkpoint", "save"])
def test_run_in_a_used_folder_is_refused_at_once(tmp_path: Path, options: Any, option: str) -> None:
    with locked(tmp_path / "c"), pytest.raises(InputError, match=TAKEN):
        check(replace(options, **{option: tmp_path / "c"}))


@pytest.mark.usefixtures("process_group")
def test_run_ends_if_another_has_taken_its_folder(tmp_path: Path, options: Any) -> None:
    with locked(tmp_path), pytest.raises(RunError, match=TAKEN):
        train_alone(replace(options, checkpoint=tmp_path))
