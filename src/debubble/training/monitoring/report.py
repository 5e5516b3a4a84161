"""Summary of a run: its figures, and the comparison of plan and measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.text import Text

from debubble.errors import readable
from debubble.files import write_whole
from debubble.formatting import ANSWER_VERSION
from debubble.ir import Trace
from debubble.plans import Plan
from debubble.runtime.steps.measurements import AllocatorPeaks
from debubble.training.monitoring.progress import StepReport
from debubble.training.online.journal import JournalEntry
from debubble.views import Scene, views
from debubble.views.comparison import Comparison, as_dict, compare, render

WARM_UP_STEPS = 3
"""Number of first steps that are excluded from the slowdown."""
MIN_DRIFT = 0.05
"""Minimum relative slowdown or speed-up over a run that the summary mentions."""


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """A finished run."""

    reports: Sequence[StepReport]
    comparison: Comparison
    checkpoint: Path | None
    switches: Sequence[JournalEntry] = ()
    """Switches of the schedule in an online run."""
    allocator: Sequence[AllocatorPeaks] | None = None
    """Peaks of torch's allocator on each device; None on CPUs."""

    def render(self) -> RenderableType:
        """Render the report for people."""
        first, last = self.reports[0], self.reports[-1]
        trained = (
            f"Loss {first.loss:.3f} at step {first.step}, {last.loss:.3f} at step {last.step};"
            f" {self.tokens_per_second:,.0f} tokens/s in the median step."
        )
        if last.validation_loss is not None:
            trained += f"  Validation loss {last.validation_loss:.3f}."
        slower = self.slowdown
        if slower is not None and abs(slower - 1) > MIN_DRIFT:
            trained += f"  Its last steps took {slower:.2f} times as long as its first."
        saved = [Text(f"Checkpoint: {self.checkpoint}")] if self.checkpoint else []
        memory = [Text(self._allocator_sentence(self.allocator))] if self.allocator else []
        return Group(Text(trained, style="bold"), *saved, *memory, Text(), render(self.comparison))

    def _allocator_sentence(self, peaks: Sequence[AllocatorPeaks]) -> str:
        """A sentence on planned, allocated and reserved bytes of the device with the most reserved memory."""
        fullest = max(range(len(peaks)), key=lambda device: peaks[device].reserved)
        planned = self.comparison.peak_memory[fullest].predicted
        allocated, reserved = peaks[fullest]
        return (
            f"Memory of device {fullest}: {readable(planned)} planned, {readable(allocated)} allocated,"
            f" {readable(reserved)} reserved."
        )

    def as_dict(self) -> dict[str, Any]:
        """The report as `--json` prints it."""
        return {
            "schema": ANSWER_VERSION,
            "steps": self.reports[-1].step,
            "losses": [report.loss for report in self.reports],
            "validation_losses": [[r.step, r.validation_loss] for r in self.reports if r.validation_loss is not None],
            "samples": [[r.step, r.sample] for r in self.reports if r.sample is not None],
            "rolled_back": [report.step for report in self.reports if report.rolled_back],
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.reports[-1].mfu,
            "bubble_fraction": self.reports[-1].bubble_fraction,
            "slowdown": self.slowdown,
            "peak_memory": list(self.reports[-1].peak_memory),
            "allocator": None if self.allocator is None else [peaks._asdict() for peaks in self.allocator],
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "switches": [entry.as_dict() for entry in self.switches],
            "comparison": as_dict(self.comparison),
        }

    @property
    def slowdown(self) -> float | None:
        """Median step time of the run's last quarter over that of its first, without the warm-up steps."""
        seconds = [report.seconds for report in self.reports[WARM_UP_STEPS:]]
        quarter = len(seconds) // 4
        return median(seconds[-quarter:]) / median(seconds[:quarter]) if quarter else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of the median step, over all replicas."""
        return sorted(report.tokens_per_second for report in self.reports)[len(self.reports) // 2]


def print_comparison(comparison: Comparison, *, json: bool) -> None:
    """Print a comparison on standard output, as tables or as one JSON object."""
    if json:
        print(dumps({"schema": ANSWER_VERSION, **as_dict(comparison)}, indent=1), flush=True)
    else:
        Console(highlight=False).print(render(comparison))


def compare_timelines(plan: Plan, trace: Trace, *, html: Path | None) -> Comparison:
    """Compare plan and measurement, and write both timelines to `html` if set."""
    if html is not None:
        write_whole(html, views["html"](Scene.pair(plan, trace)))
    return compare(plan, trace)
