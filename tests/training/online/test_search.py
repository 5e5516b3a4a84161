"""The search process of a run answers, fails and ends without blocking the run."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from debubble.training.online import search_process as cores
from debubble.training.online.search_process import SearchProcess
from tests.support.online_cases import gpipe_plan
from tests.support.processes import wait_for_end

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def plan() -> Any:
    return gpipe_plan()


def test_the_search_answers_with_its_newest_plan_once(plan: Any) -> None:
    search = SearchProcess(plan, effort=5.0, core=None)
    search.wait()
    newest = search.newest()
    assert newest is not None
    assert newest.makespan == newest.plan.simulate().makespan == 13
    assert search.newest() is None
    assert search.failure() is None
    search.close()


def test_run_never_waits_for_the_search(plan: Any) -> None:
    search = SearchProcess(plan, effort=5.0, core=None)
    os.kill(search.pid, signal.SIGSTOP)
    assert search.newest() is None
    assert search.failure() is None
    search.close()


def test_cause_of_a_dead_search_is_reported(plan: Any) -> None:
    too_large = SearchProcess(replace(plan, costs=plan.costs.with_limit(1)), effort=5.0, core=None)
    too_large.wait()
    assert too_large.newest() is None
    assert "InfeasibleError: No order of operations was found that fits. Device 0" in (too_large.failure() or "")
    too_large.close()
    killed = SearchProcess(plan, effort=5.0, core=None)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    assert killed.failure() == "exit code -9"
    killed.close()


@linux
def test_closing_the_search_leaves_neither_process_nor_files(plan: Any) -> None:
    search = SearchProcess(plan, effort=300.0, core=None)
    pid, folder = search.pid, search.folder
    search.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not folder.exists()


@linux
def test_the_search_ends_and_cleans_up_when_its_parent_is_killed(plan: Any, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    program = (
        "import signal, sys\nfrom debubble.plans import Plan\n"
        "from debubble.training.online.search_process import SearchProcess\n"
        "search = SearchProcess(Plan.load(sys.argv[1]), effort=300.0, core=None)\n"
        "print(search.pid, search.folder, flush=True)\nsignal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "plan.json")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        parent.kill()
    wait_for_end([int(pid)])
    assert not Path(folder).exists()


@linux
def test_search_runs_only_in_idle_time_of_its_core(plan: Any) -> None:
    core = max(os.sched_getaffinity(0))
    search = SearchProcess(plan, effort=300.0, core=core)
    assert os.sched_getscheduler(search.pid) == os.SCHED_IDLE
    assert os.sched_getaffinity(search.pid) == {core}
    search.close()


@linux
def test_spare_core_needs_more_cores_than_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2, 3, 7})
    assert cores.spare_core(3) == 7
    assert cores.spare_core(4) is None


def test_the_search_imports_no_torch() -> None:
    program = "import sys, debubble.training.online.scheduler; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
