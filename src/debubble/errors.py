"""Errors, whose messages are sentences for the user.  Every error that leaves debubble is a DebubbleError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class DebubbleError(Exception):
    """Base class of all errors; `exit_code` is the exit code of the command line."""

    exit_code: ClassVar[int] = 1


class InputError(DebubbleError, ValueError):
    """The call or its input is wrong; the message says how to correct it."""

    exit_code = 2


def check_at_least_one(**counts: int | None) -> None:
    """Raise InputError for an option whose count is below 1; None: the option is not set."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {count}.")


class ScheduleError(InputError):
    """A schedule is not a correct order of one training step: operations are missing, duplicate or misplaced."""


class DeadlockError(DebubbleError):
    """Operations wait for each other in a cycle, which `cycle` lists in order."""

    def __init__(self, cycle: tuple[str, ...]) -> None:
        self.cycle = cycle
        computing = [name for name in cycle if "SEND" not in name and "RECV" not in name]
        shown = _ends_of_runs(computing if len(computing) > 1 else cycle)
        super().__init__(
            f"The schedule deadlocks: {' waits for '.join((*shown, shown[0]))}; one of these has to come earlier in its"
            " device's order."
        )


def _ends_of_runs(names: Sequence[str]) -> list[str]:
    """Names of operations, without the inner ones of runs of the same stage and kind."""
    kinds = [name.rstrip("0123456789") for name in names]
    inner = range(1, len(names) - 1)
    dropped = {n for n in inner if kinds[n - 1] == kinds[n] == kinds[n + 1]}
    return [name for n, name in enumerate(names) if n not in dropped]


class InfeasibleError(DebubbleError):
    """Nothing fits the memory limit; `missing` is the shortfall in bytes, if known."""

    def __init__(self, sentence: str, *, missing: float | None = None) -> None:
        self.missing = missing
        super().__init__(sentence)


class HostMemoryError(InfeasibleError):
    """A plan fits its devices, but not the memory of their hosts."""


class UnsupportedError(InfeasibleError):
    """A planner does not support the problem, however much memory there is."""

    exit_code = 2


class CutOffError(InfeasibleError):
    """The wall-clock deadline passed before a planner had a feasible solution."""


class SolverError(DebubbleError):
    """An exact model contradicts a schedule that is feasible in it: a bug in debubble, not in the input."""


class PluginError(DebubbleError):
    """A schedule or planner of another distribution failed."""


class PlannerFailedError(DebubbleError):
    """A planner raised an unexpected exception: a bug in it."""


class ExportError(DebubbleError):
    """Another framework cannot reproduce the plan: its order, its partition, or its memory."""


class StoppedError(DebubbleError):
    """A signal stopped a training run after a step, whose checkpoint is saved."""


class OutOfMemoryError(InfeasibleError):
    """An operation can never start under its device's limit.

    `missing` and `peak`, the device's peak without a limit, are in bytes (or abstract units).  The message is `problem`
    and an advice.
    """

    def __init__(
        self, *, device: int, operation: str, stage: int, micro_batch: int, missing: float, peak: float, limit: float,
        advice: str,
    ) -> None:  # fmt: skip
        self.device = device
        self.operation = operation
        self.limit = limit
        self.problem = (
            f"Device {device} runs out of memory at {operation} (stage {stage}, micro-batch {micro_batch}): its peak"
            f" would be {readable(peak)}, above its limit of {readable(limit)}"
        )
        super().__init__(f"{self.problem}; {advice}.", missing=missing)


def readable_bytes(size: float) -> str:
    """Format bytes with a binary unit, KiB at least."""
    return readable(size) if abs(size) >= 2**20 else f"{float(size) / 2**10:.4g} KiB"


def readable(size: float) -> str:
    """Format a size: with a binary unit from 1 MiB up; smaller numbers, which are abstract, as they are."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(size) >= scale:
            return f"{float(size) / scale:.2f} {unit}"
    return f"{float(size):g}"
