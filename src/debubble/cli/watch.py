"""`debubble watch`: a running or finished `debubble train` compared with its plan."""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from debubble.cli.app import app
from debubble.cli.output import Json, console, figure_table, log, print_answer
from debubble.formatting import cores_words, listed, size_words, time_words
from debubble.ir import InputError

if TYPE_CHECKING:
    from debubble.training.monitoring.watched_run import WatchedRun

POLL_SECONDS = 1.0
"""Polling interval, in seconds."""
STEPS_NAMED = 3
"""Number of measured steps that are named; of more, the first and the last are."""
SILENCE_STEPS = 10
"""Time without a step after which a run is reported as silent, as a multiple of its step time."""


@app.command(rich_help_panel="Run")
def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The run's folder of --checkpoint, or its file of --metrics.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the last state and do not follow.")] = False,
    json: Json = False,
) -> None:
    """Follow a run: loss, tokens/s, MFU, memory, the slowest device.

    It says why that is the slowest, and compares memory with the plan.  Ctrl-C leaves it.
    """
    import msgspec

    from debubble.training.monitoring.run_record import RunRecord
    from debubble.training.monitoring.watched_run import WatchedRun, plan_of

    if not (once or json):
        _wait_for(run)
    record = RunRecord(run)
    plan = plan_of(record)
    state = WatchedRun.from_record(record, plan, now=time.time())
    if json:
        print_answer(**msgspec.to_builtins(state))
    elif once:
        console().print(_render(state))
    else:
        with Live(_render(state), console=console(), auto_refresh=False) as live, suppress(KeyboardInterrupt):
            while state.state == "running":
                time.sleep(POLL_SECONDS)
                record.read()
                state = WatchedRun.from_record(record, plan, now=time.time())
                live.update(_render(state), refresh=True)


def _wait_for(run: Path) -> None:
    """Wait until a run has begun its record.  Raises InputError if the run's parent folder does not exist."""
    from debubble.training.monitoring.run_record import has_begun

    if not run.absolute().parent.is_dir():
        raise InputError(f"There is no folder {run.parent}, so no run begins in it: give the run's --checkpoint.")
    if not has_begun(run):
        missing = "" if run.exists() else ", which is not there yet"
        log().print(f"Waiting for a run to begin in {run}{missing}; Ctrl-C leaves.", soft_wrap=True)
    while not has_begun(run):
        time.sleep(POLL_SECONDS)


def _render(run: WatchedRun) -> RenderableType:
    head = f"{Path(run.plan).name}: step {run.step:,} of {run.steps:,}, {run.state}"
    if run.state == "running" and run.seconds_left is not None:
        head += f", {timedelta(seconds=round(run.seconds_left))} left"
    lines = Table.grid(padding=(0, 2, 0, 0))
    for name, words in (
        ("Loss", _loss(run)),
        ("Speed", _speed(run)),
        ("Memory", _memory(run)),
        ("Slowest", _slow(run)),
    ):
        if words:
            lines.add_row(name, words)
    silence = _silence(run)
    said = [] if silence is None else [Text(silence, style="bold")]
    devices: list[RenderableType] = [Text(), _table(run)] if len(run.devices) > 1 else []
    return Group(Text(head, style="bold"), *said, lines, *devices)


def _silence(run: WatchedRun) -> str | None:
    """A sentence on the run's problem, if its record shows one."""
    if run.state in ("failed", "stopped"):
        return run.error
    if run.state == "died":
        return "Its process is gone without a word: see what it printed; --resume goes on from its checkpoint, if any."
    if run.age is None:
        return "No step is done yet." if run.state == "running" else None
    if (
        run.state == "running"
        and run.seconds_per_step is not None
        and run.age > SILENCE_STEPS * run.seconds_per_step + 10
    ):
        return f"No step for {timedelta(seconds=round(run.age))}: it saves or validates, or it hangs."
    return None


def _loss(run: WatchedRun) -> str | None:
    if run.step == 0 or run.age is None:
        return None
    words = "not finite" if run.loss is None else f"{run.loss:.3f}"
    words += "" if run.first_loss is None else f", {run.first_loss:.3f} at first"
    return words + ("" if run.validation_loss is None else f"; validation {run.validation_loss:.3f}")


def _speed(run: WatchedRun) -> str | None:
    from debubble.training.monitoring.watched_run import RECENT_STEPS

    if run.tokens_per_second is None or run.seconds_per_step is None:
        return None
    words = f"{run.tokens_per_second:,.0f} tokens/s"
    words += "" if run.mfu is None else f", MFU {run.mfu:.1%}"
    counted = f"the last {RECENT_STEPS}" if run.step > RECENT_STEPS else "all"
    words += f"; a step takes {time_words(run.seconds_per_step, seconds=True)} (median of {counted} steps)"
    if run.planned_seconds:
        ratio = run.seconds_per_step / run.planned_seconds
        where = "" if run.cores is None else f" for {len(run.devices)} devices on {cores_words(run.cores)}"
        planned = time_words(run.planned_seconds, seconds=True)
        words += f", {ratio:.2f} times as long as planned ({planned}{where})"
    return words


def _memory(run: WatchedRun) -> str | None:
    if not run.devices:
        return None
    device, fullest = max(enumerate(run.devices), key=lambda item: item[1].peak_memory / (item[1].memory_limit or 1))
    words = f"device {device} is fullest: {size_words(fullest.peak_memory)}"
    if fullest.planned_memory is None:
        return words
    words += f", planned {size_words(fullest.planned_memory)}"
    return words + ("" if fullest.memory_limit is None else f", limit {size_words(fullest.memory_limit)}")


def _slow(run: WatchedRun) -> str | None:
    if run.slowest is None or len(run.devices) < 2:
        return None
    busy = time_words(run.devices[run.slowest].busy, seconds=True)
    return f"device {run.slowest} computes {busy}{_measured(run)}: {run.reason}"


def _measured(run: WatchedRun) -> str:
    """Words for the steps in which the devices were measured, and for their time."""
    if run.measured_seconds is None:
        return ""
    steps, seconds = run.measured_steps, time_words(run.measured_seconds, seconds=True)
    if len(steps) == 1:
        return f" of {seconds} in step {steps[0]:,}"
    named = listed([f"{step:,}" for step in steps]) if len(steps) <= STEPS_NAMED else f"{steps[0]:,} to {steps[-1]:,}"
    return f" of {seconds} (median of steps {named})"


def _table(run: WatchedRun) -> Table:
    table = figure_table("device", "computes", "planned", "memory", "planned", "limit")
    for number, device in enumerate(run.devices):
        planned = "-" if device.planned_busy is None else time_words(device.planned_busy, seconds=True)
        sizes = map(size_words, (device.peak_memory, device.planned_memory, device.memory_limit))
        table.add_row(str(number), time_words(device.busy, seconds=True), planned, *sizes)
    return table
