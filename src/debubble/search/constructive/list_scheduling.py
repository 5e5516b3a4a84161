"""List scheduling: builds orders event by event, by a rule, under a memory limit.

Devices act as soon as they are free and something has arrived, and a rule chooses the operation.  Times, messages (as
latency) and memory are those of lowering, so a simulation of the order gives the times computed here.

* `Greedy`: backward before forward, or both alternately, W if nothing else can run.  It never gets stuck: a forward
  leaves memory for the device's later chunks, so that the oldest micro-batch can always continue.
* `GapFilling`: the backward first, then the forward if memory allows, W in gaps.  A W may fill a gap that is shorter
  than itself, or leave it idle.  The better choice depends on the device: one whose work determines the lower bound
  must not idle, and one with less work delays others if it starts too many W.
* `OrderFollowing`: forwards and backwards follow lists, and gaps are filled.  This is the "squeezing" of Qi et al.,
  Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.3, for arbitrary costs.  There operations of a
  repeated block are shifted into earlier gaps; here the full step is dispatched: if the next operation of a device's
  list has not arrived, another listed one that has may overtake it, if memory suffices for all in between, or else a W
  fills the gap.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import floor, inf, lcm
from typing import Any

import numpy as np

from debubble.ir import Kind, Number, Op, Placement
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.ops import CODE
from debubble.search.constructive.dispatch import (
    GAP_FILLING,
    GREEDY,
    INFINITY,
    ORDER_FOLLOWING,
    DispatchInput,
    DispatchRule,
    DispatchState,
    compiled,
    dispatch,
)

ALWAYS_WAIT = -inf
"""`timeout` of a Greedy that waits for the preferred kind whenever its arrival is known."""
NO_OVERTAKING = -inf
"""`filling` of an OrderFollowing without overtaking."""

MIN_COMPILED_OPERATIONS, MIN_LOADING_OPERATIONS = 1_000, 10_000
"""Minimum number of operations for which compiled code pays if numba is already loaded, and if it has to be loaded."""
_MAX_EXACT = 2**53
"""Integers up to this are exact as floats."""


@dataclass(frozen=True)
class Greedy:
    """Backward before forward, or both alternately, oldest micro-batch first; W if nothing else can run.

    Attributes:
        alternate: Whether a device prefers a forward after a backward.
        timeout: A device waits for the preferred kind if the other would delay it by more than this fraction of itself.
        overlap: Fraction of a W by which it may delay an operation known to arrive.
    """

    alternate: bool = True
    timeout: float = 0
    overlap: float = 0


@dataclass(frozen=True)
class GapFilling:
    """Backward before forward, latest stage first; a W if the gap is long enough.

    Attributes:
        min_gap: Minimum gap filled with a W, as a fraction of its time.
        idle: Time that each device may idle after its first backward before it fills every gap; None if unlimited.
    """

    min_gap: Fraction = Fraction(1, 2)
    idle: tuple[Number, ...] | None = None


@dataclass(frozen=True)
class OrderFollowing:
    """Follow lists of forwards and backwards.

    Attributes:
        overlap: Fraction of a W by which it may delay the next listed operation.
        filling: Fraction of an overtaking operation by which it may delay that one; NO_OVERTAKING if none may overtake.
        late: Whether operations may overtake only in the cool-down, after the first stage has started its last forward.
    """

    overlap: float
    filling: float
    late: bool = False


@dataclass(frozen=True)
class ListSchedule:
    """An order of every device's operations, and when they end.

    Attributes:
        makespan: Time from the first start to the last end, in the costs' unit.
        span: Longest time from a device's first start to its own last end.
        scheduler: The scheduler that made it.
        numbers: Per device, the numbers of its operations, in order of their starts.
        times: Per device, the ends of its operations, in the scheduler's time unit.
    """

    makespan: Number
    span: Number
    scheduler: ListScheduler
    numbers: tuple[list[Any], ...]
    times: tuple[list[Any], ...]

    @cached_property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """The compute operations of each device, in order of their starts."""
        return tuple(tuple(map(self.scheduler.operation, order)) for order in self.numbers)

    @cached_property
    def ends(self) -> tuple[tuple[Number, ...], ...]:
        """The ends of the operations of each device, in the costs' unit of time."""
        return tuple(tuple(_in_costs_unit(end, self.scheduler.time_unit) for end in ends) for ends in self.times)


class ListScheduler:
    """Schedules a step with one placement and costs, by any rule.

    Args:
        placement: Stages on devices.
        micro_batches: Micro-batches of the step, m.
        costs: Times and bytes of operations; their memory limits are ignored.
        capacity: Bytes for activations per device; None if unlimited.
        split: Whether backwards are I and W; otherwise they are B.
        exact_sizes: Whether sizes that are floats are summed exactly, as fractions.
    """

    def __init__(
        self,
        placement: Placement,
        micro_batches: int,
        costs: OpCosts,
        capacity: Sequence[Number | None],
        *,
        split: bool = True,
        exact_sizes: bool = False,
    ) -> None:
        self.placement, self.micro_batches = placement, micro_batches
        self.kinds = (Kind.F, Kind.I if split else Kind.B, Kind.W)
        stages, scale = range(placement.stages), costs.costs.micro_batch_scale or (1,) * micro_batches
        time, allocated, freed = self._columns(costs, exact_sizes=exact_sizes)
        device_of = placement.device_of
        # Forwards go up and turn around on the last stage, backwards go down.
        consumer = [*(s + 1 for s in stages[:-1]), 2 * len(stages) - 1, -1, *(len(stages) + s for s in stages[:-1])]
        communication = costs.costs.communication
        message: list[Number] = [
            0 if consumer_track < 0 or device_of[track % len(stages)] == device_of[consumer_track % len(stages)]
            else communication[min(track % len(stages), consumer_track % len(stages))]
            for track, consumer_track in enumerate(consumer)
        ]  # fmt: skip
        times, time_scales, self.time_unit = _as_integers((*time, *message), scale)
        sizes, size_scales, size_unit = _as_integers((*allocated, *freed), scale)
        capacities = [inf if r is None else floor(Fraction(r) / size_unit) if size_unit else float(r) for r in capacity]
        self.input = DispatchInput(
            stages=len(stages),
            micro_batches=micro_batches,
            devices=placement.devices,
            split=split,
            device_of=list(device_of),
            stages_of=[s for stages in placement.stages_of for s in stages],
            stages_begin=[0, *np.cumsum([*map(len, placement.stages_of)]).tolist()],
            consumer=consumer,
            message=times[len(time) :],
            time=times[: len(time)],
            allocated=sizes[: len(allocated)],
            freed=sizes[len(allocated) :],
            time_scale=time_scales,
            size_scale=size_scales,
            capacity=capacities,
        )
        largest = [0, *(r for r in capacities if r < inf)] if size_unit else [0]
        largest += [micro_batches * sum(sizes) * max(size_scales)] if size_unit else []
        largest += [micro_batches * sum(times) * max(time_scales)] if self.time_unit else []
        self._floats_are_exact = max(largest) < _MAX_EXACT

    def schedule(self, rule: Greedy | GapFilling) -> ListSchedule | None:
        """Order all operations by a rule; None if it gets stuck for lack of memory."""
        if isinstance(rule, Greedy):
            return self._run(_rule(GREEDY, 1 - rule.overlap, 1 - rule.timeout, rule.alternate, []), reserve=True)
        idle: Sequence[Number] = rule.idle or [inf] * self.placement.devices
        if self.time_unit:
            # Gaps are integers, so comparing them with the floor gives the same result.
            idle = [i if i == inf else floor(Fraction(i) / self.time_unit) for i in idle]
        return self._run(_rule(GAP_FILLING, rule.min_gap, 0, False, [*idle]), reserve=False)

    def follow(self, lists: Sequence[Sequence[int]], rule: OrderFollowing) -> ListSchedule | None:
        """Dispatch lists of forwards and backwards, given as numbers as in `search.constructive.dispatch`.

        W operations fill gaps.  None if that gets stuck for lack of memory.
        """
        entries = [number for order in lists for number in order]
        position = [0] * (2 * self.placement.stages * self.micro_batches)
        for index, number in enumerate(entries):
            position[number] = index
        starts = [0, *np.cumsum([*map(len, lists)]).tolist()]
        chosen = _rule(ORDER_FOLLOWING, 1 - rule.overlap, 1 - rule.filling, rule.late, [], entries, position, starts)
        return self._run(chosen, reserve=True)

    def number(self, op: Op) -> int:
        """The number of an operation, as in `dispatch`."""
        return (self.kinds.index(op.kind) * self.placement.stages + op.stage) * self.micro_batches + op.micro_batch

    def operation(self, number: int) -> Op:
        """The operation of a number."""
        track, j = divmod(int(number), self.micro_batches)
        kind, stage = divmod(track, self.placement.stages)
        return Op(self.kinds[kind], stage, j)

    def _columns(self, costs: OpCosts, *, exact_sizes: bool) -> tuple[list[Number], list[Number], list[Number]]:
        """(time, allocated, freed) by track."""
        sizes = ("activation", "activation_after_input", "activation_recomputed")
        exact = {name: [Fraction(size) for size in getattr(costs.costs, name)] for name in sizes if exact_sizes}
        plain = costs.costs.replace(micro_batch_scale=None, **exact)
        tables = replace(costs, costs=plain).tables(explicit=False)
        kinds = [CODE[kind] for kind in self.kinds]
        time, allocated, freed = (table[0, kinds, :, 0].ravel().tolist() for table in tables[:3])
        return time, allocated, freed

    def _run(self, rule: DispatchRule, *, reserve: bool) -> ListSchedule | None:
        """Dispatch by a rule; with `reserve` each F also allocates what its I needs, so that no I waits for memory."""
        a, stages = self.input, self.placement.stages
        if reserve:
            forwards, backwards = a.allocated[:stages], a.allocated[stages : 2 * stages]
            reserved = [x + y for x, y in zip(forwards, backwards, strict=True)]
            a = a._replace(allocated=[*reserved, *(0 for _ in range(2 * stages))])
        state, operations = _state(a, rule), (2 + a.split) * stages * self.micro_batches
        is_worthwhile = operations >= (MIN_COMPILED_OPERATIONS if "numba" in sys.modules else MIN_LOADING_OPERATIONS)
        run = compiled() if is_worthwhile and self._floats_are_exact else dispatch
        if run is not dispatch:
            a, rule, state = _arrays(a), _arrays(rule), _arrays(state)
        if run(a, rule, state) < operations:
            return None
        order, end, free, first = map(list, (state.order, state.end, state.compute_end, state.first_start))
        begins = [3 * self.micro_batches * first for first in self.input.stages_begin]
        slices = [slice(begin, begin + length) for begin, length in zip(begins[:-1], state.length, strict=True)]
        spans = [last - begin for last, begin in zip(free, first, strict=True)]
        return ListSchedule(
            makespan=_in_costs_unit(max(free), self.time_unit),
            span=_in_costs_unit(max(spans), self.time_unit),
            scheduler=self,
            numbers=tuple(order[slice_] for slice_ in slices),
            times=tuple(end[slice_] for slice_ in slices),
        )


def _as_integers(values: Sequence[Number], scale: Sequence[Number]) -> tuple[list[Any], list[Any], Fraction | None]:
    """The values and factors as integers by their common denominators, and the unit of their products.

    If one of them is a non-integer float, they are returned as floats, with None for the unit.
    """
    if any(isinstance(x, float) and not x.is_integer() for x in (*values, *scale)):
        return [*map(float, values)], [*map(float, scale)], None
    denominators = [lcm(*(Fraction(x).denominator for x in {*numbers})) for numbers in (values, scale)]
    integers, factors = (
        [int(Fraction(x) * d) for x in xs] for xs, d in zip((values, scale), denominators, strict=True)
    )
    return integers, factors, Fraction(1, denominators[0] * denominators[1])


def _in_costs_unit(time: Any, unit: Fraction | None) -> Number:
    if unit is None:
        return float(time)
    exact = int(time) * unit
    return exact.numerator if exact.denominator == 1 else exact


def _rule(
    kind: int, weight_share: Any, operation_share: Any, flag: bool, idle: list[Any],
    lists: Sequence[int] = (), position: Sequence[int] = (), lists_begin: Sequence[int] = (),
) -> DispatchRule:  # fmt: skip
    shares = float(weight_share), float(operation_share)
    return DispatchRule(kind, *shares, flag, idle, [*lists], [*position], [*lists_begin])


def _state(a: DispatchInput, rule: DispatchRule) -> DispatchState:
    """The state of all devices before the first operation."""
    m, chunks = a.micro_batches, len(a.stages_of)
    arrival = [0] * m + [INFINITY] * (m * (2 * a.stages - 1))
    devices = {name: [0] * a.devices for name in DispatchState._fields}
    weights_begin = [m * first for first in a.stages_begin[:-1]]
    columns = {
        "count": [0] * (3 * a.stages), "arrival": arrival, "weights": [0] * (m * chunks),
        "weights_begin": weights_begin, "weights_end": [*weights_begin], "cursor": rule.lists_begin[:-1],
        "order": [0] * (3 * m * chunks), "end": [0] * (3 * m * chunks),
    }  # fmt: skip
    return DispatchState(**(devices | columns))


_NUMBERS = {
    "message", "time", "allocated", "freed", "time_scale", "size_scale", "capacity", "idle", "arrival", "used",
    "used_by_weights", "freeing", "compute_end", "first_start", "end",
}  # fmt: skip
"""The columns of times and sizes, which are floats in compiled code."""


def _arrays(lists: Any) -> Any:
    """Convert the lists of a tuple to arrays, for compiled code."""
    columns = lists._asdict()
    return lists._replace(
        **{
            name: np.array(column, dtype=np.float64 if name in _NUMBERS else np.int64)
            for name, column in columns.items()
            if isinstance(column, list)
        }
    )
