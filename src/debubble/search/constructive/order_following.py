"""Dispatching by given orders: forwards and backwards keep to their lists, and gaps are filled.

Source: the "squeezing" of Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.3, for any
costs.  There a repeated block's operations are shifted into earlier holes; here the whole step is dispatched event by
event, and where the next operation of a device's list has not arrived, another one of the list that has may overtake
it, if memory suffices for all between them, or else a W fills the gap.

An operation is a (track, micro-batch).  Track 2 s are the forwards of stage s, 2 s + 1 its backwards; on a track
micro-batches come in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from math import floor, inf, lcm

from debubble.ir import Kind, Number, Op, Placement, StageCosts

Passage = tuple[int, int]
"""A track and a micro-batch."""

PATIENT = -inf
"""`filling` with which nothing ever overtakes."""


@dataclass(frozen=True)
class Manner:
    """How lists are followed."""

    overlap: float
    """The share of a W by which it may delay the next operation of the list."""
    filling: float
    """The share of itself by which an operation that overtakes may; PATIENT: none ever does."""
    late: bool = False
    """Nothing overtakes before the first stage has started its last forward: in the cool-down memory is left."""


@dataclass(frozen=True)
class Outcome:
    """Per device the passages and, as track -1 - s, the W of stage s in the order of their starts; what they take."""

    lists: tuple[list[Passage], ...]
    makespan: Number
    span: Number

    @property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """Per device, its operations."""
        return tuple(tuple(_op(track, j) for track, j in passages) for passages in self.lists)


def _op(track: int, j: int) -> Op:
    return Op(Kind.W, -1 - track, j) if track < 0 else Op(Kind.I if track % 2 else Kind.F, track // 2, j)


class Step:
    """The numbers of one step, laid out by track.  `room[d]`: bytes for activations, None for any number."""

    def __init__(
        self, placement: Placement, micro_batches: int, costs: StageCosts, room: Sequence[Number | None]
    ) -> None:
        stages = range(placement.stages)
        self.placement, self.micro_batches = placement, micro_batches
        self.scale = [_quick(costs.scale_of(j)) for j in range(micro_batches)]
        self.time = [_quick(x[s]) for s in stages for x in (costs.forward, costs.backward_input)]
        self.weight_time = [_quick(x) for x in costs.backward_weight]
        self.tracks = [[2 * s + b for s in held for b in (0, 1)] for held in placement.stages_of]
        self.device_of = [d for d in placement.device_of for _ in (0, 1)]
        self.next = [t for s in stages for t in (2 * s + 2 if s + 1 in stages else 2 * s + 1, 2 * s - 1)]
        self.message: list[Number] = [
            0 if to < 0 or self.device_of[to] == self.device_of[t] else _quick(costs.communication[min(t, to) // 2])
            for t, to in enumerate(self.next)
        ]
        size = tuple(map(max, costs.activation, costs.activation_after_input))
        whole, rest, limits = _in_whole_units(size, costs.activation_after_input, room, costs.micro_batch_scale or (1,))
        self.allocated = [x for s in stages for x in (whole[s], 0)]
        self.freed = [x for s in stages for x in (0, whole[s] - rest[s])]
        self.kept, self.room = rest, limits


def _quick(number: Number) -> Number:
    """The same number, or nearly, of a type that is quick to add."""
    return float(number) if isinstance(number, Fraction) else number


def _in_whole_units(
    size: Sequence[Number], kept: Sequence[Number], room: Sequence[Number | None], scale: Sequence[Number]
) -> tuple[list[int], list[int], list[float]]:
    """Sizes and room as exact multiples of one unit, which integers add up quickly."""
    unit = lcm(*(Fraction(x).denominator for x in (*size, *kept)))
    finest = lcm(*(Fraction(x).denominator for x in scale))
    whole, rest = ([int(Fraction(x) * unit) for x in sizes] for sizes in (size, kept))
    return whole, rest, [inf if r is None else floor(Fraction(r) * unit * finest) / finest for r in room]


def follow(step: Step, lists: Sequence[Sequence[Passage]], manner: Manner) -> Outcome | None:
    """Dispatch a step by per-device lists of forwards and backwards; None if that gets stuck for lack of memory."""
    return _Run(step, lists, manner)()


class _Run:
    """The state of all devices."""

    def __init__(self, step: Step, lists: Sequence[Sequence[Passage]], manner: Manner) -> None:
        devices = range(step.placement.devices)
        self.step, self.lists = step, lists
        self.time, self.scale, self.allocated, self.room = step.time, step.scale, step.allocated, step.room
        self.weight_share, self.share = 1 - manner.overlap, 1 - manner.filling
        self.forwards_until_filling = step.micro_batches if manner.late else 0
        self.at = [0 for _ in devices]
        self.count = [0 for _ in step.time]
        """Per track, micro-batches that have started."""
        self.arrived: list[list[Number]] = [[] for _ in step.time]
        self.arrived[0] = [0] * step.micro_batches
        self.place: list[list[int]] = [[0] * step.micro_batches for _ in step.time]
        """Where in its list each passage is."""
        for passages in lists:
            for index, (track, j) in enumerate(passages):
                self.place[track][j] = index
        self.owed: list[deque[Passage]] = [deque() for _ in devices]
        self.held: list[Number] = [0 for _ in devices]
        self.held_by_owed: list[Number] = [0 for _ in devices]
        self.freeing: list[Number] = [0 for _ in devices]
        self.free: list[Number] = [0 for _ in devices]
        self.first: list[Number] = [inf for _ in devices]
        self.done: tuple[list[Passage], ...] = tuple([] for _ in devices)
        self.events: list[tuple[Number, int]] = [(0, d) for d in devices]

    def __call__(self) -> Outcome | None:
        events, free, held, freeing, done = self.events, self.free, self.held, self.freeing, self.done
        while events:
            now, d = heappop(events)
            if free[d] > now:
                continue
            if freeing[d]:
                held[d] -= freeing[d]
                freeing[d] = 0
            passage = self.choose(d, now)
            if passage is not None:
                done[d].append(passage)
                free[d] = end = self.start(passage, d, now)
                heappush(events, (end, d))
        if sum(map(len, done)) < 3 * self.step.placement.stages * self.step.micro_batches:
            return None
        return Outcome(done, max(free), max(end - begin for end, begin in zip(free, self.first, strict=True)))

    def choose(self, d: int, now: Number) -> Passage | None:
        """What a free device starts now; None: it waits for the next arrival."""
        owed, passages, at, count = self.owed[d], self.lists[d], self.at[d], self.count
        while at < len(passages) and passages[at][1] < count[passages[at][0]]:
            at += 1
        self.at[d] = at
        if at == len(passages):
            return owed[0] if owed else None
        wanted = track, j = passages[at]
        arrivals = self.arrived[track]
        when = arrivals[j] if j < len(arrivals) else inf
        if self.held[d] + self.allocated[track] * self.scale[j] > self.room[d]:
            if owed:
                return owed[0]
            when = inf
        if when <= now:
            return wanted
        gap = when - now
        if self.share < inf and count[0] >= self.forwards_until_filling:
            overtaking = self.overtaking(d, now, gap)
            if overtaking is not None:
                return overtaking
        if owed:
            track, j = owed[0]
            if gap >= self.step.weight_time[-1 - track] * self.scale[j] * self.weight_share:
                return owed[0]
        return None

    def overtaking(self, d: int, now: Number, gap: Number) -> Passage | None:
        """The first of the list that has arrived, fits into the gap, and leaves memory for all before it."""
        best: Passage | None = None
        first: float = inf
        for track in self.step.tracks[d]:
            j, arrivals = self.count[track], self.arrived[track]
            if j < len(arrivals) and arrivals[j] <= now:
                place = self.place[track][j]
                fits = place < first and gap >= self.time[track] * self.scale[j] * self.share
                if fits and (track % 2 or self.spares(d, track, j)):
                    best, first = (track, j), place
        return best

    def spares(self, d: int, track: int, j: int) -> bool:
        """Whether a forward that starts now leaves memory for what comes before it in the list."""
        room, allocated, scale = self.room[d], self.allocated, self.scale
        new = allocated[track] * scale[j]
        if self.held[d] + new > room:
            return False
        held = self.held[d] - self.held_by_owed[d] + new
        for other, k in self.lists[d][self.at[d] : self.place[track][j]]:
            if k >= self.count[other]:
                if other % 2:
                    held -= allocated[other - 1] * scale[k]
                else:
                    held += allocated[other] * scale[k]
                    if held > room:
                        return False
        return True

    def start(self, passage: Passage, d: int, now: Number) -> Number:
        """When it will have ended."""
        track, j = passage
        step, scale = self.step, self.scale[j]
        if track < 0:
            self.owed[d].popleft()
            self.freeing[d] = kept = step.kept[-1 - track] * scale
            self.held_by_owed[d] -= kept
            return now + step.weight_time[-1 - track] * scale
        if track % 2:
            self.freeing[d] = step.freed[track] * scale
            self.held_by_owed[d] += step.kept[track // 2] * scale
            self.owed[d].append((-1 - track // 2, j))
        else:
            self.held[d] += self.allocated[track] * scale
            if now < self.first[d]:
                self.first[d] = now
        self.count[track] = j + 1
        end = now + self.time[track] * scale
        following = step.next[track]
        if following >= 0:
            to = step.device_of[following]
            arrival = end + step.message[track] * scale
            self.arrived[following].append(arrival)
            # A busy device looks again when it ends.
            if to != d and arrival >= self.free[to]:
                heappush(self.events, (arrival, to))
        return end
