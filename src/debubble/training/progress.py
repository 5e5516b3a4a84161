"""Reports of steps while a run goes on: a progress bar or lines on standard error, and figures for other programs."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from debubble.errors import readable


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step, over all ranks."""

    step: int
    """Steps done, this one included."""
    loss: float
    learning_rate: float
    seconds: float
    tokens_per_second: float
    peak_memory: tuple[float, ...]
    """Per device, static memory and activations, in bytes."""
    mfu: float | None = None
    """Share of the devices' peak that the model's own operations take; None if the plan does not say the peak."""
    bubble_fraction: float | None = None
    """Share of the devices' time in the pipeline in which they did not compute."""
    rolled_back: int = 0
    """Devices that had updated their parameters too early and took it back."""
    validation_loss: float | None = None
    """Mean loss of the validation set after the step, if it was computed."""
    sample: str | None = None
    """The prompt with what the model has made of it after the step, if it was asked."""
    news: tuple[str, ...] = ()
    """Sentences on the update, and on switches of the schedule after this step."""

    def __str__(self) -> str:
        figures = [f"loss {self.loss:.3f}", f"{self.tokens_per_second:,.0f} tokens/s"]
        if self.mfu is not None:
            figures.append(f"MFU {100 * self.mfu:.1f}%")
        if self.bubble_fraction is not None:
            figures.append(f"bubble {100 * self.bubble_fraction:.0f}%")
        return "   ".join([*figures, f"peak {readable(max(self.peak_memory))}"])


LINE_INTERVAL = 10
"""Steps between the lines that are printed where standard error is piped."""


class Display(AbstractContextManager["Display"]):
    """Shows each step's report."""

    def __init__(self, *, steps: int, done: int) -> None:
        console = Console(stderr=True, highlight=False)
        self._console, self._steps = console, steps
        self._bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=steps, completed=done)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, report: StepReport) -> None:
        """Move the bar to the report's step, and print its validation loss and news; where piped, also some steps."""
        self._bar.update(self._task, completed=report.step, description=str(report))
        if not self._console.is_terminal and (report.step % LINE_INTERVAL == 0 or report.step == self._steps):
            self._console.print(f"step {report.step}/{self._steps}   {report}", soft_wrap=True)
        if report.validation_loss is not None:
            self._console.print(f"step {report.step}: validation loss {report.validation_loss:.3f}", soft_wrap=True)
        if report.sample is not None:
            self._console.print(f"step {report.step}: {report.sample!r}", soft_wrap=True, markup=False)
        for sentence in report.news:
            self._console.print(sentence, soft_wrap=True)


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """Writes every step's figures to a folder; what an earlier run wrote of the steps after `done` is hidden."""

    def __init__(self, folder: Path, *, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=done + 1)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def show(self, report: StepReport) -> None:
        """Write the report of one step."""
        for name, figure in figures(report).items():
            self._writer.add_scalar(name, figure, report.step)
        self._writer.flush()  # whatever ends the run: the steps before its last checkpoint can be seen


class WeightsAndBiases(AbstractContextManager["WeightsAndBiases"]):
    """Sends every step's figures to a project of Weights & Biases, with the run's settings."""

    def __init__(self, project: str, settings: Mapping[str, Any]) -> None:
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, config=dict(settings))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run.finish(exit_code=0 if error is None else 1)

    def show(self, report: StepReport) -> None:
        """Send the report of one step."""
        self._run.log(figures(report), step=report.step)


def figures(report: StepReport) -> dict[str, float]:
    """A step's figures by name; those that are not known are left out."""
    known = {
        "train/loss": report.loss,
        "train/learning_rate": report.learning_rate,
        "validation/loss": report.validation_loss,
        "speed/seconds_per_step": report.seconds,
        "speed/tokens_per_second": report.tokens_per_second,
        "speed/mfu": report.mfu,
        "speed/bubble_fraction": report.bubble_fraction,
        **{f"memory/device_{device}": peak for device, peak in enumerate(report.peak_memory)},
    }
    return {name: figure for name, figure in known.items() if figure is not None}
