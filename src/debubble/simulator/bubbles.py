"""Causes of a compute lane's idle time, moment by moment, and the critical path.

An idle moment is explained by the chain of operations that the device's next operation waits for: whatever runs on
that chain at that moment is what the device waits for.  From it the cause follows:

* `optimizer on the host`: an optimizer step there, or the gradients and parameters that move for it;
* `transfer`: a message, offload, reload or gradient reduction, or a blocking message on the lane itself;
* otherwise `warm-up` before the device's first backward, and `cool-down` after its last forward;
* between them `imbalance`, as long as it sums to no more than the work that the busiest device has more than this
  one, which no order can fill, and `dependency` beyond;
* `overhead`: no operation at all.  Only a measured timeline has it: launch delays, for example.

The causes of a device sum to its idle time exactly.  Recomputation is work, not idle time: `Timeline.recompute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from debubble.ir import Kind, Lane, Moment, Number
from debubble.ir.ops import BACKWARDS
from debubble.simulator.timeline import BUSY_KINDS, TimedOperation, Timeline


class Cause(Enum):
    """The cause for which the compute lane is idle."""

    WARM_UP = "warm-up"
    COOL_DOWN = "cool-down"
    DEPENDENCY = "dependency"
    IMBALANCE = "imbalance"
    TRANSFER = "transfer"
    HOST_OPTIMIZER = "optimizer on the host"
    OVERHEAD = "overhead"

    __hash__ = object.__hash__


class Bubble(NamedTuple):
    """Idle time of one device's compute lane, and what it waits for meanwhile (None: nothing)."""

    device: int
    start: Number
    end: Number
    cause: Cause
    awaited: TimedOperation | None

    @property
    def duration(self) -> Number:
        """End minus start."""
        return self.end - self.start


_ROUNDING = 10**9
"""Differences below this part of the makespan are floats' rounding."""


class _Piece(NamedTuple):
    """Part of a chain: from `start` to `end` this instruction runs (None: none does)."""

    start: Number
    end: Number
    instruction: int | None


def bubbles(timeline: Timeline) -> tuple[tuple[Bubble, ...], ...]:
    """Explain the idle time of every device's compute lane within the makespan of a simulated or measured timeline.

    Per device, its bubbles in order of time; those of one device sum to its idle time exactly.
    """
    return tuple(tuple(_of_device(timeline, device)) for device in range(timeline.program.devices))


def by_cause(idle: Sequence[Bubble]) -> dict[Cause, Number]:
    """Sum bubbles by cause; every cause has an entry."""
    total: dict[Cause, Number] = dict.fromkeys(Cause, 0)
    for bubble in idle:
        total[bubble.cause] += bubble.duration
    return total


def critical_path(timeline: Timeline) -> tuple[TimedOperation, ...]:
    """Return the operations that follow each other without slack from the first start to the last end."""
    pieces = _to_the_end(timeline, min(timeline.starts))
    chain = [timeline.operations[piece.instruction] for piece in pieces if piece.instruction is not None]
    return tuple(reversed(chain))


def _of_device(timeline: Timeline, device: int) -> Iterator[Bubble]:
    lane = timeline.compute[device]
    first_backward = min(o.start for o in lane if o.op.kind in BACKWARDS)
    last_forward = max(o.end for o in lane if o.op.kind is Kind.F)
    unavoidable: Number = max(timeline.busy) - timeline.busy[device]
    if unavoidable < timeline.makespan / _ROUNDING:
        unavoidable = 0
    for start, end, index in _pieces(timeline, device):
        awaited = None if index is None else timeline.operations[index]
        if awaited is None:
            cause = Cause.OVERHEAD
        elif awaited.lane is Lane.HOST or awaited.op.kind in (Kind.D, Kind.P):
            cause = Cause.HOST_OPTIMIZER
        elif awaited.lane is not Lane.COMPUTE or awaited.op.kind not in BUSY_KINDS:
            cause = Cause.TRANSFER
        elif start < first_backward:
            cause = Cause.WARM_UP
        elif start >= last_forward:
            cause = Cause.COOL_DOWN
        else:
            uneven = min(end - start, unavoidable)
            unavoidable -= uneven
            if uneven:
                yield Bubble(device, start, start + uneven, Cause.IMBALANCE, awaited)
            start += uneven
            cause = Cause.DEPENDENCY
        if start < end:
            yield Bubble(device, start, end, cause, awaited)


def _pieces(timeline: Timeline, device: int) -> Iterator[_Piece]:
    """The idle time of a device's compute lane, cut by what it waits for, in order of time."""
    at = min(timeline.starts)
    index = timeline.program.index
    for operation in timeline.compute[device]:
        if operation.start > at:
            yield from reversed(list(_chain(timeline, index[operation.op], at)))
        if operation.op.kind not in BUSY_KINDS and operation.end > operation.start:
            yield _Piece(operation.start, operation.end, index[operation.op])
        at = max(at, operation.end)
    if at < max(timeline.ends):
        yield from reversed(list(_to_the_end(timeline, at)))


def _to_the_end(timeline: Timeline, begin: Number) -> Iterator[_Piece]:
    """The chain that leads to the end of the step, backwards, down to `begin`."""
    last = max(range(len(timeline.ends)), key=timeline.ends.__getitem__)
    start = max(timeline.starts[last], begin)
    if start < timeline.ends[last]:
        yield _Piece(start, timeline.ends[last], last)
    yield from _chain(timeline, last, begin)


def _chain(timeline: Timeline, index: int, begin: Number) -> Iterator[_Piece]:
    """Follow the waits of an instruction's start backwards in time, down to `begin`."""
    before, starts = timeline.program.preceding, timeline.starts
    at = starts[index]
    while at > begin:
        if not before[index]:
            yield _Piece(begin, at, None)
            return
        # Of equals the last, which is the one before it on its own lane: the path changes devices no more than it must.
        waiting = index
        index, moment = max(reversed(before[index]), key=lambda edge: _time(timeline, waiting, *edge))
        happened = max(min(_time(timeline, waiting, index, moment), at), begin)
        if happened < at:
            yield _Piece(happened, at, None)
        at = happened
        start = max(min(starts[index], at), begin)
        if moment is not Moment.START and start < at:
            yield _Piece(start, at, index)
            at = start


def _time(timeline: Timeline, waiting: int, index: int, moment: Moment) -> Number:
    """Time of the moment of an instruction for which another one waits."""
    start, end = timeline.starts[index], timeline.ends[index]
    if moment is Moment.STREAM:
        return max(start, end - timeline.program.instructions[waiting].lead)
    return start if moment is Moment.START else end
