import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from debubble.ir import InputError
from debubble.runtime import launcher
from debubble.runtime.launcher import RankFailedError, is_torchrun_rank, launch

SUPPORT = Path(__file__).parents[1] / "support"
"""The folder of the modules that ranks run."""


def start(behaviour: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    launch("launched_rank", f"{behaviour} {place}", ranks=2)


def alive(place: Path) -> list[int]:
    pids = [int(p.name.removeprefix("pid-")) for p in place.glob("pid-*")]
    assert len(pids) == 2
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_all_ranks_run_to_their_end_with_one_thread_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start("end", tmp_path, monkeypatch)
    assert sorted(p.name for p in tmp_path.glob("rank-*")) == ["rank-0-1", "rank-1-1"]


def test_the_first_failure_is_named_and_no_process_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankFailedError) as caught:
        start("raise", tmp_path, monkeypatch)
    assert str(caught.value) == "Rank 1 failed: ValueError: one plus one is three"
    assert alive(tmp_path) == []


def test_nothing_in_the_launching_process_is_changed_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch gives its loggers their levels when it is imported.
    pytest.importorskip("torch.distributed.launcher.api")
    agent = logging.getLogger("torch.distributed.elastic.agent.server.api")

    def state() -> Any:
        return dict(os.environ), agent.level, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    before = state()
    launch("launched_rank", f"end {tmp_path}", ranks=2)
    assert state() == before


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "a killed launcher"]
)
def test_ranks_end_with_the_launcher(tmp_path: Path, sent: Any, code: int) -> None:
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from debubble.runtime.launcher import launch\n"
        f"try: launch('launched_rank', 'wait {tmp_path}', ranks=2)\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", program], env=environment, start_new_session=True) as process:
        while not (tmp_path / "waiting").exists():
            assert process.poll() is None
        process.send_signal(sent)
        assert process.wait(20) == code
    while alive(tmp_path):
        os.sched_yield()


def test_a_process_started_by_torchrun_knows_that_it_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_torchrun_rank()
    as_torchrun(monkeypatch)
    assert is_torchrun_rank()


def test_another_number_of_ranks_than_the_plan_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    as_torchrun(monkeypatch)
    with pytest.raises(InputError, match="for 4 ranks, but torchrun started 2: start 4"):
        launcher.start("launched_rank", "end", ranks=4)


def as_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)


def test_standard_output_is_for_the_rank_and_not_for_libraries() -> None:
    code = (
        "import os; from debubble.runtime.launcher import run_rank;"
        " run_rank(lambda _: (os.write(1, b'library'), print('rank')), '')"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("rank\n", "library")
