"""A run's figures as TensorBoard scalars."""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from debubble.ir import InputError
from debubble.training.progress import StepReport


def require_tensorboard() -> None:
    """Raise InputError unless TensorBoard is installed."""
    if find_spec("tensorboard") is None:
        raise InputError("--tensorboard needs TensorBoard: install debubble with its tensorboard extra.")


class Scalars(AbstractContextManager["Scalars"]):
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
        figures = {
            "train/loss": report.loss,
            "train/learning_rate": report.learning_rate,
            "speed/seconds_per_step": report.seconds,
            "speed/tokens_per_second": report.tokens_per_second,
            "speed/mfu": report.mfu,
            "speed/bubble_fraction": report.bubble_fraction,
            **{f"memory/device_{device}": held for device, held in enumerate(report.peak_memory)},
        }
        for name, figure in figures.items():
            if figure is not None:
                self._writer.add_scalar(name, figure, report.step)
