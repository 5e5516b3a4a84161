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

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from debubble.planners.scope.instance import DeviceInstance, Instance
from debubble.planners.scope.subproblem import Assignment, Open, fastest, time_bound
from debubble.search.effort import LINEAR, Effort

STEP = 1e-3
"""Share of a time by which a bound on it is worth improving."""
LARGEST = 50_000
"""States of the dynamic program, beyond which runs are too many for it."""
DEVICE, DEAL = 3e-3, 2e-3
"""Seconds to build a device program, and to deal all layers."""
UNFIT, NONE = 2**60, -(2**40)
"""The time of a load that no device can hold, and the layers dealt where nothing can be dealt."""

Load = tuple[int, ...]
"""Layers of each run."""


@dataclass(frozen=True)
class Deal:
    """The devices' assignments of an answer, and the runs that their chunks may hold, whatever the others do."""

    pieces: tuple[Assignment, ...]
    opened: tuple[Open, ...]


def dealable(inst: Instance) -> bool:
    """Tell whether runs are few enough for the dynamic program."""
    return math.prod(count + 1 for count in inst.counts) <= LARGEST * (max(inst.counts) + 1)


def deal(
    inst: Instance,
    effort: Effort,
    *,
    least: float,
    most: float,
    shares: Sequence[int] | None = None,
    programs: Sequence[Ends] | None = None,
) -> tuple[float, Deal | None]:
    """The devices' assignments of an answer whose slowest device takes about the least time.

    Args:
        inst: The program.
        effort: Counter of the work.
        least: A time below which no device can be the slowest.
        most: Time beyond which no answer is looked for.
        shares: Shares of that time that chunks may take at most; None: chunks make up for each other.
        programs: Where runs may end; None: anywhere.

    Returns:
        The best bound on the slowest device's time, and the answer; None if none was found.
    """
    if not dealable(inst):
        return least, None
    dealer = _Dealer(inst, effort, most, shares)
    rising = shares is None and programs is None
    programs = ends_of_long_runs(inst) if programs is None else programs
    bounds = dict.fromkeys(programs, least)
    best: Deal | None = None
    step = 5 * STEP
    while not effort.over and most - least > STEP * least:
        # Times rise by ever larger steps up to the first answer, and are halved from there.  With shares, or given
        # ends, the least time may be far from any answer.
        time = (least + most) / 2
        if best is None and rising:
            time = min(time, least * (1 + step))
        step *= 2
        for program in sorted((p for p in programs if bounds[p] < time), key=lambda p: bounds[p]):
            found = dealer.answer(time, program)
            if isinstance(found, Deal):
                best, most = found, max(dealer.time(piece) for piece in found.pieces)
                break
            if found:
                bounds[program] = time
        else:
            if min(bounds.values()) < time:
                break
        least = min(bounds.values())
    return least, best


@dataclass(frozen=True, eq=False)
class Ends:
    """Which runs stages may hold.

    Attributes:
        spans: Per run, the stages that may hold its layers.
        members: The same with the ends of all runs, if it has those of the long runs alone.
    """

    spans: tuple[range, ...]
    members: tuple[Ends, ...] = ()

    def opened(self, inst: Instance) -> tuple[Open, ...]:
        """Per device and chunk, the runs that it may hold."""
        runs = [tuple(r for r, span in enumerate(self.spans) if s in span) for s in range(inst.stages)]
        return tuple(tuple(runs[s] for s in device.stages) for device in inst.devices)


def long_runs(inst: Instance) -> list[int]:
    """The runs of more layers than devices."""
    return [r for r, count in enumerate(inst.counts) if count > len(inst.devices)]


def ends_of_long_runs(inst: Instance) -> list[Ends]:
    """Every choice of the stages in which long runs end; short ones may stand wherever some order lets them."""
    long = long_runs(inst)
    members: dict[tuple[int, ...], list[Ends]] = {}
    for ends in _all_ends(inst):
        spans = tuple(
            range(max(begin, window.start), min(end + 1, window.stop))
            for begin, end, window in zip((0, *ends[:-1]), ends, inst.windows, strict=True)
        )
        members.setdefault(tuple(ends[r] for r in long[:-1]), []).append(Ends(spans))
    return [
        Ends(
            tuple(
                range(min(s.start for s in some), max(s.stop for s in some))
                for some in zip(*(e.spans for e in each), strict=True)
            ),
            tuple(each),
        )
        for each in members.values()
    ]


def _all_ends(inst: Instance) -> Iterator[tuple[int, ...]]:
    """The stage in which each run ends: the next one begins there or in the stage behind it."""
    partial: list[tuple[int, ...]] = [()]
    for count, (window, following) in zip(inst.counts, pairwise(inst.windows), strict=False):
        partial = [
            (*ends, end)
            for ends in partial
            for end in window
            if (before := ends[-1] if ends else 0) <= end <= before + count and following.start <= end + 1
        ]
    return ((*ends, inst.stages - 1) for ends in partial)


class _DeviceTimes:
    """Bounds on a device's time for every load, and what its device program has answered.

    Args:
        inst: The program.
        opened: Runs that each chunk of the device may hold.
        most: Time beyond which no load matters.
        shares: Shares of a device's time that its chunks may take at most; None: they make up for each other.
    """

    def __init__(self, inst: Instance, opened: Open, most: float, shares: Sequence[int] | None) -> None:
        self.opened = opened
        self.runs = tuple(sorted({run for runs in opened for run in runs}))
        fast = {run: min(inst.times[run]) for run in self.runs}
        sizes = [min(inst.counts[r], int(most / max(1, fast[r]))) for r in self.runs]
        self._numbers = np.ix_(*(np.arange(size + 1) for size in sizes))
        self.least: Any = self.line(0, fast)
        """By the layers of each of the runs: no assignment of them, or of more, takes less."""
        for at, run in enumerate(self.runs):
            if shares is not None:
                its = sum(share for share, runs in zip(shares, opened, strict=True) if run in runs)
                self.learn(self._numbers[at] * (fast[run] * sum(shares) // its))
            self.least[(slice(None),) * at + (slice(self.needed(run)),)] = UNFIT
        self.answers: dict[Load, Assignment | None] = {}

    def needed(self, run: int) -> int:
        """Layers of a run that the device needs so that no chunk is empty."""
        return sum(runs == (run,) for runs in self.opened)

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
        shares: Shares of a device's time that its chunks may take at most; None: they make up for each other.
    """

    def __init__(self, inst: Instance, effort: Effort, most: float, shares: Sequence[int] | None) -> None:
        self._inst, self._effort, self._most, self._shares = inst, effort, most, shares
        self._opened: dict[Ends, tuple[Open, ...]] = {}
        self._tables: dict[tuple[int, Open], _DeviceTimes] = {}
        self._last = max(range(len(inst.counts)), key=lambda r: inst.counts[r])
        devices = range(len(inst.devices))
        self._tighter = [[e for e in devices if _tighter(inst.devices[e], inst.devices[d])] for d in devices]
        """Per device, those that can hold nothing that it cannot, itself among them."""

    def time(self, piece: Assignment) -> float:
        """The time of a device: that of all chunks, or the least of which no chunk takes more than its share."""
        times = piece.times(self._inst)
        if self._shares is None:
            return sum(times)
        return max(time * sum(self._shares) / share for time, share in zip(times, self._shares, strict=True))

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
            loads = self._dealt(time, tables)
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
            self._tables[key] = _DeviceTimes(self._inst, opened, self._most, self._shares)
            for easier, tighter in enumerate(self._tighter):
                if device in tighter and (known := self._tables.get((easier, opened))) is not None:
                    self._tables[key].learn(known.least)
        return self._tables[key]

    def _assigned(self, time: float, device: int, load: Load, table: _DeviceTimes) -> Assignment | None:
        """An assignment of the load that keeps the time on this device, or on a tighter one."""
        for tighter in self._tighter[device]:
            known = self._tables.get((tighter, table.opened))
            found = None if known is None else known.answers.get(load)
            if found is not None and self.time(found) <= time:
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
        instance, shares = self._inst.devices[device], self._shares
        return fastest(self._inst, instance, load, opened, self._effort, filled=filled, shares=shares)

    def _dealt(self, time: float, tables: Sequence[_DeviceTimes]) -> list[Load] | None:
        """Loads whose bounds are within the time; None if there are none."""
        self._effort.spend(DEAL)
        counts = self._inst.counts
        holders = [sum(r in table.runs for table in tables) for r in range(len(counts))]
        shared = [r for r, number in enumerate(holders) if number > 1 and r != self._last]
        best: Any = np.full([counts[r] + 1 for r in shared], NONE)
        best[(0,) * len(shared)] = 0
        steps = []
        for table in tables:
            some, held = self._choices(time, table, shared)
            if not held:
                return None
            steps.append((best, some, held))
            best = _after(best, some, held)
        total = tuple(counts[r] for r in shared)
        dealt = int(best[total])
        if dealt < counts[self._last]:
            return None
        loads: list[dict[int, int]] = []
        for before, some, held in reversed(steps):
            for numbers, number in zip(some, held, strict=True):
                rest = tuple(max(0, a - n) for a, n in zip(total, numbers, strict=True))
                if before[rest] + number == dealt:
                    break
            total, dealt = rest, dealt - number
            loads.insert(0, dict(zip(shared, numbers, strict=True)) | {self._last: number})
        for run in (*shared, self._last):
            _take(loads, run, sum(load[run] for load in loads) - counts[run], [table.needed(run) for table in tables])
        return [tuple(load.get(r, counts[r]) for r in table.runs) for load, table in zip(loads, tables, strict=True)]

    def _choices(self, time: float, table: _DeviceTimes, shared: Sequence[int]) -> tuple[list[Load], list[int]]:
        """Layers of the other shared runs, a row each, and the most of the last one that bounds allow beside them."""
        fits = table.least <= time
        for at, run in reversed(list(enumerate(table.runs))):
            if run != self._last and run not in shared:  # no other device can hold it
                all_of_it = fits.shape[at] > self._inst.counts[run]
                fits = fits.take(-1, axis=at) & all_of_it
        kept = [run for run in table.runs if run == self._last or run in shared]
        if self._last in kept:
            fits = np.moveaxis(fits, kept.index(self._last), -1)
            kept.remove(self._last)
            held = np.where(fits.any(axis=-1), fits.shape[-1] - 1 - fits[..., ::-1].argmax(axis=-1), -1)
        else:
            held = np.where(fits, 0, -1)
        useful = held >= 0
        for axis in range(held.ndim):
            # Where one layer more is possible beside as many, it is better.
            one_more = np.roll(held, -1, axis=axis)
            one_more[(slice(None),) * axis + (-1,)] = -1
            useful &= one_more < held
        rows = np.argwhere(useful)
        some = np.zeros((len(rows), len(shared)), dtype=np.int64)
        for at, run in enumerate(kept):
            some[:, shared.index(run)] = rows[:, at]
        return [tuple(row) for row in some.tolist()], held[useful].tolist()


def _after(best: Any, some: Sequence[Load], held: Sequence[int]) -> Any:
    """By the layers of the shared runs dealt so far, at least: the most of the last run with one more device."""
    most = [max(numbers) for numbers in zip(*some, strict=True)]
    # What lies before the first state is as good as that.
    padded = best[np.ix_(*(np.maximum(np.arange(-n, size), 0) for n, size in zip(most, best.shape, strict=True)))]
    further: Any = np.full(best.shape, NONE)
    one: Any = np.empty(best.shape, dtype=further.dtype)
    for numbers, number in zip(some, held, strict=True):
        spans = zip(most, numbers, best.shape, strict=True)
        np.add(padded[tuple(slice(m - n, m - n + size) for m, n, size in spans)], number, out=one)
        np.maximum(further, one, out=further)
    return further


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


def _take(loads: Sequence[dict[int, int]], run: int, many: int, needed: Sequence[int]) -> None:
    """Take so many layers of a run away, one from each device in turn, where more than needed are left."""
    while many > 0:
        spare = [load for load, least in zip(loads, needed, strict=True) if load[run] > least]
        if not spare:
            return
        for load in spare[:many]:
            load[run] -= 1
        many -= len(spare[:many])
