"""Ranks in one process, each with an operation, a watchdog and a shared store."""

import json
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import torch.distributed as dist

import debubble as db
from debubble.ir import lower
from debubble.runtime.execution.status import RankStatus
from debubble.runtime.launch.failures import report_failure
from debubble.training.data.datasets import STARTING_PHASE
from debubble.training.watchdog import SAVING_PHASE, HeartbeatFolder, Watchdog

COSTS = db.StageCosts.of(stages=2)
PROGRAM = lower(db.schedules["1f1b"](devices=2, micro_batches=2), COSTS)
INSTRUCTION = {i.op.name: i for i in PROGRAM.instructions}


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


@pytest.fixture
def watched(store: dist.HashStore) -> Iterator[Any]:
    """Start a watchdog of a rank that never moves; errors go to a queue."""
    errors: Queue[BaseException] = Queue()
    dogs: list[Watchdog] = []

    def start(rank: int, status: RankStatus, *, ranks: int, timeout: float = 0.2) -> Queue[BaseException]:
        dog = Watchdog(
            status, store=store, rank=rank, ranks=ranks, timeout=timeout, exit_rank=errors.put, period=0.05
        )  # fmt: skip
        dog.start()
        dogs.append(dog)
        return errors

    yield start
    for dog in dogs:
        dog.stop()


def running(name: str) -> RankStatus:
    status = RankStatus()
    status.runs(INSTRUCTION[name])
    return status


def waiting(name: str, *, awaited: str) -> RankStatus:
    status = RankStatus()
    status.waits(INSTRUCTION[name], INSTRUCTION[awaited])
    return status


def test_computing_rank_is_named_before_waiting_ones(watched: Any) -> None:
    watched(0, waiting("0B1", awaited="0RECV_B1"), ranks=2, timeout=60)
    errors = watched(1, running("1B1"), ranks=2)
    assert str(errors.get(timeout=20)) == (
        "The run hangs, nothing has moved for 0.2 s: rank 1 is in 1B1, micro-batch 1 and does not end;"
        " rank 0 waits in 0B1, micro-batch 1, for 0RECV_B1 from device 1."
    )


def test_a_rank_that_never_answers_is_named(watched: Any) -> None:
    errors = watched(0, waiting("0B1", awaited="0RECV_B1"), ranks=2)
    assert "for 0.2 s: rank 1 does not answer; rank 0 waits" in str(errors.get(timeout=20))


@pytest.mark.parametrize("phase", [SAVING_PHASE, STARTING_PHASE])
def test_checkpoints_and_starts_of_readers_may_take_long(watched: Any, store: dist.HashStore, phase: str) -> None:
    busy = RankStatus()
    busy.enter(phase, local=True)
    watched(1, busy, ranks=2, timeout=60)
    errors = watched(0, waiting("0B1", awaited="0RECV_B1"), ranks=2, timeout=0.01)
    while not store.check(["0"]) or json.loads(store.get("0"))[0] < 20:
        assert errors.empty()


def test_error_notes_what_the_rank_was_doing() -> None:
    status = running("1F0")
    dog = Watchdog(status, store=dist.HashStore(), rank=0, ranks=1, timeout=60, exit_rank=print, period=0.01)
    with pytest.raises(ValueError, match="broken") as caught, dog:
        raise ValueError("broken")
    assert caught.value.__notes__ == ["is in 1F0, micro-batch 0"]


def test_compute_lane_is_reported_before_messages() -> None:
    status = running("0SEND_F0")
    assert str(status) == "is in 0SEND_F0 to device 1, micro-batch 0"
    assert not status.local
    status.runs(INSTRUCTION["0F1"])
    assert str(status) == "is in 0F1, micro-batch 1"
    assert status.local
    status.ended(INSTRUCTION["0F1"])
    status.ended(INSTRUCTION["0SEND_F0"])
    status.enter("reads data", local=True)
    assert str(status) == "reads data"


def test_an_error_leaves_its_reason_before_the_rank_unwinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher may end the rank before it unwinds, when a peer was killed."""
    file, status = tmp_path / "error.json", running("1B1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    dog = Watchdog(status, store=dist.HashStore(), rank=0, ranks=1, timeout=60, exit_rank=print, period=0.01)
    with pytest.raises(RuntimeError), dog:
        raise RuntimeError("Connection closed by peer.")
    report_failure(ValueError("The first reason stays."))
    word = json.loads(file.read_text())["message"]
    assert word["message"] == "RuntimeError: Connection closed by peer."
    assert word["extraInfo"]["doing"] == "is in 1B1, micro-batch 1"
    assert list(tmp_path.iterdir()) == [file]


def test_between_two_steps_a_rank_runs_the_training_loop(watched: Any) -> None:
    status = RankStatus()
    with status.phase("sums the loss", local=False):
        assert (str(status), status.local) == ("sums the loss", False)
    watched(0, waiting("0B1", awaited="0RECV_B1"), ranks=2, timeout=60)
    errors = watched(1, status, ranks=2)
    assert "rank 1 runs the training loop and does not end; rank 0 waits in 0B1" in str(errors.get(timeout=10))


def test_heartbeats_replace_earlier_ones(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    store = HeartbeatFolder(tmp_path)
    assert not store.check(["0"])
    for beat in ("first", "second"):
        store.set("0", beat)
    assert store.check(["0"])
    assert store.get("0") == "second"
    assert [file.name for file in (tmp_path / "0").iterdir()] == ["heartbeat"]
