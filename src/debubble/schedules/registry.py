"""The schedule library's registry.

A schedule is a function with keyword-only arguments that returns a Schedule, decorated with `@schedule`:
`devices`, `micro_batches` and `costs` (ignored by rule-based schedules) always, and `chunks`, `memory_limit` and
options of its own if they apply.
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

MAX_PAIRS = 2**19
"""Limit on pairs of stage and micro-batch, beyond which a schedule would take minutes and gigabytes."""


def check_size(stages: int, micro_batches: int) -> None:
    """Raise InputError if there are more pairs of stage and micro-batch than MAX_PAIRS."""
    pairs = stages * micro_batches
    if pairs > MAX_PAIRS:
        raise InputError(
            f"{pairs} pairs of stage and micro-batch are more than the {MAX_PAIRS} that debubble orders; ask for"
            " fewer devices or micro-batches."
        )


@dataclass(frozen=True)
class ScheduleEntry:
    """A published schedule: how to build it, and its source's claims."""

    name: str
    build: Callable[..., Schedule]
    paper: str
    bubble: str
    """Bubble time for uniform costs, a formula in p, m, v and the times of all of a device's chunks: f, b, i, w, r."""
    memory: str
    """Peak on device 0 in activations of one micro-batch on one device, as a formula."""
    default_chunks: int
    peak: Callable[[int, int, int], Number] | None = None
    """Peak of any device as a function of (p, m, v), in activations of one micro-batch on one device, for equal stages.
    None if not declared."""
    placement: Callable[[int, int], Placement] = Placement.looped
    """Its placement as a function of (p, v)."""

    @cached_property
    def options(self) -> frozenset[str]:
        """The names of its arguments."""
        return frozenset(inspect.signature(self.build).parameters)

    @cached_property
    def searches(self) -> bool:
        """Whether it searches its order with a default effort, unless a number of `steps` is specified."""
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
            costs: Times and bytes per stage, for schedules that use them; all times are 1 by default.
            options: `chunks` (stages per device, v) and the schedule's own options; None means the default.

        Raises:
            InputError: For an option that the schedule does not have, or numbers that it cannot handle.
            PluginError: If a schedule of another distribution fails.
            ScheduleError: If the result is not a correct step.
        """
        if devices < 1:
            raise InputError(f"A pipeline needs at least one device, not {devices}.")
        if micro_batches < 1:
            raise InputError(f"A step needs at least one micro-batch, not {micro_batches}.")
        if costs is not None:
            costs.check_for(devices=devices, micro_batches=micro_batches)
        specified = {name: value for name, value in options.items() if value is not None}
        if specified.get("chunks") == self.default_chunks and "chunks" not in self.options:
            del specified["chunks"]
        if "chunks" in specified and "chunks" not in self.options:
            raise InputError(
                f"The schedule '{self.name}' has no option 'chunks': it always has {self.default_chunks} per device."
            )
        for name, value in specified.items():
            if name not in self.options:
                raise InputError(f"The schedule '{self.name}' has no option '{name}'.")
            self._check_type(name, value)
        chunks = specified.get("chunks", self.default_chunks)
        if chunks < 1:
            raise InputError(f"A device needs at least one chunk, not {chunks}.")
        if costs is not None and costs.stages != devices * chunks:
            raise InputError(
                f"The costs are for {costs.stages} stages, but '{self.name}' has {devices * chunks}: {devices} devices"
                f" x {chunks} chunks."
            )
        check_size(devices * chunks, micro_batches)
        with guarding_plugins(self.build, name=f"The schedule '{self.name}'"):
            schedule = self.build(devices=devices, micro_batches=micro_batches, costs=costs, **specified)
        if not is_own(self.build):
            if not isinstance(schedule, Schedule):
                raise ScheduleError(f"The schedule '{self.name}' returns {schedule!r}, which is no db.Schedule.")
            try:
                check(schedule)
            except ScheduleError as error:
                raise ScheduleError(f"The schedule '{self.name}' is wrong: {error}") from error
        return schedule

    def accepted_options(self, **options: Any) -> dict[str, Any]:
        """The subset of these options that the schedule accepts."""
        return {name: value for name, value in options.items() if name in self.options}

    def _check_type(self, name: str, value: Any) -> None:
        """Raise InputError if an option is not a number, negative or not an accepted word (`--option rho=abc`)."""
        hint = get_type_hints(self.build).get(name, Any)  # user-defined functions may have no annotations
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


LISTED_FIRST = (
    "interleaved", "interleaved-less-memory", "interleaved-combined", "chronos", "chronos-recomp", "chronos-zero2",
    "1f1b", "bpipe",
)  # fmt: skip
"""The schedules listed and tried first, in this order."""

schedules: Registry[ScheduleEntry] = Registry(
    "debubble.schedules", kind="schedule", folders=(PAPERS, "schedule"), order=LISTED_FIRST
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
        default_chunks: Default number of stages per device, v.
        peak: Peak of any device as a function of (p, m, v), in the same unit, for equal stages; None if not declared.
        placement: Its placement as a function of (p, v).
    """

    def register(build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        schedules.add(name, ScheduleEntry(name, build, paper, bubble, memory, default_chunks, peak, placement))
        return build

    return register
