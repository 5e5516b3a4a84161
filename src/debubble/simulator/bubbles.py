"""Causes of a compute lane's idle time at every moment, and the critical path.

At an idle moment a device waits for the operation that runs at that moment on the chain of dependencies of the device's
next operation.  That operation determines the cause:

* `optimizer on the host`: an optimizer step on the host, or the transfer of its gradients and parameters;
* `transfer`: a message, offload, reload or gradient reduction, or a blocking message on the lane itself;
* otherwise `warm-up` before the device's first backward, and `cool-down` after its last forward;
* in between `imbalance`, up to the difference in work between the busiest device and this one, which no order can fill,
  and `dependency` beyond that;
* `overhead`: no operation, for example a launch delay.  It occurs only in measured timelines.

The causes of a device sum to its idle time exactly.  Recomputation is work, not idle time: see `Timeline.recompute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from debubble.ir import Kind, Lane, Moment, Number
from debubble.ir.ops import BACKWARDS
from debubble.simulator.timeline import BUSY_KINDS, TimedOperation, Timeline


class Cause(Enum):
    """Why the compute lane is idle."""

    WARM_UP = "warm-up"
    COOL_DOWN = "cool-down"
    DEPENDENCY = "dependency"
    IMBALANCE = "imbalance"
    TRANSFER = "transfer"
    HOST_OPTIMIZER = "optimizer on the host"
    OVERHEAD = "overhead"

    __hash__ = object.__hash__


class Bubble(NamedTuple):
    """Idle time of one device's compute lane, and the operation it waits for (None: no operation)."""

    device: int
    start: Number
    end: Number
    cause: Cause
    awaited: TimedOperation | None

    @property
    def duration(self) -> Number:
        """End minus start."""
        return self.end - self.start


_INVERSE_TOLERANCE = 10**9
"""Differences below the makespan divided by this are rounding errors."""


class _Piece(NamedTuple):
    """A piece of a chain, in which this instruction runs from `start` to `end` (None: no instruction)."""

    start: Number
    end: Number
    instruction: int | None


def bubbles(timeline: Timeline) -> tuple[tuple[Bubble, ...], ...]:
    """Explain the idle time of every device's compute lane within the makespan of a simulated or measured timeline.

    Returns each device's bubbles in order of time; they sum to its idle time exactly.
    """
    return tuple(tuple(_bubbles_of_device(timeline, device)) for device in range(timeline.program.devices))


def by_cause(idle: Sequence[Bubble]) -> dict[Cause, Number]:
    """Sum bubbles by cause; every cause has an entry."""
    total: dict[Cause, Number] = dict.fromkeys(Cause, 0)
    for bubble in idle:
        total[bubble.cause] += bubble.duration
    return total


def critical_path(timeline: Timeline) -> tuple[TimedOperation, ...]:
    """The operations that follow each other without slack from the first start to the last end."""
    pieces = _chain_to_end(timeline, min(timeline.starts))
    chain = [timeline.operations[piece.instruction] for piece in pieces if piece.instruction is not None]
    return tuple(reversed(chain))


def _bubbles_of_device(timeline: Timeline, device: int) -> Iterator[Bubble]:
    lane = timeline.compute[device]
    first_backward = min(o.start for o in lane if o.op.kind in BACKWARDS)
    last_forward = max(o.end for o in lane if o.op.kind is Kind.F)
    unavoidable: Number = max(timeline.busy) - timeline.busy[device]
    if unavoidable < timeline.makespan / _INVERSE_TOLERANCE:
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
            imbalance = min(end - start, unavoidable)
            unavoidable -= imbalance
            if imbalance:
                yield Bubble(device, start, start + imbalance, Cause.IMBALANCE, awaited)
            start += imbalance
            cause = Cause.DEPENDENCY
        if start < end:
            yield Bubble(device, start, end, cause, awaited)


def _pieces(timeline: Timeline, device: int) -> Iterator[_Piece]:
    """The idle time of a device's compute lane, divided by the awaited instruction, in order of time."""
    now = min(timeline.starts)
    index = timeline.program.index
    for operation in timeline.compute[device]:
        if operation.start > now:
            yield from reversed(list(_chain(timeline, index[operation.op], now)))
        if operation.op.kind not in BUSY_KINDS and operation.end > operation.start:
            yield _Piece(operation.start, operation.end, index[operation.op])
        now = max(now, operation.end)
    if now < max(timeline.ends):
        yield from reversed(list(_chain_to_end(timeline, now)))


def _chain_to_end(timeline: Timeline, begin: Number) -> Iterator[_Piece]:
    """The chain to the end of the step, backwards in time, down to `begin`."""
    last = max(range(len(timeline.ends)), key=timeline.ends.__getitem__)
    start = max(timeline.starts[last], begin)
    if start < timeline.ends[last]:
        yield _Piece(start, timeline.ends[last], last)
    yield from _chain(timeline, last, begin)


def _chain(timeline: Timeline, index: int, begin: Number) -> Iterator[_Piece]:
    """Follow the dependencies of an instruction's start backwards in time, down to `begin`."""
    predecessors, starts = timeline.program.preceding, timeline.starts
    now = starts[index]
    while now > begin:
        if not predecessors[index]:
            yield _Piece(begin, now, None)
            return
        # Among equals take the last, the previous one on the same lane, so that the path rarely changes devices.
        waiting = index
        index, moment = max(reversed(predecessors[index]), key=lambda edge: _time(timeline, waiting, *edge))
        reached = max(min(_time(timeline, waiting, index, moment), now), begin)
        if reached < now:
            yield _Piece(reached, now, None)
        now = reached
        start = max(min(starts[index], now), begin)
        if moment is not Moment.START and start < now:
            yield _Piece(start, now, index)
            now = start


def _time(timeline: Timeline, waiting: int, index: int, moment: Moment) -> Number:
    """Time of an instruction's moment for which another instruction waits."""
    start, end = timeline.starts[index], timeline.ends[index]
    if moment is Moment.STREAM:
        return max(start, end - timeline.program.instructions[waiting].lead)
    return start if moment is Moment.START else end
