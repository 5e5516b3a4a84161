"""Output that a terminal, a pipe or a disk refuses ends without a traceback."""

import os
import subprocess
import sys

import pytest


def command_that(does: str, *, first: str = "", redirected: str = "", **environment: str) -> tuple[int, bytes, str]:
    """Exit code, standard output and standard error of a command with this effect, called from a shell."""
    program = (
        f"import sys; from debubble.cli import app as frame\n{first}\n"
        f"frame.app.command('work')(lambda: {does})\n"
        "sys.argv = ['debubble', 'work']; frame.main()"
    )
    ended = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, "-c", program],
        capture_output=True,
        env={**os.environ, **environment},
    )
    return ended.returncode, ended.stdout, ended.stderr.decode()


def test_unencodable_characters_become_question_marks() -> None:
    assert command_that("print('\\u25a0 busy')", PYTHONIOENCODING="ascii") == (0, b"? busy\n", "")


def test_a_closed_standard_output_is_not_written_to() -> None:
    assert command_that("sys.stdout.write('answer')", redirected=">&-") == (0, b"", "")


@pytest.mark.parametrize("size", [10, pytest.param(100_000, marks=pytest.mark.slow)])
def test_full_disk_is_one_sentence(size: int) -> None:
    """Also if the answer is still in Python's buffer at the end."""
    code, _, err = command_that(f"sys.stdout.write('a' * {size})", redirected="> /dev/full")
    assert (code, err) == (1, "debubble: No space left on device.\n")


def test_ctrl_c_prints_one_word_and_exits_130() -> None:
    does = "__import__('signal').raise_signal(2)"
    program = "signal.signal(2, signal.default_int_handler)"
    assert command_that(does, first=f"import signal; {program}") == (130, b"", "debubble: interrupted.\n")
