"""A schedule's orders for another number of micro-batches: its middle continues for longer, or for shorter.

The schedule is simulated, and its rate in the middle measured.  More micro-batches do what those in the middle do, each
a period later than the one before; fewer are left where some of the middle are left out; what comes after them moves by
as many periods.  Every device's operations then stand in the order of these times, in which nothing comes before what
it depends on.  What was periodic stays so; all else is as good a start for a search as the middle was regular.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress

from debubble.ir import DebubbleError, InfeasibleError, Kind, Number, Op, Schedule, StageCosts
from debubble.search.problem import OrderProblem
from debubble.simulator import Timeline, simulate

PLACES = 6
"""Places in the middle of a schedule that are tried."""


def resized(schedule: Schedule, problem: OrderProblem) -> Schedule | None:
    """The fastest schedule for a problem of all whose middle is that of a schedule, lengthened or shortened.

    PLACES in the middle half are tried, of the shorter of the two.  The schedule need not fit the memory limit; it
    answers the problem but for the number of micro-batches, which cost the same.  None if nothing fits.
    """
    timeline, short = _simulated(schedule, problem.costs), min(schedule.micro_batches, problem.micro_batches)
    # An offload stands in a list where it ends, everything else where it starts.
    times = {o.op: o.end if o.op.kind is Kind.O else o.start for o in timeline.operations}
    best: tuple[Number, Schedule] | None = None
    places = {short // 4 + short * place // (2 * PLACES) for place in range(PLACES)}
    for at in sorted(places, key=lambda at: abs(at - short // 2)):
        with suppress(DebubbleError):
            candidate = _resized_at(schedule, times, problem, at)
            value = problem.value(candidate)
            if best is None or value < best[0]:
                best = value, candidate
    return None if best is None else best[1]


def _resized_at(schedule: Schedule, times: Mapping[Op, Number], problem: OrderProblem, at: int) -> Schedule:
    """Repeat a micro-batch, or leave out those from it on."""
    period = _period(times, schedule.micro_batches)
    copies: dict[int, list[int]] = defaultdict(list)
    for source, by in _copies(schedule.micro_batches, problem.micro_batches, at=at):
        copies[source].append(by)

    def moved(order: tuple[Op, ...]) -> Iterator[tuple[Number, Op]]:
        for op in order:
            for by in copies[op.micro_batch]:
                yield times[op] + by * period, op._replace(micro_batch=op.micro_batch + by)

    lists = (sorted(moved(order), key=lambda entry: entry[0]) for order in schedule.orders)
    return problem.schedule([op for _, op in order] for order in lists)


def _simulated(schedule: Schedule, costs: StageCosts) -> Timeline:
    try:
        return simulate(schedule, costs)
    except InfeasibleError:
        return simulate(schedule, costs.replace(memory_limit=None))


def _copies(small: int, micro_batches: int, *, at: int) -> Iterator[tuple[int, int]]:
    """Find for each micro-batch of the result the one that it follows, and by how many it is later."""
    more = micro_batches - small
    for j in range(micro_batches):
        if j < at:
            yield j, 0
        elif j < at + more:
            yield at, j - at
        else:
            yield j - more, more


def _period(times: Mapping[Op, Number], micro_batches: int) -> Number:
    """Time from a micro-batch to the next in the middle, on the mean of all operations that two micro-batches share."""
    first, last = micro_batches // 4, micro_batches - 1 - micro_batches // 4
    spans = [
        times[then] - time
        for op, time in times.items()
        if op.micro_batch == first and (then := Op(op.kind, op.stage, last)) in times
    ]
    total: Number = sum(spans)
    return total / (len(spans) * (last - first))
