import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from debubble import processes
from debubble.interrupts import INTERRUPTED
from debubble.ir import InputError
from debubble.processes import PYTHON, own_cores
from debubble.runtime.launch import launcher
from debubble.runtime.launch.launcher import launch, run_rank
from debubble.runtime.launch.rank_reports import RankFailedError
from debubble.torchrun import TORCHRUN_VARIABLES, check_started, is_torchrun_rank
from tests.support import forked
from tests.support.processes import wait_for_end

SUPPORT = Path(__file__).parents[1] / "support"
"""Folder of the modules that ranks run."""


def started(place: Path) -> list[int]:
    """The processes of the ranks."""
    processes = [int(p.name.removeprefix("pid-")) for p in place.glob("pid-*")]
    assert len(processes) == 2
    return processes


def test_ranks_run_and_the_launching_process_is_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> Any:
        return dict(os.environ), [
            signal.getsignal(number) for number in (*launcher.FORWARDED_SIGNALS, *launcher.FINAL_SIGNALS)
        ]

    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    before = state()
    launch("counted_rank", str(tmp_path), ranks=2)
    assert state() == before
    assert sorted(p.name for p in tmp_path.glob("rank-*")) == ["rank-0-1", "rank-1-1"]


@pytest.mark.usefixtures("forked_processes")
def test_first_failure_is_named_and_all_processes_end(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch("tests.support.launched_rank", f"raise {tmp_path}", ranks=2)
    assert str(caught.value) == "Rank 1 failed: ValueError: one plus one is three"
    assert not any(Path(f"/proc/{rank}").exists() for rank in started(tmp_path))


def test_launch_folder_modules_are_not_imported_by_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pathlib.py").write_text("raise ImportError('not the library')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    launch("counted_rank", str(tmp_path), ranks=1)
    assert [p.name for p in tmp_path.glob("rank-*")] == ["rank-0-1"]


def launch_and_wait(place: Path) -> None:
    """A launcher that is interrupted as by Ctrl-C in a terminal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SUPPORT), *sys.path])
    try:
        launch("launched_rank", f"wait {place}", ranks=2)
    except KeyboardInterrupt:
        sys.exit(130)


@pytest.mark.parametrize(
    ("sent", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGKILL, -9)],
    ids=["Ctrl-C", "a killed launcher"],
)
def test_ranks_end_with_the_launcher(tmp_path: Path, sent: int, code: int) -> None:
    os.mkfifo(tmp_path / "waiting")
    launcher = multiprocessing.get_context(forked.START_METHOD).Process(target=launch_and_wait, args=(tmp_path,))
    launcher.start()
    assert launcher.pid is not None
    assert (tmp_path / "waiting").read_text() == "waiting"
    os.kill(launcher.pid, sent)
    launcher.join(20)
    assert launcher.exitcode == code
    wait_for_end(started(tmp_path))


@pytest.mark.usefixtures("forked_processes")
def test_a_rank_that_a_signal_stops_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch("tests.support.launched_rank", f"{signal.SIGSTOP:d} {tmp_path}", ranks=2, hang_timeout=0.1)
    assert str(caught.value) == (
        "Rank 1 was stopped by a signal and has not gone on for 0.1 s; the other ranks were ended."
    )
    assert not any(Path(f"/proc/{rank}").exists() for rank in started(tmp_path))


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("sent", "heard"),
    [(signal.SIGTERM, signal.SIGTERM), (signal.SIGQUIT, signal.SIGQUIT), (signal.SIGINT, signal.SIGTERM)],
)
def test_run_ended_by_a_signal_names_it(tmp_path: Path, sent: signal.Signals, heard: signal.Signals) -> None:
    os.mkfifo(tmp_path / "waiting")

    def send() -> None:
        (tmp_path / "waiting").read_text()
        os.kill(os.getpid(), sent)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(RankFailedError) as caught:
        launch("tests.support.launched_rank", f"wait {tmp_path}", ranks=2, interrupts=False)
    sender.join()
    assert str(caught.value).startswith(f"The run was ended by {heard.name}")
    assert caught.value.exit_code == (INTERRUPTED if sent == signal.SIGINT else 1)
    assert not any(Path(f"/proc/{rank}").exists() for rank in started(tmp_path))


@pytest.mark.parametrize(("ranks", "cores"), [(1, 8), (3, 2), (16, 1)])
def test_ranks_share_the_available_cores(ranks: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert own_cores() == cores


def test_another_number_of_ranks_than_the_plan_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_torchrun_rank()
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "0")
    assert is_torchrun_rank()
    with pytest.raises(InputError, match="for 4 ranks, but torchrun started 2: start 4"):
        launcher.start("launched_rank", "end", ranks=4)


def test_only_rank_0_reports_a_wrong_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("debubble.torchrun.REFUSAL_SECONDS", 0.0)
    for name in TORCHRUN_VARIABLES:
        monkeypatch.setenv(name, "2")
    with pytest.raises(SystemExit, match="2"):
        check_started(4)
    assert capsys.readouterr() == ("", "")


def test_leftover_launcher_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(InputError, match=r"has RANK, WORLD_SIZE, as a rank has, but not .*: unset them"):
        launcher.start("launched_rank", "end", ranks=2)


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_a_signal_ended_is_named(tmp_path: Path, sent: signal.Signals) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch("tests.support.launched_rank", f"{int(sent)} {tmp_path}", ranks=2)
    assert str(caught.value) == f"Rank 1 was killed by {sent.name}; the other ranks were ended."


def listening(process: int) -> set[str]:
    """Addresses on which a process listens, from /proc."""
    links = [os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir() if file.is_symlink()]
    sockets = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")
def test_nothing_listens_to_the_network(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "waiting")
    process = multiprocessing.get_context(forked.START_METHOD).Process(target=launch_and_wait, args=(tmp_path,))
    process.start()
    assert process.pid is not None
    (tmp_path / "waiting").read_text()
    addresses = [listening(pid) for pid in (process.pid, *started(tmp_path))]
    os.kill(process.pid, signal.SIGINT)
    process.join()
    loopback = "0100007F"
    assert addresses == [set(), {loopback}, {loopback}]


def test_rank_without_its_launcher_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    other = str(os.getppid())
    command = [*PYTHON, processes.__file__, other, "counted_rank", str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 1
    assert not list(tmp_path.iterdir())


def write_as_rank_and_library(place: Path) -> None:
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(place / name, os.O_CREAT | os.O_WRONLY), number)
    run_rank(lambda _: print("rank", os.write(1, b"library")), "")


def test_libraries_do_not_write_to_standard_output(tmp_path: Path) -> None:
    rank = multiprocessing.get_context(forked.START_METHOD).Process(target=write_as_rank_and_library, args=(tmp_path,))
    rank.start()
    rank.join()
    assert ((tmp_path / "output").read_text(), (tmp_path / "errors").read_text()) == ("rank 7\n", "library")
