"""The compiler of kernels: caching, and sharing between processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from debubble.kernels import as_block, jit

pytest.importorskip("numba")

KERNEL = """
import shapes
from debubble.kernels import jit

@jit
def double(pair):
    return 2 * pair.x
"""


@pytest.mark.slow
def test_kernel_cached_by_another_version_is_recompiled(tmp_path: Path) -> None:
    """In two processes: the second finds a cached file with a class that no longer exists.

    The names differ in length, as Python detects changed sources by their time in seconds and their size.
    """
    shapes, kernel = tmp_path / "shapes.py", tmp_path / "kernel.py"
    shapes.write_text("from typing import NamedTuple\nclass Former(NamedTuple):\n    x: int\n")
    kernel.write_text(KERNEL + "print(double(shapes.Former(21)))\n")
    for name in ("Former", "Successor"):
        for file in (shapes, kernel):
            file.write_text(file.read_text().replace("Former", name))
        done = subprocess.run([sys.executable, "kernel.py"], cwd=tmp_path, capture_output=True, text=True)
        assert done.stdout == "42\n", done.stderr


@pytest.mark.parametrize("decorator", ["jit", pytest.param("inlined", marks=pytest.mark.slow)])
def test_kernel_is_recompiled_when_its_callee_changes(tmp_path: Path, decorator: str) -> None:
    """In a process for each version of the callee and of a constant."""
    head = f"from debubble.kernels import {decorator}\n"
    (tmp_path / "kernel.py").write_text(
        "from debubble.kernels import jit\nfrom other import OFFSET, grow\n\n@jit\ndef twice(x):\n"
        "    return 2 * grow(x) + OFFSET\n\nprint(twice(7))\n"
    )
    answers = []
    for factor, offset in ((3, 0), (30, 0), (30, 1000)):
        (tmp_path / "other.py").write_text(
            f"{head}OFFSET = {offset}\n@{decorator}\ndef grow(x):\n    return {factor} * x\n"
        )
        done = subprocess.run([sys.executable, "kernel.py"], cwd=tmp_path, capture_output=True, text=True)
        answers.append(done.stdout)
    assert answers == ["42\n", "420\n", "1420\n"]


def test_kernel_compilation_is_logged_once(tmp_path: Path) -> None:
    """In two processes: the second finds the machine code."""
    (tmp_path / "shapes.py").write_text("from typing import NamedTuple\nclass Pair(NamedTuple):\n    x: int\n")
    logging = "import logging\nlogging.basicConfig(level=logging.INFO, format='%(message)s')\n"
    (tmp_path / "kernel.py").write_text(logging + KERNEL + "double(shapes.Pair(21))\ndouble(shapes.Pair(0.5))\n")
    logged = [
        subprocess.run([sys.executable, "kernel.py"], cwd=tmp_path, capture_output=True, text=True).stderr
        for _ in range(2)
    ]
    sentence = "Compiling the search's kernels, which takes up to a minute and is done once on a machine ...\n"
    assert logged == [sentence, ""]


@pytest.mark.slow
def test_processes_that_start_together_compile_a_kernel_once(tmp_path: Path) -> None:
    """Caches of users may differ: the machine code is next to the source."""
    (tmp_path / "shapes.py").write_text("from typing import NamedTuple\nclass Pair(NamedTuple):\n    x: int\n")
    call = "input()\ndouble(shapes.Pair(21))\nprint(sum(double.stats.cache_misses.values()))\n"
    (tmp_path / "kernel.py").write_text(KERNEL + "print('ready', flush=True)\n" + call)
    processes = [
        subprocess.Popen(
            [sys.executable, "kernel.py"],
            cwd=tmp_path,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / user)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for user in "abc"
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    assert sorted(process.communicate()[0] for process in processes) == ["0\n", "0\n", "1\n"]


def test_kernels_read_and_write_blocks_as_they_do_arrays() -> None:
    @jit
    def follow(values: NDArray[np.float64], following: NDArray[np.int64]) -> float:
        total, index = 0.0, 0
        for _ in range(len(following)):
            index = following[index]
            total += values[index]
            values[index] = total
        values[1:3] = 0.5
        return total

    values, following = np.arange(5.0), np.array([3, 0, 1, 4, 2])
    expected = values.copy()
    assert follow(as_block(values), as_block(following)) == follow(expected, following)
    assert values.tolist() == expected.tolist()
