"""The schedule library's registry.

A schedule is a function with keyword-only arguments that returns a Schedule, decorated with `@schedule`:
`devices` and `micro_batches` always, `costs` always (ignored by rule-based ones), and `chunks`, `memory_limit` and
options of its own where they mean something.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args, get_origin, get_type_hints

from debubble.argument_types import with_checked_types
from debubble.ir import InputError, Number, Placement, Schedule, ScheduleError, StageCosts, check
from debubble.registry import PAPERS, Registry, guarding_plugins, is_own

MOST_PAIRS = 2**19
"""Pairs of stage and micro-batch beyond which a schedule is refused: it would take minutes and gigabytes."""


def check_size(stages: int, micro_batches: int) -> None:
    """Refuse more stages and micro-batches than can be ordered; raises InputError."""
    pairs = stages * micro_batches
    if pairs > MOST_PAIRS:
        raise InputError(
            f"{pairs} pairs of stage and micro-batch are more than the {MOST_PAIRS} that debubble orders; ask for"
            " fewer devices or micro-batches."
        )


@dataclass(frozen=True)
class ScheduleEntry:
    """One published schedule: how to build it, and what its source says of it."""

    name: str
    build: Callable[..., Schedule]
    paper: str
    bubble: str
    """Bubble time for uniform costs, a formula in p, m, v and the times of all of a device's chunks: f, b, i, w, r."""
    memory: str
    """Peak on device 0 in activations of one micro-batch on one device, as a formula."""
    default_chunks: int
    peak: Callable[[int, int, int], Number] | None = None
    """The most that any device holds, of (p, m, v): activations of one micro-batch on one device, for equal stages.
    None: not declared."""
    placement: Callable[[int, int], Placement] = Placement.looped
    """Its stages on devices, of (p, v)."""

    @cached_property
    def options(self) -> frozenset[str]:
        """Names of the arguments that it takes."""
        return frozenset(inspect.signature(self.build).parameters)

    @cached_property
    def searches(self) -> bool:
        """True if it chooses how long it searches its own order, unless it is given a number of `steps`."""
        steps = inspect.signature(self.build).parameters.get("steps")
        return steps is not None and steps.default is None

    @property
    def summary(self) -> str:
        """The first line of the builder's docstring; empty if it has none."""
        return (inspect.getdoc(self.build) or "").partition("\n")[0]

    @with_checked_types()
    def __call__(
        self, *, devices: int, micro_batches: int, costs: StageCosts | None = None, **options: Any
    ) -> Schedule:
        """Build the schedule.

        Args:
            devices: Pipeline devices, p.
            micro_batches: Micro-batches of a step, m.
            costs: Times and bytes per stage, for the schedules that read them; all times 1 by default.
            options: `chunks` (stages per device, v) and the schedule's own; those that are None stay at their default.

        Raises:
            InputError: For an option that the schedule does not have, or numbers that it cannot handle.
            PluginError: If a schedule of another distribution fails.
            ScheduleError: If it is no correct step.
        """
        if devices < 1:
            raise InputError(f"A pipeline needs at least one device, not {devices}.")
        if micro_batches < 1:
            raise InputError(f"A step needs at least one micro-batch, not {micro_batches}.")
        if costs is not None:
            costs.check_for(devices=devices, micro_batches=micro_batches)
        given = {name: value for name, value in options.items() if value is not None}
        if given.get("chunks") == self.default_chunks and "chunks" not in self.options:
            del given["chunks"]
        if "chunks" in given and "chunks" not in self.options:
            raise InputError(
                f"The schedule '{self.name}' has no option 'chunks': it always has {self.default_chunks} per device."
            )
        for name, value in given.items():
            if name not in self.options:
                raise InputError(f"The schedule '{self.name}' has no option '{name}'.")
            self._check_type(name, value)
        chunks = given.get("chunks", self.default_chunks)
        if chunks < 1:
            raise InputError(f"A device needs at least one chunk, not {chunks}.")
        if costs is not None and costs.stages != devices * chunks:
            raise InputError(
                f"The costs are for {costs.stages} stages, but '{self.name}' has {devices * chunks}: {devices} devices"
                f" x {chunks} chunks."
            )
        check_size(devices * chunks, micro_batches)
        with guarding_plugins(self.build, name=f"The schedule '{self.name}'"):
            schedule = self.build(devices=devices, micro_batches=micro_batches, costs=costs, **given)
        if not is_own(self.build):
            if not isinstance(schedule, Schedule):
                raise ScheduleError(f"The schedule '{self.name}' returns {schedule!r}, which is no db.Schedule.")
            try:
                check(schedule)
            except ScheduleError as error:
                raise ScheduleError(f"The schedule '{self.name}' is wrong: {error}") from error
        return schedule

    def accepted_options(self, **options: Any) -> dict[str, Any]:
        """The options among these that the schedule takes."""
        return {name: value for name, value in options.items() if name in self.options}

    def _check_type(self, name: str, value: Any) -> None:
        """Raise InputError if an option is no number, below 0 or no word that it takes, as after `--option rho=abc`."""
        hint = get_type_hints(self.build).get(name, Any)  # a function of one's own may not say it
        if get_origin(hint) is frozenset:
            if not isinstance(value, frozenset):
                raise InputError(f"The option '{name}' of '{self.name}' is {value!r}; it must be a set of stages.")
            return
        literals = (option for option in (hint, *get_args(hint)) if get_origin(option) is Literal)
        words = [word for literal in literals for word in get_args(literal)]
        if words and value not in words:
            raise InputError(f"The option '{name}' of '{self.name}' is {value!r}; it must be {' or '.join(words)}.")
        types = [get_origin(option) or option for option in get_args(hint) or (hint,)]
        if int in types and float not in types and isinstance(value, int) and value < 0:
            raise InputError(f"The option '{name}' of '{self.name}' is {value!r}; it must not be negative.")
        if int in types and (isinstance(value, str) or not isinstance(value, tuple(types))):
            number = "a number" if float in types else "a whole number"
            raise InputError(f"The option '{name}' of '{self.name}' is {value!r}; it must be {number}.")


FIRST = (
    "interleaved", "interleaved-less-memory", "interleaved-combined", "chronos", "chronos-recomp", "chronos-zero2",
    "1f1b", "bpipe",
)  # fmt: skip
"""The schedules that are listed and tried first, in this order."""

schedules: Registry[ScheduleEntry] = Registry(
    "debubble.schedules", kind="schedule", folders=(PAPERS, "schedule"), order=FIRST
)


def schedule(
    name: str,
    *,
    paper: str,
    bubble: str,
    memory: str,
    default_chunks: int = 1,
    peak: Callable[[int, int, int], Number] | None = None,
    placement: Callable[[int, int], Placement] = Placement.looped,
) -> Callable[[Callable[..., Schedule]], Callable[..., Schedule]]:
    """Register a schedule under its name, with its source and closed forms.

    Args:
        name: Its name in `db.schedules`.
        paper: Its source.
        bubble: Bubble time for uniform costs, a formula in p, m, v and the times of all of a device's chunks.
        memory: Peak on device 0 in activations of one micro-batch on one device, as a formula.
        default_chunks: Stages per device, v, unless it is asked for others.
        peak: The most that any device holds, of (p, m, v), in the same unit for equal stages; None: not declared.
        placement: Its stages on devices, of (p, v).
    """

    def register(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        schedules.add(name, ScheduleEntry(name, build, paper, bubble, memory, default_chunks, peak, placement))
        return build

    return register
