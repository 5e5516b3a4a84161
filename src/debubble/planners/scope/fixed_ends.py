"""Answers of SCOPE's program in which the stages where long runs end are given.

With several chunks there are many stages in which one of several long runs may end, and the relaxation is about as good
for each.  Once they are given it is known which runs a device may hold in which chunk, and how many layers of each it
can hold in a given time is its own affair (`subproblem.fastest`).  So the layers are dealt by dynamic programming over
the devices, for ever less time: in a second, where the master of the decomposition learns such answers one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from debubble.planners.scope.instance import Instance
from debubble.planners.scope.master import LayerCounts
from debubble.planners.scope.subproblem import Assignment, Open, TimeBound, fastest, time_bound
from debubble.search.effort import LINEAR, Effort

STEP = 2e-3
"""Share of the time by which an answer has to be better than the last one."""
SLACK = 0.3
"""The most time that devices may take over the least, as a share of it."""
AROUND = 2
"""Layers of a run that a device may hold less or more than the mean."""

Load = tuple[int, ...]
"""Layers of each run."""
Dealt = dict[Load, tuple[int, tuple[Load, ...]]]
"""By the layers dealt of all long runs but the last: the most dealt of that, and each device's numbers of all."""


@dataclass(frozen=True)
class DeviceTimes:
    """What the device programs have answered, for all ends: each is asked once."""

    inst: Instance
    effort: Effort
    known: dict[tuple[int, Open, Load], Assignment | None] = field(default_factory=dict)
    cuts: dict[tuple[int, Open], TimeBound | None] = field(default_factory=dict)

    def within(self, time: float, device: int, opened: Open, load: Load) -> bool:
        """Tell whether a device can hold a load in this time."""
        key = device, opened
        if key not in self.cuts:
            self.effort.spend(LINEAR)
            self.cuts[key] = time_bound(self.inst, self.inst.devices[device], load, opened)
        cut = self.cuts[key]
        if cut is not None and cut.at(load) > time:
            return False
        found = self.fastest(device, opened, load)
        return found is not None and sum(found.times(self.inst)) <= time

    def fastest(self, device: int, opened: Open, load: Load) -> Assignment | None:
        """The fastest assignment of a load to a device; None if there is none, or none was found."""
        key = device, opened, load
        if key not in self.known:
            found = fastest(self.inst, self.inst.devices[device], load, opened, self.effort, filled=True)
            self.known[key] = found if found is not None and found.layers else None
        return self.known[key]


@dataclass(frozen=True)
class FixedEnds:
    """The program with given ends.

    Attributes:
        inst: The program.
        long: The runs of more layers than devices, two or more.
        ends: The stage in which each of them ends but the last, and the next begins; what is between stands there too.
    """

    inst: Instance
    long: tuple[int, ...]
    ends: tuple[int, ...]

    @staticmethod
    def choices(inst: Instance) -> list[FixedEnds]:
        """Every choice of ends, those first in which runs end with chunks; none if no two runs are long."""
        long = tuple(r for r, count in enumerate(inst.counts) if count > len(inst.devices))
        if len(long) < 2:
            return []
        p = len(inst.devices)

        def from_a_chunks_end(ends: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
            return sum(min((end + 1) % p, -(end + 1) % p) for end in ends), ends

        choices = itertools.combinations(range(inst.stages - 1), len(long) - 1)
        return [FixedEnds(inst, long, ends) for ends in sorted(choices, key=from_a_chunks_end)]

    @cached_property
    def opened(self) -> tuple[Open, ...]:
        """Per device and chunk, the runs that it may hold."""
        return tuple(tuple(tuple(self._runs(s)) for s in device.stages) for device in self.inst.devices)

    def _runs(self, stage: int) -> Iterator[int]:
        bounds = (0, *self.ends, self.inst.stages - 1)
        for run in range(len(self.inst.counts)):
            at = sum(other < run for other in self.long)
            if run in self.long:
                if bounds[at] <= stage <= bounds[at + 1]:
                    yield run
            elif stage == bounds[at]:
                yield run

    def answer(self, times: DeviceTimes, *, least: float, most: float) -> list[Assignment] | None:
        """The devices' assignments whose slowest takes about the least time.

        Args:
            times: The device programs' answers.
            least: A time below which no device can be the slowest.
            most: The time that it has to stay below.

        Returns:
            None if none was found.
        """
        best: list[Assignment] | None = None
        tried = least
        while not times.effort.over:
            # The first step tells whether there is anything to be had here; then halves.
            time = most - STEP * least if best is None else (tried + most) / 2
            if time - tried < STEP * least:
                break
            found = self._within(time, times)
            if found is not None:
                best, most = found, max(sum(piece.times(self.inst)) for piece in found)
            elif best is None:
                break
            else:
                tried = time
        return best

    def _within(self, time: float, times: DeviceTimes) -> list[Assignment] | None:
        """Assignments with which no device takes longer."""
        numbers = self._dealt(time, times)
        if numbers is None:
            return None
        pieces = [times.fastest(d, self.opened[d], self._load(d, held)) for d, held in enumerate(numbers)]
        return None if None in pieces else [piece for piece in pieces if piece is not None]

    def counts(self, pieces: Sequence[Assignment]) -> LayerCounts:
        """What an answer holds where, in the master's terms."""
        loads = [[0] * len(self.inst.counts) for _ in pieces]
        for load, piece in zip(loads, pieces, strict=True):
            for (_, run, _), number in piece.layers.items():
                load[run] += number
        slowest = max(sum(piece.times(self.inst)) for piece in pieces)
        return LayerCounts(tuple(map(tuple, loads)), self.opened, slowest, bound=0)

    def _dealt(self, time: float, times: DeviceTimes) -> list[Load] | None:
        """Layers of the long runs per device, so that each takes at most `time`; None if they cannot be dealt so."""
        *others, last = (self.inst.counts[run] for run in self.long)
        best: Dealt = {(0,) * len(others): (0, ())}
        for device in range(len(self.inst.devices)):
            further: Dealt = {}
            for some in itertools.product(*(self._around(device, at) for at in range(len(others)))):
                held = self._most(device, some, time, times)
                if held is None:
                    continue
                for dealt, (number, path) in best.items():
                    total = tuple(a + b for a, b in zip(dealt, some, strict=True))
                    fits = all(n <= count for n, count in zip(total, others, strict=True))
                    if fits and number + held > further.get(total, (-1, ()))[0]:
                        further[total] = number + held, (*path, (*some, held))
            best = further
        number, path = best.get(tuple(others), (-1, ()))
        return None if number < last else self._without(number - last, path)

    def _around(self, device: int, at: int) -> range:
        """Numbers of a long run's layers that a device may hold."""
        run = self.long[at]
        holding = [d for d, chunks in enumerate(self.opened) if any(run in runs for runs in chunks)]
        if device not in holding:
            return range(1)
        mean = int(self.inst.counts[run] / len(holding))
        return range(max(self._least(device, at), mean - AROUND), mean + AROUND + 2)

    def _least(self, device: int, at: int) -> int:
        """Layers of a long run that a device needs so that no chunk is empty."""
        return sum(runs == (self.long[at],) for runs in self.opened[device])

    def _most(self, device: int, some: Load, time: float, times: DeviceTimes) -> int | None:
        """The most layers of the last long run that a device holds in `time` beside those of the others."""
        at = len(self.long) - 1
        if not any(self.long[at] in runs for runs in self.opened[device]):
            return 0 if times.within(time, device, self.opened[device], self._load(device, (*some, 0))) else None
        fast = [min(self.inst.times[run]) for run in self.long]
        number = int((time - sum(n * t for n, t in zip(some, fast, strict=False))) / fast[-1])
        for held in range(number, self._least(device, at) - 1, -1):
            if times.within(time, device, self.opened[device], self._load(device, (*some, held))):
                return held
        return None

    def _load(self, device: int, numbers: Sequence[int]) -> Load:
        """Layers of each run on a device that holds so many of the long ones."""
        there = {run for runs in self.opened[device] for run in runs}
        long = dict(zip(self.long, numbers, strict=True))
        return tuple(long.get(r, count if r in there else 0) for r, count in enumerate(self.inst.counts))

    def _without(self, many: int, path: Sequence[Load]) -> list[Load] | None:
        """Take layers of the last long run away, one from each device in turn; None if there are not so many."""
        numbers = list(path)
        at = len(self.long) - 1
        while many > 0:
            spare = [d for d, held in enumerate(numbers) if held[-1] > self._least(d, at)]
            if not spare:
                return None
            for device in spare[:many]:
                *some, held = numbers[device]
                numbers[device] = (*some, held - 1)
            many -= len(spare[:many])
        return numbers
