"""SCOPE's per-chunk reading, weight x (sum of tau_c) + sum T, by branch and bound over the times tau_c of the chunks.

No device may exceed tau_c in chunk c, and `chunk_times` tells whether layers can be dealt within given times and a sum
of times.  If they cannot within some times, they cannot within shorter ones.  So a box of times is empty if its upper
corner is.

That no answer has a value below a goal is proven by boxes which hold the times of every such answer, for all choices
of ends whose relaxation is below the goal.  A linear program, the relaxation with the goal as a limit of its value,
makes a box as small as the times of such answers allow, and bounds their sum; a box that is not empty is halved along
its longest side.  Of a box too small for that the relaxation says how small a value it can have.  Goals come ever
closer to the best answer's value.

Answers come from corners: from those of the relaxations every time is shortened as far as the others allow, and again
with one of them longer by a part of a layer; and from small boxes that are not empty.  The device programs then assign
strategies, and say what it really takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from debubble.papers.scope.program.benders import Decomposition
from debubble.papers.scope.program.chunk_times import ChunkDealer, Times
from debubble.papers.scope.program.ends import Ends, long_runs
from debubble.papers.scope.program.instance import Instance
from debubble.papers.scope.program.loads import Load, dealable, largest_run
from debubble.papers.scope.program.master import LayerCounts, merged
from debubble.papers.scope.program.relaxation import Box, LinearRelaxation, relaxations
from debubble.papers.scope.program.subproblem import Assignment, fastest
from debubble.search.effort import Effort

TOLERANCE = 1e-3
"""Share of the sum of times by which an answer is worth improving, and a bound."""
CLOSE = 1e-3
"""Share of the sum of times to which one of them is shortened."""
SEARCH = 0.95
"""Share of the effort; the program in one piece has the rest."""
STARTS, WALK = 0.1, 0.15
"""Shares of the effort for the relaxations' corners, and of the rest for what is near the best."""
FIRST_WALK, NEAR = 0.7, 1.02
"""Share of the walks' effort for all corners whose sum of times is close to the best one's, and how close that is."""
LOOK = 0.07
"""Share of the rest for answers in small boxes, before a bound is proven."""
STEPS = (0.4, 1.0, 0.15, 2.0, 0.05, 0.7, 1.4, 3.0)
"""Parts of the shortest long layer by which one time is made longer."""
LONGER = 1.15
"""The sum of times over the best one's beyond which nothing is looked for."""
SLACKS = (0.0098, 0.004, 0.002, TOLERANCE)
"""Shares of the value by which an answer is proven to be the best, one after the other."""
PART, LAST_PART = 0.02, 5e-3
"""Shares of the sum of times below which boxes are divided by the ends of the short runs: for answers, which need
them, and for a bound, which mostly does not."""
SMALLEST, LAST_SMALLEST = 5e-4, 4e-4
"""Shares of it below which boxes are not divided, for answers and for a bound."""
USEFUL = 0.7
"""Share of a box's widths that the linear program has to leave at most; else twice as many halves go by without it, and
at least as many as there are chunks."""
FIRST_STEP = 0.01
"""Share by which times are made longer first, and then by twice as much each time, until layers can be dealt."""


def per_chunk_reading(inst: Instance, pooled: Decomposition, effort: Effort) -> Decomposition:
    """The best answer and bound that the effort finds; it begins with the pooled answer, its chunks evened out."""
    if pooled.counts is None:
        return replace(pooled, layers=None, value=float("inf"))
    effort = effort.part(SEARCH * effort.left)
    search = _Search(inst, _evened(inst, pooled.assignments, pooled.counts, effort), effort)
    bound = pooled.bound
    if dealable(inst):
        search.descend()
        search.walk()
        search.look(LOOK)
        bound = max(bound, int(search.bound()))
        search.look(1.0)
    layers = merged([piece.layers for piece in search.best], inst)
    return Decomposition(layers, _value(inst, search.best), bound)


def _evened(inst: Instance, answers: Sequence[Assignment], counts: LayerCounts, effort: Effort) -> list[Assignment]:
    """Device by device, move layers between chunks so that they exceed by least what the slowest ones take already."""
    slowest = answers[0].times(inst)
    pieces = []
    for device, load, opened, answer in zip(inst.devices, counts.loads, counts.opened, answers, strict=True):
        other = fastest(inst, device, load, opened, effort, filled=True, caps=slowest)
        piece = other if other is not None and other.layers else answer
        slowest = [max(pair) for pair in zip(slowest, piece.times(inst), strict=True)]
        pieces.append(piece)
    return pieces


def _slowest(inst: Instance, pieces: Sequence[Assignment]) -> Times:
    return tuple(max(times) for times in zip(*(piece.times(inst) for piece in pieces), strict=True))


def _value(inst: Instance, pieces: Sequence[Assignment]) -> int:
    return inst.weight * sum(_slowest(inst, pieces)) + sum(sum(piece.times(inst)) for piece in pieces)


class _Search:
    """The best answer so far, and the corners that led to answers.

    Args:
        inst: The program.
        best: Some answer.
        effort: Counter of the work.
    """

    def __init__(self, inst: Instance, best: list[Assignment], effort: Effort) -> None:
        self._inst, self._effort, self.best = inst, effort, best
        self._total = sum(_slowest(inst, best))
        self._dealer = ChunkDealer(inst, effort, max(LONGER * self._total, _value(inst, best) / inst.weight))
        self._corners: list[tuple[int, Times, Ends]] = []
        self._relaxations = relaxations(inst, effort)
        self._grid = max(1, int(SMALLEST * self._total / 2))
        self._assigned: set[tuple[Ends | Load, ...]] = set()
        self._programs: dict[Ends, LinearRelaxation] = {}
        self._layer_times: dict[Ends, list[list[tuple[int, float]]]] = {}

    def descend(self) -> None:
        """Shorten the times of the relaxations' corners, the most promising first."""
        until = self._effort.spent + STARTS * self._effort.left
        for relaxation, ends in self._relaxations:
            if self._effort.spent > until or self._effort.over:
                break
            times = self._multiple(relaxation.slowest, ends)
            if times is not None:
                times = self._shortened(times, ends, range(self._inst.chunks))
                self._corners.append((sum(times), times, ends))
        self._corners.sort(key=lambda corner: corner[0])

    def _multiple(self, times: Sequence[float], ends: Ends) -> Times | None:
        """The least multiple of these times within which layers can be dealt; None if it is too long."""
        most = LONGER * min([self._total, *(total for total, _, _ in self._corners)]) / sum(times)

        def multiple(factor: float) -> Times:
            return tuple(int(factor * time) for time in times)

        def fits(factor: float) -> bool:
            return self._dealer.loads(multiple(factor), ends) is not None

        few, many, step = 0.0, min(1.0, most), FIRST_STEP
        while not fits(many):
            if many >= most:
                return None
            few, many, step = many, min(most, (1 + step) * many), 2 * step
        while few and many - few > CLOSE * many:
            middle = (few + many) / 2
            few, many = (few, middle) if fits(middle) else (middle, many)
        return multiple(many)

    def _shortened(self, times: Times, ends: Ends, chunks: Sequence[int]) -> Times:
        """Times within which layers can be dealt, each in turn made as short as the others allow."""
        close = max(1, int(CLOSE * self._total))

        def fits(chunk: int, time: int) -> bool:
            return self._dealer.loads(_with(times, chunk, time), ends) is not None

        for chunk in chunks:
            most = times[chunk]
            step = close
            while most > step and fits(chunk, most - step):
                most, step = most - step, 2 * step
            least = max(0, most - step)
            while most - least > close:
                middle = (least + most) // 2
                least, most = (least, middle) if fits(chunk, middle) else (middle, most)
            times = _with(times, chunk, most)
        return times

    def walk(self) -> None:
        """Go on from the best corners, as long as one time longer makes the sum shorter; then assign strategies."""
        start, share = self._effort.spent, WALK * self._effort.left
        near = [corner for corner in self._corners if corner[0] <= NEAR * self._corners[0][0]]
        self._corners = []
        for at, (_, times, ends) in enumerate(near, start=1):
            times = self._walked(times, ends, start + FIRST_WALK * share * at / len(near))
            self._corners.append((sum(times), times, ends))
        self._corners.sort(key=lambda corner: corner[0])
        until = start + share
        for total, times, ends in self._corners:
            if total > self._total or self._effort.spent > until or self._effort.over:
                break
            times, ends = self._with_all_ends(times, ends)
            if not ends.members:
                self._assign(self._walked(times, ends, (self._effort.spent + until) / 2), ends)

    def _with_all_ends(self, times: Times, ends: Ends) -> tuple[Times, Ends]:
        """Times as long as the ends of short runs need, chosen run by run, and these ends."""
        while parts := ends.parts:
            multiples = [(each, part) for part in parts if (each := self._multiple(times, part)) is not None]
            if not multiples:
                break
            times, ends = min(multiples, key=lambda pair: sum(pair[0]))
        return self._shortened(times, ends, range(self._inst.chunks)), ends

    def _walked(self, times: Times, ends: Ends, until: float) -> Times:
        """Times with a shorter sum, as long as there are some near."""
        near = self._near(times)
        while self._effort.spent < until and not self._effort.over:
            found = next(near, None)
            if found is None:
                break
            longer, chunks = found
            other = self._shortened(longer, ends, chunks)
            if sum(other) < (1 - CLOSE) * sum(times):
                times, near = other, self._near(other)
        return times

    def _near(self, times: Times) -> Iterator[tuple[Times, list[int]]]:
        """Times of which one is longer, and the order in which they are to be made shorter: that one last."""
        inst = self._inst
        layer = inst.shortest[largest_run(inst.counts)]
        for step in STEPS:
            for chunk in range(inst.chunks):
                others = [each for each in range(inst.chunks) if each != chunk]
                for order in (others[::-1], others)[: len(others)]:
                    yield _with(times, chunk, times[chunk] + int(step * layer)), [*order, chunk]

    def _assign(self, times: Times, ends: Ends) -> bool:
        """Let the device programs assign strategies within these times, as far as they can; tell if that is better."""
        inst = self._inst
        loads = self._dealer.loads(times, ends)
        if loads is None or (ends, *loads) in self._assigned:
            return False
        self._assigned.add((ends, *loads))
        pieces = []
        for device, load, opened in zip(inst.devices, loads, ends.opened(inst), strict=True):
            full = [0] * len(inst.counts)
            for run, number in zip(sorted({r for runs in opened for r in runs}), load, strict=True):
                full[run] = number
            piece = fastest(inst, device, full, opened, self._effort, filled=True, caps=times)
            if piece is None or not piece.layers:
                return False
            pieces.append(piece)
        better = _value(inst, pieces) < _value(inst, self.best)
        if better:
            self.best, self._total = pieces, sum(_slowest(inst, pieces))
        return better

    def look(self, share: float) -> None:
        """Look for answers with a smaller sum of times in small boxes, with a share of what is left of the effort."""
        until = self._effort.spent + share * self._effort.left
        for slack in SLACKS:
            total = None
            while self._total != total:  # again where a better answer was found
                total, goal = self._total, int((1 - slack) * self._total)
                boxes = [(ends, self._every(goal)) for relaxation, ends in self._relaxations[::-1]
                         if relaxation.bound < _value(self._inst, self.best)]  # fmt: skip
                while boxes and self._total == total:
                    if self._effort.over or self._effort.spent > until:
                        return
                    ends, box = boxes.pop()
                    if self._dealer.loads(box.high, ends, box.total) is not None:
                        smaller = self._parts(ends, box, proving=False)
                        boxes += smaller
                        if not smaller:
                            self._assign(box.high, ends)

    def _every(self, total: int) -> Box:
        shortest = min(self._inst.shortest)
        return Box((shortest,) * self._inst.chunks, (total,) * self._inst.chunks, total).clipped()

    def _parts(self, ends: Ends, box: Box, *, proving: bool) -> list[tuple[Ends, Box]]:
        """Smaller boxes that hold the same together, the most promising last; none if this one is small."""
        part, smallest = (LAST_PART, LAST_SMALLEST) if proving else (PART, SMALLEST)
        width = box.width(box.widest)
        if ends.members and width < part * box.total:
            return [(each, box) for each in ends.parts]
        if width < smallest * box.total:
            return []
        steps = self._steps(ends) if proving else [[]] * self._inst.chunks
        return [(ends, half) for half in box.divided(self._grid, steps)]

    def _steps(self, ends: Ends) -> list[list[tuple[int, float]]]:
        """Per chunk, the times of a layer of the long runs that it may hold, and the shares of devices where it may."""
        if ends not in self._layer_times:
            opened = ends.opened(self._inst)
            self._layer_times[ends] = [
                [(self._dealer.step(run), share) for run in long_runs(self._inst)
                 if (share := sum(run in each[chunk] for each in opened) / len(opened))]
                for chunk in range(self._inst.chunks)
            ]  # fmt: skip
        return self._layer_times[ends]

    def bound(self) -> float:
        """A value that no answer is below."""
        proven = 0.0
        for slack in SLACKS:
            value = None
            while _value(self._inst, self.best) != value:  # again where a better answer was found
                value = _value(self._inst, self.best)
                goal = (1 - slack) * value
                least = self._least_below(goal, proven)
            proven = max(proven, least)
            if least < goal:
                break
        return proven

    def _least_below(self, goal: float, proven: float) -> float:
        """A value, the goal at most, that no answer is below; 0 if the effort does not tell.

        It ends early where it is not above what is proven, and where a better answer is found.
        """
        least = goal
        # The most promising ends come last, and are the first to be taken.
        boxes = [
            (ends, self._every(int(goal / self._inst.weight)), 0, self._inst.chunks)
            for relaxation, ends in self._relaxations[::-1]
            if relaxation.bound < goal
        ]
        while boxes and least > proven:
            if self._effort.over:
                return 0.0
            ends, box, unasked, patience = boxes.pop()
            if unasked == 0:
                smaller = self._program(ends).ranges(box, least)
                if smaller is None:
                    continue
                patience = self._inst.chunks if smaller.size <= USEFUL * box.size else 2 * patience
                box, unasked = smaller.rounded(self._grid, box).clipped(), patience
            if self._dealer.loads(box.high, ends, box.total) is None:
                continue
            parts = self._parts(ends, box, proving=True)
            boxes += [(part, half, 0 if part is not ends else unasked - 1, patience) for part, half in parts]
            if not parts and (value := self._program(ends).value(box)) < least:
                if self._assign(box.high, ends):
                    return 0.0
                least = value
        return least

    def _program(self, ends: Ends) -> LinearRelaxation:
        if ends not in self._programs:
            self._programs[ends] = LinearRelaxation(self._inst, self._effort, ends.opened(self._inst), per_chunk=True)
        return self._programs[ends]


def _with(times: Times, chunk: int, time: int) -> Times:
    return (*times[:chunk], time, *times[chunk + 1 :])
