"""Files that are written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from debubble.files import write_whole


@pytest.fixture(params=[0o077, 0o022, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_files_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    write_whole(tmp_path / "plan.json", b"{}")
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write_whole(tmp_path / "plan.json", content)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("plan.json", b"second")]
