"""Files are read safely, whoever wrote them, and written atomically."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from debubble.costs.lengths import read_lengths
from debubble.files import parse, write_whole
from debubble.imports.settings import read_settings
from debubble.ir import InputError
from tests.views.scenes import small_plan, trace_of


@pytest.fixture(params=[0o077, 0o022, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_files_mode_follows_the_umask(tmp_path: Path, umask: int) -> None:
    write_whole(tmp_path / "plan.json", b"{}")
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o666 & ~umask


def test_file_is_replaced_without_leftovers(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write_whole(tmp_path / "plan.json", content)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("plan.json", b"second")]


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (DEEP, "It is no JSON: it is nested too deeply."),
        (b"{", "It is no JSON: line 1, column 2: expecting property name enclosed in double quotes."),
        (b"9" * 5000, None),
        (b" ", "It is no JSON: it is empty."),
        (b"\xff", "It is no JSON: it is not a text file."),
    ],
)
def test_content_that_a_library_cannot_read_is_a_sentence(content: bytes, sentence: str | None) -> None:
    with pytest.raises(InputError) as refused:
        parse(json.loads, content, "It is no JSON")
    assert sentence is None or str(refused.value) == sentence
    assert str(refused.value).count("\n") == 0


@pytest.mark.parametrize("name", ["job.json", "job.yaml"])
def test_a_job_that_is_nested_deeply_is_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(DEEP)
    with pytest.raises(InputError, match="nested too deeply"):
        read_settings(tmp_path / name)


def test_lengths_that_are_nested_deeply_are_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "lengths.json").write_bytes(DEEP)
    with pytest.raises(InputError, match=r"The lengths in .* are not readable"):
        read_lengths(tmp_path / "lengths.json")


AT_ONCE = """
import sys, threading
from debubble.ir import Trace

sys.setswitchinterval(1e-7)
content, together = open(sys.argv[1], "rb").read(), threading.Barrier(8)

def read():
    together.wait()
    Trace.from_json(content)

threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_may_first_read_a_file_type_concurrently(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(trace_of(small_plan()).to_json())

    for _ in range(3):
        assert subprocess.run([sys.executable, "-c", AT_ONCE, str(file)], check=False).returncode == 0
