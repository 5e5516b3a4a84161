"""List scheduling: orders that are made event by event, by a rule, under a limit of memory.

Devices act as soon as they are free and something has arrived, and a rule chooses what.  Times, messages (as latency)
and memory are those of lowering, so that the order that comes out takes, simulated, the times that are said here.

* `Greedy`: backward before forward, or the two in turn, W where nothing waits.  It never gets stuck: a forward leaves
  room for the device's later chunks, so that the oldest micro-batch can always continue.
* `GapFilling`: the backward first, then the forward if memory allows, W in gaps.  A W may fill a gap that is shorter
  than itself, or leave it idle.  What that costs depends on the device: one whose work alone makes up the lower bound
  has no time to lose, and one with less work delays others if it begins a W too many.
* `OrderFollowing`: forwards and backwards keep to given lists, and gaps are filled.  This is the "squeezing" of Qi et
  al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024, section 3.3, for any costs.  There a repeated
  block's operations are shifted into earlier holes; here the whole step is dispatched, and where the next operation of
  a device's list has not arrived, another one of the list that has may overtake it, if memory suffices for all between
  them, or else a W fills the gap.
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

STRICT = -inf
"""Patience of a Greedy that waits for the wanted kind as long as its arrival is known."""
PATIENT = -inf
"""`filling` of an OrderFollowing in which nothing ever overtakes."""

COMPILED_FROM, LOADS_FROM = 1_000, 10_000
"""Operations from which compiled code pays where numba is loaded already, and those from which loading it does."""
_EXACT = 2**53
"""Whole numbers up to it are exact as floats."""


@dataclass(frozen=True)
class Greedy:
    """Backward before forward, or the two in turn; of several chunks the oldest micro-batch; W where nothing waits.

    Attributes:
        in_turn: Once its backwards have begun, a device wants a forward after a backward.
        timeout: The wanted kind may be awaited while the other would delay it by more than this share of itself.
        overlap: Share of a W by which it may delay what is known to arrive.
    """

    in_turn: bool = True
    timeout: float = 0
    overlap: float = 0


@dataclass(frozen=True)
class GapFilling:
    """Backward before forward, of several chunks the latest stage; a W where the gap is long enough.

    Attributes:
        least_gap: Part of W's time from which a gap is filled with it.
        idle: Time that each device may lose after its first backward before it fills every gap; None for any.
    """

    least_gap: Fraction = Fraction(1, 2)
    idle: tuple[Number, ...] | None = None


@dataclass(frozen=True)
class OrderFollowing:
    """The manner of following given lists of forwards and backwards.

    Attributes:
        overlap: The share of a W by which it may delay the next operation of the list.
        filling: The share of itself by which an operation that overtakes may; PATIENT: none ever does.
        late: Nothing overtakes before the first stage has started its last forward: in the cool-down memory is left.
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
        numbers: Per device, the numbers of its operations in the order in which they start.
        times: Per device, when each of them ends, in the scheduler's own unit.
    """

    makespan: Number
    span: Number
    scheduler: ListScheduler
    numbers: tuple[list[Any], ...]
    times: tuple[list[Any], ...]

    @cached_property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        """The compute operations of each device in the order in which they start."""
        return tuple(tuple(map(self.scheduler.operation, order)) for order in self.numbers)

    @cached_property
    def ends(self) -> tuple[tuple[Number, ...], ...]:
        """The end of each of them, by device, in the costs' unit of time."""
        return tuple(tuple(_in_costs_unit(end, self.scheduler.time_unit) for end in ends) for ends in self.times)


class ListScheduler:
    """Schedules a step of one placement and its costs, by any rule.

    Args:
        placement: Stages on devices.
        micro_batches: Micro-batches of the step, m.
        costs: Times and bytes of operations; memory limits are not read.
        capacity: Bytes for activations, per device; None for any number.
        split: The backward is an I with a W apart; else it is one B.
        exact_sizes: Sizes that are floats are added up as the fractions that they are, not as floats.
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
        following = [*(s + 1 for s in stages[:-1]), 2 * len(stages) - 1, -1, *(len(stages) + s for s in stages[:-1])]
        communication = costs.costs.communication
        message: list[Number] = [
            0 if to < 0 or device_of[track % len(stages)] == device_of[to % len(stages)]
            else communication[min(track % len(stages), to % len(stages))]
            for track, to in enumerate(following)
        ]  # fmt: skip
        times, time_scales, self.time_unit = _whole((*time, *message), scale)
        sizes, size_scales, size_unit = _whole((*allocated, *freed), scale)
        rooms = [inf if r is None else floor(Fraction(r) / size_unit) if size_unit else float(r) for r in capacity]
        self.input = DispatchInput(
            stages=len(stages),
            micro_batches=micro_batches,
            devices=placement.devices,
            split=split,
            device_of=list(device_of),
            stages_of=[s for stages in placement.stages_of for s in stages],
            stages_from=[0, *np.cumsum([*map(len, placement.stages_of)]).tolist()],
            following=following,
            message=times[len(time) :],
            time=times[: len(time)],
            allocated=sizes[: len(allocated)],
            freed=sizes[len(allocated) :],
            time_scale=time_scales,
            size_scale=size_scales,
            capacity=rooms,
        )
        most = [0, *(r for r in rooms if r < inf)] if size_unit else [0]
        most += [micro_batches * sum(sizes) * max(size_scales)] if size_unit else []
        most += [micro_batches * sum(times) * max(time_scales)] if self.time_unit else []
        self._floats_are_exact = max(most) < _EXACT

    def schedule(self, rule: Greedy | GapFilling) -> ListSchedule | None:
        """Order all operations by a rule; None if it gets stuck for lack of memory."""
        if isinstance(rule, Greedy):
            return self._run(_rule(GREEDY, 1 - rule.overlap, 1 - rule.timeout, rule.in_turn, []), reserve=True)
        idle: Sequence[Number] = rule.idle or [inf] * self.placement.devices
        if self.time_unit:
            # A gap, which is whole, is longer than a time if it is longer than the whole part of it.
            idle = [i if i == inf else floor(Fraction(i) / self.time_unit) for i in idle]
        return self._run(_rule(GAP_FILLING, rule.least_gap, 0, False, [*idle]), reserve=False)

    def follow(self, lists: Sequence[Sequence[int]], rule: OrderFollowing) -> ListSchedule | None:
        """Dispatch by given lists of forwards and backwards, by numbers as in `search.constructive.dispatch`.

        The W's find their places.  None if that gets stuck for lack of memory.
        """
        entries = [number for order in lists for number in order]
        place = [0] * (2 * self.placement.stages * self.micro_batches)
        for at, number in enumerate(entries):
            place[number] = at
        starts = [0, *np.cumsum([*map(len, lists)]).tolist()]
        chosen = _rule(ORDER_FOLLOWING, 1 - rule.overlap, 1 - rule.filling, rule.late, [], entries, place, starts)
        return self._run(chosen, reserve=True)

    def number(self, op: Op) -> int:
        """The number of an operation in lists that are followed."""
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
        """Dispatch by a rule.  `reserve`: what an I needs in addition is taken by its F, so that no I ever waits."""
        a, stages = self.input, self.placement.stages
        if reserve:
            forwards, backwards = a.allocated[:stages], a.allocated[stages : 2 * stages]
            reserved = [x + y for x, y in zip(forwards, backwards, strict=True)]
            a = a._replace(allocated=[*reserved, *(0 for _ in range(2 * stages))])
        state, operations = _state(a, rule), (2 + a.split) * stages * self.micro_batches
        worthwhile = operations >= (COMPILED_FROM if "numba" in sys.modules else LOADS_FROM)
        run = compiled() if worthwhile and self._floats_are_exact else dispatch
        if run is not dispatch:
            a, rule, state = _arrays(a), _arrays(rule), _arrays(state)
        if run(a, rule, state) < operations:
            return None
        order, end, free, first = ([*column] for column in (state.order, state.end, state.free, state.first))
        begins = [3 * self.micro_batches * at for at in self.input.stages_from]
        places = [slice(begin, begin + length) for begin, length in zip(begins[:-1], state.length, strict=True)]
        spans = [last - begin for last, begin in zip(free, first, strict=True)]
        return ListSchedule(
            makespan=_in_costs_unit(max(free), self.time_unit),
            span=_in_costs_unit(max(spans), self.time_unit),
            scheduler=self,
            numbers=tuple(order[place] for place in places),
            times=tuple(end[place] for place in places),
        )


def _whole(values: Sequence[Number], scale: Sequence[Number]) -> tuple[list[Any], list[Any], Fraction | None]:
    """Whole multiples of the values' and of the factors' common steps, and the unit of their products.

    Floats, and None for the unit, if any of them is a float that is no whole number.
    """
    if any(isinstance(x, float) and not x.is_integer() for x in (*values, *scale)):
        return [*map(float, values)], [*map(float, scale)], None
    parts = [lcm(*(Fraction(x).denominator for x in {*numbers})) for numbers in (values, scale)]
    whole, factors = (
        [int(Fraction(x) * part) for x in numbers] for numbers, part in zip((values, scale), parts, strict=True)
    )
    return whole, factors, Fraction(1, parts[0] * parts[1])


def _in_costs_unit(time: Any, unit: Fraction | None) -> Number:
    if unit is None:
        return float(time)
    exact = int(time) * unit
    return exact.numerator if exact.denominator == 1 else exact


def _rule(
    kind: int, weight_share: Any, share: Any, flag: bool, idle: list[Any],
    lists: Sequence[int] = (), place: Sequence[int] = (), lists_from: Sequence[int] = (),
) -> DispatchRule:  # fmt: skip
    return DispatchRule(kind, float(weight_share), float(share), flag, idle, [*lists], [*place], [*lists_from])


def _state(a: DispatchInput, rule: DispatchRule) -> DispatchState:
    """The state of all devices before the first operation."""
    m, chunks = a.micro_batches, len(a.stages_of)
    arrival = [0] * m + [INFINITY] * (m * (2 * a.stages - 1))
    devices = {name: [0] * a.devices for name in DispatchState._fields}
    owed = [m * at for at in a.stages_from[:-1]]
    columns = {
        "count": [0] * (3 * a.stages), "arrival": arrival, "owed": [0] * (m * chunks), "owed_from": owed,
        "cursor": rule.lists_from[:-1],
        "owed_to": [*owed], "order": [0] * (3 * m * chunks), "end": [0] * (3 * m * chunks),
    }  # fmt: skip
    return DispatchState(**(devices | columns))


_NUMBERS = {
    "message", "time", "allocated", "freed", "time_scale", "size_scale", "capacity", "idle", "arrival", "used",
    "used_by_owed", "freeing", "free", "first", "end",
}  # fmt: skip
"""The columns that are no indices and no counts."""


def _arrays(lists: Any) -> Any:
    """The lists of a tuple as arrays, for the compiled code."""
    columns = lists._asdict()
    return lists._replace(
        **{
            name: np.array(column, dtype=np.float64 if name in _NUMBERS else np.int64)
            for name, column in columns.items()
            if isinstance(column, list)
        }
    )
