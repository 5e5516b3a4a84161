"""Ctrl-C in native solvers and in imports."""

import math
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ortools.sat.python import cp_model

from debubble.interrupts import INTERRUPTED, SENTENCE, solve_interruptibly, without_interrupts
from debubble.search.effort import Effort, solver_of, status_of

PROGRAM = """
import threading
from debubble.interrupts import raise_after_imports

raise_after_imports()
try:
    import interrupted
    threading.Event().wait()
except KeyboardInterrupt:
    print("raised")
"""


@pytest.fixture(autouse=True)
def _raises() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def press() -> None:
    """Press Ctrl-C."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def run_import(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Import a module with this source in a program that handles Ctrl-C."""
    (folder / "interrupted.py").write_text(source)
    begin = f"import signal, sys; signal.signal(2, signal.default_int_handler); sys.path.insert(0, {str(folder)!r})"
    return subprocess.run([sys.executable, "-c", begin + PROGRAM], capture_output=True, text=True)


def test_ctrl_c_stops_a_solver() -> None:
    stopped = threading.Event()

    def solve() -> None:
        press()
        stopped.wait()

    with pytest.raises(KeyboardInterrupt):
        solve_interruptibly(solve, stopped.set)
    assert stopped.is_set()


def test_solver_errors_reach_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        solve_interruptibly(lambda: 1 // 0)


def test_ctrl_c_ends_a_cp_sat_search() -> None:
    class Press(cp_model.CpSolverSolutionCallback):
        def on_solution_callback(self) -> None:
            press()

    model = cp_model.CpModel()
    queens = [model.new_int_var(0, 199, "") for _ in range(200)]
    model.add_all_different(queens)
    model.maximize(sum(i * i % 7 * queen for i, queen in enumerate(queens)))
    with pytest.raises(KeyboardInterrupt):
        status_of(solver_of(Effort(math.inf)), model, Effort(math.inf), Press())


def test_ctrl_c_waits_for_the_end_of_imports(tmp_path: Path) -> None:
    done = run_import("import signal\nsignal.raise_signal(2)\nprint('imported')", tmp_path)
    assert done.stdout.split() == ["imported", "raised"]


def test_second_ctrl_c_during_imports_ends_at_once(tmp_path: Path) -> None:
    done = run_import("import signal\nsignal.raise_signal(2)\nsignal.raise_signal(2)\nprint('imported')", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", SENTENCE)


def test_ctrl_c_waits_while_processes_start() -> None:
    started = []

    def start() -> None:
        with without_interrupts():
            press()
            started.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert started
