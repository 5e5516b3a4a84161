"""Step reports of a running job: progress bar or lines on standard error, TensorBoard, Weights & Biases."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from debubble.errors import readable
from debubble.ir import Lane, Op
from debubble.ir.trace import TraceEvent
from debubble.simulator.timeline import BUSY_KINDS


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Metrics of one step over all ranks."""

    step: int
    """Number of steps done, including this one."""
    loss: float
    gradient_norm: float
    """Norm of all gradients before they were clipped; inf or NaN if the step was skipped."""
    learning_rate: float
    seconds: float
    tokens_per_second: float
    peak_memory: tuple[float, ...]
    """Per device, static memory and activations, in bytes."""
    busy: tuple[float, ...]
    """Per device, seconds of compute in a step."""
    loss_scale: float | None = None
    """In fp16, the loss scale after the step."""
    mfu: float | None = None
    """Model FLOPs utilization; None if the plan does not state the devices' peak."""
    bubble_fraction: float | None = None
    """Fraction of the devices' pipeline time without compute."""
    measured_step: int | None = None
    """The step, this one or an earlier one, in which memory, compute and bubble were measured."""
    rolled_back: int = 0
    """Number of devices that rolled back a premature optimizer step."""
    validation_loss: float | None = None
    """Mean loss of the validation set after the step, if it was computed."""
    sample: str | None = None
    """The prompt and its continuation after the step, if one was sampled."""
    news: tuple[str, ...] = ()
    """Sentences on the update, and on switches of the schedule after this step."""

    def __str__(self) -> str:
        return SEPARATOR.join(self._figures.values())

    def words(self, width: int) -> str:
        """The figures that fit into this width: the least important ones are left out."""
        figures, optional = self._figures, [*OPTIONAL_FIGURES]
        while len(words := SEPARATOR.join(figures.values())) > width and optional:
            figures.pop(optional.pop(0), None)
        return words

    @property
    def _figures(self) -> dict[str, str]:
        """Words for the figures by name."""
        figures = {
            "loss": f"loss {self.loss:.3f}",
            "norm": f"norm {self.gradient_norm:.3g}",
            "speed": f"{self.tokens_per_second:,.0f} tokens/s",
        }
        if self.mfu is not None:
            figures["mfu"] = f"MFU {100 * self.mfu:.1f}%"
        if self.bubble_fraction is not None:
            figures["bubble"] = f"bubble {100 * self.bubble_fraction:.0f}%"
        return figures | {"memory": f"peak {readable(max(self.peak_memory))}"}


SEPARATOR = "   "
"""Space between the figures of a step."""
OPTIONAL_FIGURES = ("norm", "mfu", "bubble")
"""Figures that a narrow line leaves out, the least important first."""


class DeviceWork(NamedTuple):
    """Work of one device in one step, in seconds."""

    busy: float
    """Compute time, including recomputation."""
    start: float
    """First start on any lane."""
    end: float
    """Last end on any lane."""

    @staticmethod
    def from_events(events: Sequence[TraceEvent]) -> DeviceWork:
        """The work in a device's events."""
        computing = [e for e in events if e.lane is Lane.COMPUTE and Op.parse(e.name).kind in BUSY_KINDS]
        busy = sum(e.end - e.start for e in computing)
        return DeviceWork(busy, min(e.start for e in events), max(e.end for e in events))


NO_WORK = DeviceWork(0.0, 0.0, 0.0)


def bubble_fraction(devices: Sequence[DeviceWork]) -> float:
    """1 - busy / (devices x makespan), as in a timeline, without gathering the full trace."""
    makespan = max(d.end for d in devices) - min(d.start for d in devices)
    return 1 - sum(d.busy for d in devices) / (len(devices) * makespan)


MIN_BAR_WIDTH = 140
"""Minimum terminal width in characters for a progress bar before the figures."""
LINE_INTERVAL = 10
"""Steps between printed lines if standard error is not a terminal."""


Show = Callable[[StepReport], None]
"""Shows the report of one step."""


@dataclass(frozen=True)
class _Figures:
    """The figures of a step that fit into their place on the line."""

    report: StepReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(self.report.words(options.max_width), no_wrap=True, overflow="ellipsis")


class _FiguresColumn(ProgressColumn):
    """The figures of the task's newest step."""

    def render(self, task: Task) -> RenderableType:
        report = task.fields["report"]
        return "" if report is None else _Figures(report)


@contextmanager
def display(*, steps: int, done: int, console: Console | None = None) -> Iterator[Show]:
    """Show a progress bar, validation losses, samples and news; without a terminal, a line every few steps.

    Args:
        steps: Steps of the run.
        done: Steps that are done already.
        console: Where to show it; None: on standard error.
    """
    console = console or Console(stderr=True, highlight=False)
    figures = _FiguresColumn(table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    bar_of_steps = [BarColumn(20)] if console.width >= MIN_BAR_WIDTH else []
    columns = (
        TextColumn("step", table_column=Column(no_wrap=True)), MofNCompleteColumn(table_column=Column(no_wrap=True)),
        *bar_of_steps, TimeRemainingColumn(table_column=Column(no_wrap=True)), figures,
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, expand=True) as bar:
        task = bar.add_task("", total=steps, completed=done, report=None)

        def show(report: StepReport) -> None:
            bar.update(task, completed=report.step, report=report)
            if not console.is_terminal and (report.step % LINE_INTERVAL == 0 or report.step == steps):
                console.print(f"step {report.step}/{steps}   {report}", soft_wrap=True)
            if report.validation_loss is not None:
                console.print(f"step {report.step}: validation loss {report.validation_loss:.3f}", soft_wrap=True)
            if report.sample is not None:
                console.print(f"step {report.step}: {report.sample!r}", soft_wrap=True, markup=False)
            for sentence in report.news:
                console.print(sentence, soft_wrap=True)

        yield show


@contextmanager
def tensorboard(folder: Path, *, done: int) -> Iterator[Show]:
    """Write every step's figures to a TensorBoard folder; earlier entries of steps after `done` are purged."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), purge_step=done + 1) as writer:

        def show(report: StepReport) -> None:
            for name, figure in figures(report).items():
                writer.add_scalar(name, figure, report.step)
            writer.flush()  # so that no step is lost however the run ends

        yield show


@contextmanager
def weights_and_biases(project: str, settings: Mapping[str, Any]) -> Iterator[Show]:
    """Send every step's figures to a project of Weights & Biases, with the run's settings."""
    run = importlib.import_module("wandb").init(project=project, config=dict(settings))
    exit_code = 1
    try:
        yield lambda report: run.log(figures(report), step=report.step)
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)


def figures(report: StepReport) -> dict[str, float]:
    """A step's figures by name, without those that are unknown."""
    known = {
        "train/loss": report.loss,
        "train/gradient_norm": report.gradient_norm,
        "train/learning_rate": report.learning_rate,
        "train/loss_scale": report.loss_scale,
        "validation/loss": report.validation_loss,
        "speed/seconds_per_step": report.seconds,
        "speed/tokens_per_second": report.tokens_per_second,
        "speed/mfu": report.mfu,
        "speed/bubble_fraction": report.bubble_fraction,
        **{f"memory/device_{device}": peak for device, peak in enumerate(report.peak_memory)},
    }
    return {name: figure for name, figure in known.items() if figure is not None}
