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
from tests.support.processes import wait_for_end

SUPPORT = Path(__file__).parents[1] / "support"
"""The folder of the modules that ranks run."""


def started(place: Path) -> list[int]:
    """The processes of the ranks."""
    processes = [int(p.name.removeprefix("pid-")) for p in place.glob("pid-*")]
    assert len(processes) == 2
    return processes


def test_ranks_run_to_their_end_with_one_thread_each_and_nothing_in_the_launching_process_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch gives its loggers their levels when it is imported.
    pytest.importorskip("torch.distributed.launcher.api")
    agent = logging.getLogger("torch.distributed.elastic.agent.server.api")

    def state() -> Any:
        return dict(os.environ), agent.level, signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=os.pathsep)
    before = state()
    launch("launched_rank", f"end {tmp_path}", ranks=2)
    assert state() == before
    assert sorted(p.name for p in tmp_path.glob("rank-*")) == ["rank-0-1", "rank-1-1"]


@pytest.mark.usefixtures("forked_processes")
def test_the_first_failure_is_named_and_no_process_stays(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch("tests.support.launched_rank", f"raise {tmp_path}", ranks=2)
    assert str(caught.value) == "Rank 1 failed: ValueError: one plus one is three"
    assert not any(Path(f"/proc/{rank}").exists() for rank in started(tmp_path))


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
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(sent)
        assert process.wait(20) == code
    wait_for_end(started(tmp_path))


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
