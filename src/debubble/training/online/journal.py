"""Journal of an online run: a JSON line and a sentence per search and switch, and the file of the running plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from debubble.formatting import time_words
from debubble.plans import Plan
from debubble.training.online.measurement import SwitchEffect


@dataclass(frozen=True, kw_only=True)
class JournalEntry:
    """The start of a search, a switch, or the outcome of a switch."""

    step: int
    """Steps done."""
    event: str
    """`search` (one starts), `adopted`, `kept`, `taken back` (rolled back), or `search failed`."""
    drift: float | None = None
    """Relative change of the measured costs since the previous search (at first, from the plan's costs)."""
    schedule: str | None = None
    """Name of the schedule that runs from now on."""
    predicted: SwitchEffect | None = None
    """Seconds per step before and after the switch, simulated with the measured costs."""
    measured: SwitchEffect | None = None
    """Seconds per step before and after the switch, measured."""
    units: tuple[int, ...] | None = None
    """Units per stage from now on, if some have moved."""
    reason: str | None = None
    """Why a search failed, or what has changed besides times when one starts."""

    def __str__(self) -> str:
        match self.event:
            case "search":
                reason = "" if self.reason is None else f", and {self.reason}"
                return f"step {self.step}: searching a better order; measured costs differ by {self.drift:.0%}{reason}"
            case "search failed":
                return f"step {self.step}: the search for a better order failed ({self.reason}); training goes on"
        predicted = f"predicted {_words(self.predicted)}" if self.predicted else ""
        measured = f", measured {_words(self.measured)}" if self.measured else ""
        units = "" if self.units is None else f" with {', '.join(map(str, self.units))} units in the stages"
        return f"step {self.step}: {self.event} another order{units}: {predicted}{measured}"

    def as_dict(self) -> dict[str, Any]:
        """The fields that are set, by name."""
        present = {name: value for name, value in vars(self).items() if value is not None}
        effects = {name: _figures(value) for name, value in present.items() if isinstance(value, SwitchEffect)}
        return {**present, **effects}


@dataclass
class Journal:
    """Appends entries to the file `log`, and writes the running plan to the file `plan`."""

    log: Path
    plan: Path
    entries: list[JournalEntry] = field(default_factory=list)

    def note(self, entry: JournalEntry) -> None:
        """Append an entry to `entries` and to the log."""
        self.entries.append(entry)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as file:
            file.write(msgspec.json.encode(entry.as_dict()) + b"\n")

    def runs(self, plan: Plan) -> None:
        """Save the plan that runs from now on."""
        plan.save(self.plan)


def _figures(effect: SwitchEffect) -> dict[str, float]:
    return {"before": effect.before, "after": effect.after, "gain": effect.gain}


def _words(effect: SwitchEffect) -> str:
    if math.isinf(effect.before):
        return f"{time_words(effect.after, seconds=True)} per step, within the memory that the one before it exceeds"
    change = f"{abs(effect.gain):.1%} {'less' if effect.gain >= 0 else 'more'}"
    return f"{change} time per step ({' to '.join(time_words(t, seconds=True) for t in (effect.before, effect.after))})"
