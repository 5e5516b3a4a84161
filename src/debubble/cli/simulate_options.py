"""Option groups of `debubble simulate`: schedules or an order of operations, and abstract costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from debubble.cli import options as o
from debubble.cli.names import schedule_names
from debubble.cli.options import option
from debubble.ir import InputError, Schedule

MICRO_BATCHES = 8
"""Default number of micro-batches per step."""


@dataclass(frozen=True, kw_only=True)
class ScheduleChoice(o.OptionGroup):
    """Named schedules or an order of operations, with their options."""

    section: ClassVar[str] = "The schedule"

    schedule: str | None = option(
        "1f1b, interleaved, zb-h1, zb-v, dualpipe-v, ... (all: `schedules`), or a function of your own, as"
        " mine.py:order; several, as 1f1b,interleaved:4 (of 4 chunks), are compared.",
        names=schedule_names,
        noun="schedule",
        several=True,
        loader="schedules.from_file:named_schedule",
    )
    csv: Path | None = option("An order of operations as torch writes it; with --schedule they are compared.")
    micro_batches: int | None = option("Micro-batches per step (default: 8).")
    chunks: o.Chunks = None
    memory_limit: o.MemoryLimit = None
    options: list[str] | None = option("An option of the schedule, as NAME=VALUE.", "--option")
    recompute: str | None = option(
        "With MODEL: none, selective or full, on every layer, or on those of the stages that the schedule's options"
        " choose (default: full on such stages, none elsewhere)."
    )
    layers: str | None = option("With MODEL: decoder layers of every stage, as 15,6x16,15 (default: units evenly).")
    host_chunks: int = option(
        "With --schedule: the last N chunks of every device have their optimizer states on the host, which steps them"
        " during the pipeline.",
        default=0,
        metavar="N",
    )

    @property
    def choices(self) -> dict[str, ScheduleChoice]:
        """A choice per label, of the CSV's order and of every named schedule."""
        if self.schedule is None:
            return {str(self.csv): self}
        labels = self.schedule.split(",")
        names = [label.partition(":")[0] for label in labels]
        by_csv = {} if self.csv is None else {str(self.csv): replace(self, schedule=None, options=None, chunks=None)}
        return by_csv | {
            label: replace(
                self,
                schedule=name,
                csv=None,
                chunks=self._chunks_of(label, names),
                options=self._options_of(name, names),
            )
            for label, name in zip(labels, names, strict=True)
        }

    def _options_of(self, name: str, compared: Sequence[str]) -> list[str] | None:
        """The options for one of several schedules: those that it takes, and those that no schedule takes."""
        from debubble.schedules import schedules

        def is_for(text: str) -> bool:
            option = text.partition("=")[0].replace("-", "_")
            taking = [schedule for schedule in compared if option in schedules[schedule].options]
            return name in taking or not taking

        return None if self.options is None else list(filter(is_for, self.options))

    def _chunks_of(self, label: str, compared: Sequence[str]) -> int | None:
        """The chunks of a label or `--chunks`; None if the schedule does not take them but another does."""
        from debubble.schedules import schedules

        name, colon, chunks = label.partition(":")
        if colon and not chunks.isdecimal():
            raise InputError(f"--schedule {label}: write NAME:CHUNKS, such as {name}:4.")
        taking = [schedule for schedule in compared if "chunks" in schedules[schedule].options]
        otherwise = None if taking and name not in taking else self.chunks
        return int(chunks) if colon else otherwise

    def with_micro_batches_of(self, order: Schedule) -> ScheduleChoice:
        """The choice with the micro-batches of a CSV's order."""
        return replace(self, micro_batches=order.micro_batches) if self.csv is None else self

    @property
    def step_micro_batches(self) -> int:
        """Number of micro-batches per step."""
        return MICRO_BATCHES if self.micro_batches is None else self.micro_batches

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """The layers of every stage; None without --layers."""
        from debubble.planners.partitioning.by_layers import layers_named

        return None if self.layers is None else layers_named(self.layers)

    @property
    def settings(self) -> dict[str, Any]:
        """The schedule's options by name, as numbers, booleans or words."""
        settings: dict[str, Any] = {}
        for text in self.options or []:
            name, equals, value = text.partition("=")
            if not equals:
                raise InputError(f"--option {text}: write NAME=VALUE.")
            name = name.replace("-", "_")
            if name in ("chunks", "devices", "micro_batches", "costs"):
                raise InputError(f"--option {text}: give --{name.replace('_', '-')} {value}, an option of its own.")
            settings[name] = _value(value)
        return settings

    def check_with_order(self, inputs: AbstractCosts) -> None:
        """Raise InputError for options that a CSV's order determines."""
        alone = {} if self.schedule is not None else {"chunks": self.chunks, "option": self.options}
        options = {"micro-batches": self.micro_batches, "devices": inputs.devices, **alone}
        self._refuse("the CSV says the order of all operations", options)

    def refuse(self, inputs: AbstractCosts, reason: str, **unsupported: Any) -> None:
        """Raise InputError for the first set option of a schedule or of `unsupported`, with this reason."""
        of_a_schedule = {
            "micro-batches": self.micro_batches, "chunks": self.chunks, "option": self.options,
            "devices": inputs.devices, **unsupported,
        }  # fmt: skip
        self._refuse(reason, of_a_schedule)

    @staticmethod
    def _refuse(reason: str, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if value is not None:
                raise InputError(f"Leave --{name} out: {reason}.")


@dataclass(frozen=True, kw_only=True)
class AbstractCosts(o.OptionGroup):
    """Costs of stages without a model."""

    section: ClassVar[str] = o.COSTS

    costs: Path | None = option("Stage costs, as a costs file; stages that are too many are joined.")
    devices: o.Devices = None


def _value(text: str) -> Any:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return text
