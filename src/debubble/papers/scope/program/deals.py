"""SCOPE's program once it is given in which stages runs end: layers are dealt to devices, exactly.

Then it is known which runs a device may hold in which chunk, and whether it can hold so many layers of each in a given
time is its own affair (`subproblem`).  So dynamic programming over the devices tells whether all layers can be dealt
within that time.  It begins with bounds on the devices' times, and asks the device programs only for the loads that it
deals, until all of them are known or no deal is left.  If no choice of ends has a deal, the time is a bound on max T:

* Some choice of ends holds in every assignment that keeps the order, and what it opens holds every such assignment.
* A bound on a device's time for a load holds for every load with more layers, so that a deal of *at least* all layers
  exists wherever an assignment does.
* Where a device's rows of memory are no less, row by row, than those of another one with the same room, it can hold
  nothing that the other cannot: bounds are passed on in one direction, assignments in the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from debubble.papers.scope.program.ends import Ends, ends_of_long_runs
from debubble.papers.scope.program.instance import DeviceInstance, Instance
from debubble.papers.scope.program.loads import Capacity, Load, dealable, dealt, largest_run, most_of_largest
from debubble.papers.scope.program.subproblem import Assignment, Open, fastest, time_bound
from debubble.search.effort import LINEAR, Effort

STEP = 1e-3
"""Share of a time by which a bound on it is worth improving."""
FIRST_STEP = 5e-3
"""The same of an answer to begin with."""
WORTH = 8.5e-3
"""Share of an answer's time that a bound may be off: the devices' own times add to that."""
DEVICE = 1.3e-3
"""Seconds to build a device program."""
UNFIT = 2**60
"""The time of a load that no device can hold."""


@dataclass(frozen=True)
class Deal:
    """The devices' assignments of an answer, and the runs that their chunks may hold, whatever the others do."""

    pieces: tuple[Assignment, ...]
    opened: tuple[Open, ...]


def deal(
    inst: Instance,
    effort: Effort,
    *,
    least: float,
    most: float,
    programs: Sequence[Ends] | None = None,
    start: Deal | None = None,
) -> tuple[float, Deal | None]:
    """The devices' assignments of an answer whose slowest device takes about the least time.

    Args:
        inst: The program.
        effort: Counter of the work.
        least: A time below which no device can be the slowest.
        most: Time beyond which no answer is looked for: that of the start, if there is one.
        programs: Where runs may end, of which the first answer is good enough that takes little longer; None: anywhere.
        start: An answer to begin with.

    Returns:
        The best bound on the slowest device's time, and the answer; None if none is known.
    """
    if not dealable(inst):
        return least, start
    dealer = _Dealer(inst, effort, most)
    everywhere = programs is None
    programs = ends_of_long_runs(inst) if programs is None else programs
    bounds = dict.fromkeys(programs, least)
    best = start
    step = 5 * STEP
    while not effort.over and most - least > (STEP if everywhere else FIRST_STEP) * least:
        # With given ends the least time may be far from any answer.  Elsewhere times rise by ever larger steps up to
        # the first answer, and come down from there as far as is worth proving, before they are halved.
        time = (least + most) / 2
        if everywhere:
            time = min(time, least * (1 + step)) if best is None else max(time, (1 - WORTH) * most)
        step *= 2
        for program in sorted((p for p in programs if bounds[p] < time), key=lambda p: bounds[p]):
            found = dealer.answer(time, program)
            if isinstance(found, Deal):
                best, most = found, max(sum(piece.times(inst)) for piece in found.pieces)
                break
            if found:
                bounds[program] = time
        else:
            if min(bounds.values()) < time:
                break
        least = min(bounds.values())
    return least, best


class _DeviceTimes:
    """Bounds on a device's time for every load, and what its device program has answered.

    Args:
        inst: The program.
        opened: Runs that each chunk of the device may hold.
        most: Time beyond which no load matters.
    """

    def __init__(self, inst: Instance, opened: Open, most: float) -> None:
        self.opened = opened
        self.runs = tuple(sorted({run for runs in opened for run in runs}))
        largest = largest_run(inst.counts)
        self._largest = self.runs.index(largest) if largest in self.runs else None
        fast = {run: inst.shortest[run] for run in self.runs}
        sizes = [min(inst.counts[r], int(most / max(1, fast[r]))) for r in self.runs]
        self._numbers = np.ix_(*(np.arange(size + 1) for size in sizes))
        self.least: Any = self.line(0, fast)
        """By the layers of each of the runs: no assignment of them, or of more, takes less."""
        for at, run in enumerate(self.runs):
            self.least[(slice(None),) * at + (slice(self.needed(run)),)] = UNFIT
        self.answers: dict[Load, Assignment | None] = {}

    def needed(self, run: int) -> int:
        """Layers of a run that the device needs so that no chunk is empty."""
        return sum(runs == (run,) for runs in self.opened)

    def capacity(self, device: int, time: float) -> Capacity:
        """What a device can hold within the time, as far as known."""
        most = most_of_largest(self.least <= time, self._largest)
        return Capacity((device,), self.runs, most, {run: self.needed(run) for run in self.runs})

    def learn(self, bound: Any, load: Load | None = None) -> None:
        """Raise the bounds: of all loads, or of a load and all that have more layers of every run."""
        at = tuple(slice(number, None) for number in load) if load is not None else ...
        np.maximum(self.least[at], bound, out=self.least[at])

    def line(self, constant: int, slopes: Mapping[int, int]) -> Any:
        """A linear bound for every load."""
        return constant + sum(slopes.get(r, 0) * numbers for r, numbers in zip(self.runs, self._numbers, strict=True))


class _Dealer:
    """Deals layers to devices, with what it has learnt of them.

    Args:
        inst: The program.
        effort: Counter of the work.
        most: Time beyond which no load of a device matters.
    """

    def __init__(self, inst: Instance, effort: Effort, most: float) -> None:
        self._inst, self._effort, self._most = inst, effort, most
        self._opened: dict[Ends, tuple[Open, ...]] = {}
        self._tables: dict[tuple[int, Open], _DeviceTimes] = {}
        devices = range(len(inst.devices))
        self._tighter = [[e for e in devices if _tighter(inst.devices[e], inst.devices[d])] for d in devices]
        """Per device, those that can hold nothing that it cannot, itself among them."""

    def answer(self, time: float, program: Ends) -> Deal | bool:
        """An answer that keeps the time and the order.

        Returns:
            True if it is known that there are none, False if the effort does not tell.
        """
        found = self._within(time, program)
        if found is True:
            return True
        known = True
        for member in program.members:
            found = self._within(time, member)
            if isinstance(found, Deal):
                return found
            known = known and found
        return known

    def _within(self, time: float, ends: Ends) -> Deal | bool:
        """An answer in what the ends open; True if there are none, False if the effort does not tell."""
        if ends not in self._opened:
            self._opened[ends] = ends.opened(self._inst)
        tables = [self._table(d, opened) for d, opened in enumerate(self._opened[ends])]
        while not self._effort.over:
            loads = dealt(self._inst.counts, [t.capacity(d, time) for d, t in enumerate(tables)], self._effort)
            if loads is None:
                return True
            pieces = [self._assigned(time, d, load, t) for d, (load, t) in enumerate(zip(loads, tables, strict=True))]
            found = [piece for piece in pieces if piece is not None]
            if len(found) == len(pieces):
                return Deal(tuple(found), self._opened[ends])
            unknown = [
                d for d, (load, t) in enumerate(zip(loads, tables, strict=True))
                if pieces[d] is None and load not in t.answers and t.least[load] <= time
            ]  # fmt: skip
            if not unknown:
                return False
            for d in unknown:
                self._ask(time, d, loads[d], tables[d])
        return False

    def _table(self, device: int, opened: Open) -> _DeviceTimes:
        key = device, opened
        if key not in self._tables:
            self._tables[key] = _DeviceTimes(self._inst, opened, self._most)
            for easier, tighter in enumerate(self._tighter):
                if device in tighter and (known := self._tables.get((easier, opened))) is not None:
                    self._tables[key].learn(known.least)
        return self._tables[key]

    def _assigned(self, time: float, device: int, load: Load, table: _DeviceTimes) -> Assignment | None:
        """An assignment of the load that keeps the time on this device, or on a tighter one."""
        for tighter in self._tighter[device]:
            known = self._tables.get((tighter, table.opened))
            found = None if known is None else known.answers.get(load)
            if found is not None and sum(found.times(self._inst)) <= time:
                return found
        return None

    def _ask(self, time: float, device: int, load: Load, table: _DeviceTimes) -> None:
        """Find out whether a device can hold a load in this time; tighter ones learn what it cannot."""
        same = [t for d in self._tighter[device] if (t := self._tables.get((d, table.opened))) is not None]
        full = [0] * len(self._inst.counts)
        for run, number in zip(table.runs, load, strict=True):
            full[run] = number
        self._effort.spend(LINEAR)
        cut = time_bound(self._inst, self._inst.devices[device], full, table.opened)
        if cut is not None:
            line = table.line(cut.constant, dict(cut.slopes))
            for each in same:
                each.learn(line)
            if table.least[load] > time:
                return
        found = self._fastest(device, full, table.opened, filled=False)
        for each in same:
            # Layers taken from an answer may leave a chunk empty: only so are fewer layers never slower.
            each.learn(UNFIT if found is None else found.bound, load)
        if found is not None and len(found.fills) < self._inst.chunks:
            found = self._fastest(device, full, table.opened, filled=True)
            table.least[load] = max(table.least[load], UNFIT if found is None else found.bound)
        table.answers[load] = found if found is not None and found.layers else None

    def _fastest(self, device: int, load: Sequence[int], opened: Open, *, filled: bool) -> Assignment | None:
        self._effort.spend(DEVICE)
        return fastest(self._inst, self._inst.devices[device], load, opened, self._effort, filled=filled)


def _tighter(one: DeviceInstance, other: DeviceInstance) -> bool:
    """Tell whether the first device can hold nothing that the other cannot: its memory is as full, row by row."""
    rows = [np.concatenate([np.ravel(options) for options in row]) for row in one.kept]
    return (
        one.room <= other.room
        and one.static == other.static
        and one.restored == other.restored
        and all(
            any(np.all(np.concatenate([np.ravel(options) for options in row]) <= most) for most in rows)
            for row in other.kept
        )
    )
