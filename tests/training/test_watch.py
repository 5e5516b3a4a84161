"""`debubble watch` on running runs, on runs that ended in every way, and on other folders."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import debubble as db
from debubble.cli.answers import ANSWERS
from debubble.formatting import cores_words
from debubble.planners.plan_step import seconds_per_step
from debubble.processes import available_cores
from debubble.simulator.shared_cores import run_shared
from debubble.training.monitoring.progress import StepReport
from debubble.training.monitoring.run_record import RunEnd, RunRecord, RunStart, RunStep, record
from debubble.training.monitoring.watched_run import WatchedRun

START = RunStart(plan="/nowhere/plan.json", done=0, steps=9, process=os.getpid(), host=socket.gethostname())


def step(number: int, *, loss: float = 2.0, busy: tuple[float, ...] = (1.0, 1.0)) -> StepReport:
    return StepReport(
        step=number, loss=loss, gradient_norm=1.0, learning_rate=0.1, seconds=2.0, tokens_per_second=1000.0,
        peak_memory=(2.0**20,) * len(busy), busy=busy,
    )  # fmt: skip


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write a record with these lines."""

    def write(*lines: Any) -> Path:
        (tmp_path / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return tmp_path

    return write


@pytest.mark.slow
def test_a_running_training_of_two_ranks_is_watched(
    plan_file: Callable[[int], Path], tmp_path: Path, json_of: Any, run: Any
) -> None:
    folder, plan = tmp_path / "c", plan_file(2)
    call = ("train", str(plan), "--steps", "100000", "--checkpoint", str(folder), "--save-every", "100000")
    with subprocess.Popen([sys.executable, "-m", "debubble", *call], stderr=subprocess.PIPE, text=True) as training:
        assert training.stderr is not None
        assert any(line.startswith("step 20/") for line in training.stderr)
        running = json_of("watch", str(folder))
        screen = run("watch", str(folder), "--once")[1]
        training.send_signal(signal.SIGTERM)
        training.stderr.read()
    ended = json_of("watch", str(folder))

    assert (running["state"], running["steps"], running["plan"]) == ("running", 100_000, str(plan))
    assert ended["step"] >= running["step"] >= 20
    planned = db.Plan.load(plan)
    shared = run_shared(planned.simulate().program, cores=available_cores())
    assert running["planned_seconds"] == pytest.approx(seconds_per_step(planned, shared))
    assert f" for 2 devices on {cores_words(available_cores())})" in screen
    assert all(device["busy"] > 0 for device in running["devices"])
    assert "plan-2.json: step " in screen
    assert ended["state"] == "stopped"
    assert ended["error"].startswith("The run was stopped by a signal after step ")


def test_running_run_answers_by_its_schema(
    plan_file: Callable[[int], Path], written: Callable[..., Path], json_of: Any, run: Any
) -> None:
    folder = written(msgspec.structs.replace(START, plan=str(plan_file(2))), RunStep.from_report(step(1)))
    answer, screen = json_of("watch", str(folder)), run("watch", str(folder), "--once")[1]

    assert msgspec.convert(answer, ANSWERS["watch"]) is not None
    assert (answer["state"], answer["step"], answer["steps"]) == ("running", 1, 9)
    assert [device["memory_limit"] for device in answer["devices"]] == [2**30, 2**30]
    assert [word for word in ("Loss", "tokens/s", "is fullest", "computes") if word not in screen] == []


@pytest.mark.parametrize(("cores", "longer"), [(None, False), (64, False), (1, True)])
def test_the_planned_step_is_the_plans_unless_cores_are_shared(
    plan_file: Callable[[int], Path], written: Callable[..., Path], cores: int | None, longer: bool
) -> None:
    plan = plan_file(2)
    start = msgspec.structs.replace(START, plan=str(plan), cores=cores)

    record = RunRecord(written(start, RunStep.from_report(step(1))))
    state = WatchedRun.from_record(record, db.Plan.load(plan), now=0.0)

    step_time = seconds_per_step(db.Plan.load(plan))
    assert state.planned_seconds is not None
    assert (state.planned_seconds > 1.2 * step_time) == longer
    assert longer or state.planned_seconds == pytest.approx(step_time)
    planned_busy = [device.planned_busy for device in state.devices]
    shared = (
        db.Plan.load(plan).simulate()
        if cores is None
        else run_shared(db.Plan.load(plan).simulate().program, cores=cores)
    )
    assert planned_busy == [float(busy) for busy in shared.busy]


@pytest.mark.usefixtures("process_group")
def test_a_run_that_took_all_its_steps_has_ended(plan_file: Callable[[int], Path], tmp_path: Path, run: Any) -> None:
    from debubble.training.options import TrainOptions
    from tests.support.training_cases import train_alone

    file = tmp_path / "own.jsonl"
    summary = train_alone(TrainOptions(plan=plan_file(1), steps=3, metrics=file))
    code, out, _ = run("watch", str(file))

    assert code == 0
    assert "plan-1.json: step 3 of 3, ended" in out
    assert [(s.step, s.loss) for s in RunRecord(file).steps] == [(r.step, r.loss) for r in summary.reports]
    assert [s.measured_step for s in RunRecord(file).steps] == [1, 2, 3]  # the last ten steps are


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    for done, losses in ((0, {1: 3.0, 2: 2.0, 3: 1.0}), (1, {2: 2.5})):
        with record(file, plan=tmp_path / "plan.json", done=done, steps=3) as show:
            for number, loss in losses.items():
                show(step(number, loss=loss))

    assert [(s.step, s.loss) for s in RunRecord(file).steps] == [(1, 3.0), (2, 2.5)]


def test_partial_line_is_dropped_by_the_next_start(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(msgspec.json.encode(START) + b'\n{"event":"step","ti')
    before = RunRecord(file)
    with record(file, plan=tmp_path / "plan.json", done=0, steps=3) as show:
        show(step(1))

    assert before.steps == []
    assert [s.step for s in RunRecord(file).steps] == [1]


def test_non_finite_loss_is_reported(written: Callable[..., Path], run: Any) -> None:
    folder = written(
        START, RunStep.from_report(step(1)), RunStep.from_report(step(2, loss=float("nan"))), RunEnd(error=None)
    )

    assert "not finite, 2.000 at first" in run("watch", str(folder))[1]


def test_a_run_that_has_not_begun_is_waited_for(
    written: Callable[..., Path], run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: written(START, RunStep.from_report(step(1)), RunEnd(error=None)))
    code, out, err = run("watch", str(tmp_path))

    assert (code, "Waiting for a run to begin in" in err, "step 1 of 9" in out) == (0, True, True)


def test_a_folder_that_is_not_there_yet_is_named_once(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sleeps = tmp_path / "c", iter(range(3))

    def sleep(_: float) -> None:
        if next(sleeps) == 2:
            folder.mkdir()
            lines = (START, RunStep.from_report(step(1)), RunEnd(error=None))
            (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    monkeypatch.setattr("time.sleep", sleep)
    code, out, err = run("watch", str(folder))

    assert err == f"Waiting for a run to begin in {folder}, which is not there yet; Ctrl-C leaves.\n"
    assert (code, "step 1 of 9" in out) == (0, True)


def test_run_without_its_process_has_died(written: Callable[..., Path], run: Any) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = written(msgspec.structs.replace(START, process=gone.pid), RunStep.from_report(step(1)))

    assert "its process is gone without a word" in run("watch", str(folder))[1].lower()


@pytest.mark.parametrize(
    ("busy", "slowest", "reason"),
    [
        ((2.0, 1.0), 0, "it takes 2.00 times as long as planned, the others 1.00 times: look at its clock"),
        ((1.0, 1.05), 1, "the plan gives it the most work"),
        ((1.05, 1.052), 1, "another computes as long"),
    ],
)
def test_slowest_device_is_explained_by_speed_or_plan(
    busy: tuple[float, ...], slowest: int, reason: str, written: Callable[..., Path]
) -> None:
    costs = db.StageCosts.of(stages=2, forward=0.1, backward_input=0.1, backward_weight=0.05)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4)
    plan = db.Plan(planner="test", schedule=schedule, costs=costs, lower_bound=0, partition=())
    seen = WatchedRun.from_record(RunRecord(written(START, RunStep.from_report(step(1, busy=busy)))), plan, now=0.0)

    assert [device.planned_busy for device in seen.devices] == [pytest.approx(1.0)] * 2
    assert (seen.slowest, (seen.reason or "")[: len(reason)]) == (slowest, reason)


def test_waiting_is_blamed_if_all_devices_are_fast(written: Callable[..., Path]) -> None:
    costs = db.StageCosts.of(stages=2, forward=0.1, backward_input=0.1, backward_weight=0.05)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4)
    plan = db.Plan(planner="test", schedule=schedule, costs=costs, lower_bound=0, partition=())
    waits = msgspec.structs.replace(RunStep.from_report(step(1, busy=(0.92, 0.79))), bubble_fraction=0.33)

    seen = WatchedRun.from_record(RunRecord(written(START, waits)), plan, now=0.0)

    assert seen.reason == (
        "the plan gives others as much work; devices wait 33% of the pipeline's time, 20% by the plan: look at"
        " messages, loading of data and the host"
    )


def test_figures_of_devices_and_their_steps_belong_together(written: Callable[..., Path], run: Any) -> None:
    def sampled(number: int, sample: int, seconds: float, busy: float, bubble: float) -> RunStep:
        line = RunStep.from_report(step(number, busy=(busy, 1.0)))
        return msgspec.structs.replace(line, seconds=seconds, bubble_fraction=bubble, measured_step=sample)

    first = [sampled(1, 1, 5.0, 1.9, 0.48), *(sampled(n, 1, 2.0, 1.9, 0.48) for n in range(2, 11))]
    second = [sampled(n, 11, 2.0 + n / 10, 1.7, 0.2) for n in (11, 12)]
    screens = [
        " ".join(run("watch", str(written(START, *steps)), "--once")[1].split()) for steps in (first, first + second)
    ]
    seen = WatchedRun.from_record(RunRecord(written(START, *first, *second)), None, now=0.0)

    assert "device 0 computes 1.9 s of 5 s in step 1: it computes longest" in screens[0]
    assert "device 0 computes 1.8 s of 4.05 s (median of steps 1 and 11): " in screens[1]
    assert seen.measured_steps == [1, 11]
    assert seen.measured_seconds == pytest.approx(4.05)
    assert seen.bubble_fraction == pytest.approx(0.34)


def test_resumed_run_is_shown_before_its_first_step(written: Callable[..., Path], run: Any) -> None:
    folder = written(START, RunStep.from_report(step(1)), msgspec.structs.replace(START, done=1))
    code, out, _ = run("watch", str(folder), "--once")
    assert (code, "step 1 of 9, running" in out) == (0, True)


def test_a_run_in_no_folder_is_not_waited_for(tmp_path: Path, run: Any) -> None:
    code, _, err = run("watch", str(tmp_path / "nowhere" / "run"))
    assert (code, f"There is no folder {tmp_path / 'nowhere'}" in err) == (2, True)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "metrics.jsonl has no start of a run: wait until there is one."),
        (b"nonsense\n", "metrics.jsonl is not the record of a run of `debubble train`: "),
        (b"[" * 5000 + b"\n", "metrics.jsonl is not the record of a run of `debubble train`: "),
        (b'{"event":"step","step":1}\n', "metrics.jsonl is not the record of a run of `debubble train`: "),
        (None, "cannot be read: No such file or directory.  RUN is the folder"),
    ],
)
def test_folder_without_a_run_is_refused_in_a_sentence(
    content: bytes | None, sentence: str, tmp_path: Path, run: Any
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_bytes(content)
    code, out, err = run("watch", str(tmp_path), "--once")

    assert (code, out) == (2, "")
    assert sentence in err
