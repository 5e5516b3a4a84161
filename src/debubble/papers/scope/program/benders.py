"""SCOPE's program at scale: logic-based Benders decomposition (Hooker and Ottosson, 2003) by device.

Once it is known how many layers of each run a device holds, and which runs its chunks may hold, its strategies are its
own affair.  So a master places layers without strategies, against bounds on the devices' times; the device programs
say what its answer really takes, and teach it better bounds where that is more.  The master's optimum bounds the
program from below, the device programs' answers together are a feasible one, and the two meet: mostly within 0.1%
in a few rounds, where the program in one piece is left with gaps of tens of per cent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.papers.scope.program.deals import Deal, deal
from debubble.papers.scope.program.ends import long_runs
from debubble.papers.scope.program.instance import Instance
from debubble.papers.scope.program.master import LayerCounts, Master, merged, widest
from debubble.papers.scope.program.relaxation import relaxations, relaxed
from debubble.papers.scope.program.subproblem import Assignment, Open, fastest, time_bound
from debubble.search.effort import LINEAR, Effort

TOLERANCE = 1e-3
"""Relative gap at which the decomposition stops."""
LOOSE = 0.01
"""Relative gap at which the master's first answers are good enough: it still has much to learn."""
ROUNDS = 24
PATIENCE = 9.0
"""Effort for one answer of the master."""
SLACK = 0.3
"""Time that the slowest device may take over the relaxation's, as a share of it, in what is dealt."""
FIRST, FIRST_AT_LEAST = 0.4, 1.0
"""Share of the effort for dealing, and effort, for the most promising ends, before all others."""
PROBES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Shares of the mean work at which a device's first cuts are tight."""

Layers = list[list[list[int]]]
"""`layers[run][option][stage]`."""


@dataclass(frozen=True)
class Decomposition:
    """The best assignment known, if any, its objective, and the bound: weight x (max T) + sum T in time units."""

    layers: Layers | None
    value: float
    bound: int
    assignments: tuple[Assignment, ...] = ()
    counts: LayerCounts | None = None

    @property
    def gap(self) -> float:
        """Relative to the value; 1 if nothing is known."""
        return 1.0 - self.bound / self.value if self.layers is not None else 1.0


def decompose(inst: Instance, *, effort: Effort, seed: int) -> Decomposition:
    """The pooled program's answer by decomposition, as good as it gets with that effort.

    With several chunks the master has many places where one of several long runs may end, and learns them one by one.
    So layers are dealt there first (`deals`), and the master has its turn only if that leaves much.
    """
    start = Decomposition(None, float("inf"), 0)
    if inst.chunks > 1 and len(long_runs(inst)) > 1:
        start = _dealt(inst, effort)
    return start if start.gap <= LOOSE else _rounds(_BendersSearch(inst, effort), start, effort=effort, seed=seed)


def _dealt(inst: Instance, effort: Effort) -> Decomposition:
    """What dealing finds, and its bound: that of the relaxation in which the slowest device takes as long as proven."""
    relaxation = relaxed(inst, effort)
    if relaxation is None:
        return Decomposition(None, float("inf"), 0)
    slowest = sum(relaxation.slowest)
    most, first = (1 + SLACK) * slowest, effort.part(max(FIRST_AT_LEAST, FIRST * effort.left))
    programs = [ends for _, ends in relaxations(inst, first)[:1]]
    _, start = deal(inst, first, least=slowest, most=most, programs=programs) if programs else (0.0, None)
    if start is not None:
        most = max(sum(piece.times(inst)) for piece in start.pieces)
    least, dealt = deal(inst, effort, least=slowest, most=most, start=start)
    proven = relaxed(inst, effort, least=least)
    bound = max(relaxation.bound, proven.bound if proven is not None else 0)
    if dealt is None:
        return Decomposition(None, float("inf"), bound)
    times = [sum(piece.times(inst)) for piece in dealt.pieces]
    layers = merged([piece.layers for piece in dealt.pieces], inst)
    return Decomposition(layers, inst.weight * max(times) + sum(times), bound, dealt.pieces, _counts(inst, dealt))


def _counts(inst: Instance, dealt: Deal) -> LayerCounts:
    """What an answer holds where, in the master's terms."""
    loads = [[0] * len(inst.counts) for _ in dealt.pieces]
    for load, piece in zip(loads, dealt.pieces, strict=True):
        for (_, run, _), number in piece.layers.items():
            load[run] += number
    slowest = max(sum(piece.times(inst)) for piece in dealt.pieces)
    return LayerCounts(tuple(map(tuple, loads)), dealt.opened, slowest, bound=0)


def _rounds(search: _BendersSearch, best: Decomposition, *, effort: Effort, seed: int) -> Decomposition:
    """Go on from the best assignment known; the bound of the result is one of the search's program."""
    inst = search.inst
    for _ in range(ROUNDS):
        if effort.over:
            break
        gap = max(TOLERANCE / 3, min(LOOSE, best.gap / 10))
        counts = search.master.solve(effort.part(PATIENCE), gap=gap, seed=seed)
        if counts is None:
            break
        best = replace(best, bound=max(best.bound, counts.bound))
        assignments = search.priced(counts)
        if assignments is not None:
            times = [sum(a.times(inst)) for a in assignments]
            value = inst.weight * max(times) + sum(times)
            if value < best.value:
                layers = merged([a.layers for a in assignments], inst)
                best = Decomposition(layers, value, best.bound, tuple(assignments), counts)
        if best.gap <= TOLERANCE:
            break
    return best


class _BendersSearch:
    """The master and what the devices have answered so far."""

    def __init__(self, inst: Instance, effort: Effort) -> None:
        self.inst, self.effort = inst, effort
        self.master = Master(inst)
        self._answers: dict[tuple[int, tuple[int, ...], Open], Assignment | None] = {}
        self._probed: set[tuple[int, Open]] = set()
        for device in range(len(inst.devices)):
            self._probe(device, widest(inst, device))

    def priced(self, counts: LayerCounts) -> list[Assignment] | None:
        """Solve every device for the counts and teach the master; None if a device cannot hold its layers."""
        asked = list(enumerate(zip(counts.loads, counts.opened, strict=True)))
        for device, (_, opened) in asked:
            self._probe(device, opened)
        answers = [self._answer(device, load, opened) for device, (load, opened) in asked]
        for device, (load, opened) in asked:
            answer = answers[device]
            if answer is None or sum(answer.times(self.inst)) > counts.slowest * (1 + TOLERANCE):
                # The master would only move the same layers elsewhere.
                for other in range(len(self.inst.devices)):
                    if self._may_hold(other, opened):
                        self._answer(other, load, opened)
        return None if None in answers else [a for a in answers if a is not None]

    def _may_hold(self, device: int, opened: Open) -> bool:
        return all(set(some) <= set(runs) for some, runs in zip(opened, widest(self.inst, device), strict=True))

    def _answer(self, device: int, load: tuple[int, ...], opened: Open) -> Assignment | None:
        key = (device, load, opened)
        if key not in self._answers:
            self._learn(device, opened, load)
            # Layers taken from an answer may leave a chunk empty; only so are fewer layers never slower.
            answer = fastest(self.inst, self.inst.devices[device], load, opened, self.effort, filled=False)
            self.master.learn_time(device, opened, load, None if answer is None else answer.bound, exactly=False)
            if answer is not None and len(answer.fills) < self.inst.chunks:
                answer = fastest(self.inst, self.inst.devices[device], load, opened, self.effort, filled=True)
                # Of layers of one run, one can always be taken from a chunk that holds two.
                several = len({run for runs in opened for run in runs}) > 1
                self.master.learn_time(device, opened, load, None if answer is None else answer.bound, exactly=several)
            self._answers[key] = answer if answer is not None and answer.layers else None
        return self._answers[key]

    def _probe(self, device: int, opened: Open) -> None:
        """Cuts all over the range of layers that a device may come to hold."""
        if (device, opened) not in self._probed:
            self._probed.add((device, opened))
            for load in _probes(self.inst, opened):
                if self.effort.over:  # many runs make many and large programs
                    break
                self._learn(device, opened, load)

    def _learn(self, device: int, opened: Open, load: Sequence[int]) -> None:
        self.effort.spend(LINEAR)
        bound = time_bound(self.inst, self.inst.devices[device], load, opened)
        if bound is not None:
            self.master.learn(device, opened, bound)


def _probes(inst: Instance, opened: Open) -> Iterator[tuple[int, ...]]:
    """Layers per run: shares of the mean work, all of one run."""
    mean = sum(count * min(times) for count, times in zip(inst.counts, inst.times, strict=True)) / len(inst.devices)
    for run in sorted({run for runs in opened for run in runs}):
        if inst.counts[run] > 1:
            for share in PROBES:
                number = max(inst.chunks, round(share * mean / inst.shortest[run]))
                yield tuple(min(inst.counts[run], number) if r == run else 0 for r in range(len(inst.counts)))
