"""A point of the joint search: every choice except the order, with its costs.

A point holds the units of each stage, its recomputation level, the fraction of its activations that is offloaded, and
the list scheduler's policy.  Each recomputation level is a price per byte: every unit takes the strategy with the
lowest sum of time and priced memory, so level 0 recomputes nothing and the last level as much as possible.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product

import numpy as np

from debubble.costs.host_memory import states_on_host
from debubble.costs.partition import Partition
from debubble.costs.unit import Unit
from debubble.costs.units import Units
from debubble.ir import Number, Placement, Schedule
from debubble.ir.arrays import Floats, Ints
from debubble.ir.stage_costs import OVERLAPS
from debubble.kernels import jit
from debubble.planners.joint.annealing_kernel import ENTRIES, QUARTERS, ROW_INDICES, Space, fill
from debubble.planners.joint.list_scheduling.scheduler import schedule
from debubble.planners.joint.list_scheduling.stage_table import (
    BY_AGE,
    BY_DEEP_STAGE,
    BY_STAGE,
    COLUMNS,
    HOSTS_FIRST,
    StageTable,
)
from debubble.planners.problem import Problem, Solution


@dataclass(frozen=True)
class Point:
    """The choices for one number of chunks and one placement.

    Attributes:
        counts: Units per stage.
        levels: Recomputation level per stage.
        shares: Quarters of the activations that each stage offloads.
        max_in_flight: Limit on micro-batches in flight per stage.
        hosted: Per stage, whether its optimizer states and step are on the host.
        policy: The list scheduler's policy entries.
    """

    counts: tuple[int, ...]
    levels: tuple[int, ...]
    shares: tuple[int, ...]
    max_in_flight: tuple[int, ...]
    hosted: tuple[bool, ...]
    policy: tuple[float, ...]

    @property
    def rows(self) -> Ints:
        """The point as the compiled chain's array, [choice, stage]."""
        return np.array((self.counts, self.levels, self.shares, self.max_in_flight, self.hosted), dtype=np.int64)

    @staticmethod
    def from_arrays(rows: Ints, policy: Floats) -> Point:
        """Convert a chain's arrays to a point."""
        counts, levels, shares, max_in_flight, hosted = rows.tolist()
        return Point(
            tuple(counts),
            tuple(levels),
            tuple(shares),
            tuple(max_in_flight),
            tuple(map(bool, hosted)),
            tuple(policy.tolist()),
        )


MAX_STAGE_RATIO = 2.5
"""Upper limit on units per stage, as a multiple of the mean."""
MAX_ENUMERATED_CHOICES = 64
"""Recomputation choices are enumerated exhaustively for models with at most this many combinations."""
UNLIMITED_BYTES = 1e30
"""Stands for the memory of a device or host without a limit."""
BACKLOGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 1e9)
WAIT_LIMITS = (0.0, 0.25, 0.5, 0.75, 1.0)
AGES = (0.0, 0.3, 1.0, 3.0, 10.0)
PREFETCHES = (1.0, 2.0, 3.0, 4.0, 6.0)
AHEADS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Values of the policy entries BACKLOG, WAIT_LIMIT, AGE, PREFETCH and AHEAD that are tried."""


def policy_choices(stages: int, *, first: Sequence[float] = ()) -> tuple[Sequence[float], ...]:
    """The candidate values of each policy entry, in the list scheduler's order.

    `first` holds the values of the last entry, BACKWARDS, which exists only if optimizer steps may be offloaded.
    """
    horizons = [float(operations) for operations in range(1, 2 * stages)]
    return BACKLOGS, WAIT_LIMITS, horizons, PREFETCHES, AGES, AHEADS, *([first] if first else [])


DEEPER_LEVEL_FRACTION = 0.85
"""A level counts as deeper than a stage's own if it retains less than this fraction of the stage's bytes."""
MIN_CAPACITY = 1.0
"""Bytes assumed for a device on which nothing fits, because shortages are divided by the capacity."""
MAX_STATES_FRACTION = 0.95
"""Largest fraction of device memory that model states may occupy, initially and where none are offloaded."""
CROWDED_FRACTION = 0.6
"""Fraction of device memory taken by states above which random points are drawn as if offloading the optimizer were
necessary: 2.4% faster on four settings between this fraction and the maximum."""
SHORT_FRACTION = 0.85
"""Fraction above which some random points offload the optimizer of as few stages as necessary, deepest first: five
settings are 4% faster on average (llama2-70b on 16 H100 by 17%); three settings below it would be 0.6% slower."""


def exceeds_devices(problem: Problem, units: Units) -> bool:
    """Tell whether all states exceed device memory, so that optimizer steps have to be offloaded."""
    return units.hostable and _states_fraction(problem, units) > MAX_STATES_FRACTION


def is_crowded(problem: Problem, units: Units) -> bool:
    """Tell whether states would take most of the device memory, and optimizer steps may be offloaded."""
    return units.hostable and _states_fraction(problem, units) > CROWDED_FRACTION


def is_short(problem: Problem, units: Units) -> bool:
    """Tell whether states would take nearly all of the device memory, and optimizer steps may be offloaded."""
    return units.hostable and _states_fraction(problem, units) > SHORT_FRACTION


def _states_fraction(problem: Problem, units: Units) -> float:
    """The fraction of device memory that all states would take."""
    capacity = sum(problem.limits) - len(problem.limits) * float(units.static)
    states = sum(float(unit.static) for unit in units.units)
    return states / capacity if capacity > 0 else math.inf


class Levers:
    """The points of a problem for one placement."""

    def __init__(self, problem: Problem, units: Units, placement: Placement) -> None:
        self.problem, self.placement, self.units = problem, placement, units
        self.device_of = np.array(placement.device_of)
        types = [id(units.on(device)) for device in range(placement.devices)]
        self.examples = [types.index(type_) for type_ in dict.fromkeys(types)]
        """One device of each type."""
        self.type_of = np.array([*map([*dict.fromkeys(types)].index, types)])[self.device_of]
        group_of = {d: g for g, group in enumerate(self.units.link_groups) for d in group}
        links = [group_of.get(d, len(group_of) + d) for d in range(placement.devices)]
        lanes = {link: n for n, link in enumerate(dict.fromkeys(links))}
        self.down = np.array([lanes[link] for link in links])
        half = self.units.host_link == "half-duplex"
        self.up = self.down if half else self.down + placement.devices
        buffers = [float(units.buffers(stages, placement.stages)) for stages in placement.stages_of]
        self.limits = np.maximum(np.array(problem.limits) - buffers, MIN_CAPACITY)
        work = np.array([float(sum(unit.work for unit in units.on(device))) for device in self.examples])
        self.paces = (work / work.min() if work.min() else np.ones(len(work)))[self.type_of]
        """Per stage, the model's time on its device relative to the fastest device."""
        self.scales = np.array([*map(float, problem.entries.micro_batch_scale or (1,) * problem.micro_batches)])
        """Length of each micro-batch relative to a full one."""
        self.longest = 4 * problem.micro_batches * float(work.max())
        """Upper bound on the time of every step that completes."""
        self.crowded = is_crowded(problem, units)

    @cached_property
    def policies(self) -> tuple[Sequence[float], ...]:
        """The candidate values of each policy entry."""
        first = (BY_AGE, HOSTS_FIRST, BY_STAGE, BY_DEEP_STAGE) if self.crowded else (BY_AGE, HOSTS_FIRST)
        return policy_choices(self.placement.stages, first=first if self.units.hostable else ())

    @cached_property
    def space(self) -> Space:
        """The input of the compiled chain."""
        units, choices = self.units, self.policies
        table = np.zeros((len(choices), max(map(len, choices))))
        for n, entry in enumerate(choices):
            table[n, : len(entry)] = entry
        return Space(
            rows=np.full((len(self.examples), self.levels, len(units.units), self.most_units + 1, ENTRIES), -1.0),
            type_of=self.type_of,
            device_of=self.device_of,
            limits=np.where(np.isinf(self.limits), UNLIMITED_BYTES, self.limits),
            down=self.down,
            up=self.up,
            host=UNLIMITED_BYTES if self.units.host_memory is None else float(self.units.host_memory),
            choices=table,
            options=np.array([*map(len, choices)]),
            scales=self.scales,
            static=float(units.static),
            communication=np.array(units.communication_between(self.placement), dtype=np.float64),
            on_device=self._on_device,
            longest=self.longest,
            offloads=int(units.offload_bandwidth is not None),
            hostable=int(units.hostable),
            crowded=int(self.crowded),
            short=int(is_short(self.problem, units)),
            filled=0,
            free=self._free,
            saved=self._saved,
            tails=self._tails,
        )

    @property
    def _on_device(self) -> Ints:
        """For every stage, 1 if its optimizer step must run on the device."""
        device_stepped = self.problem.stepped_on_device(self.placement)
        return np.array([int(stage in device_stepped) for stage in range(self.placement.stages)])

    @property
    def _tails(self) -> Floats:
        """Time after the pipeline's last operation if devices step none, a vanishing part or all of their states."""
        tail = self.problem.tail
        return np.array([0.0 if tail is None else tail.after(unstepped=share) for share in (0.0, 1e-12, 1.0)])

    @property
    def _saved(self) -> Floats:
        """Per stage of the balanced counts, the bytes freed on the device by offloading its optimizer."""
        saved = [0.0 if u.on_host is None else float(u.static - u.on_host.static) for u in self.units.units]
        return self._stage_totals(saved)

    @property
    def _free(self) -> Floats:
        """Per device, the bytes that remain next to all states of its units at the balanced counts."""
        states = self._stage_totals([float(unit.static) for unit in self.units.units])
        return self.limits - float(self.units.static) - np.bincount(self.device_of, states)

    def _stage_totals(self, of_units: Sequence[float]) -> Floats:
        """Sum a quantity of the units by stage of the balanced counts."""
        begins = [0, *accumulate(self.balanced_counts[:-1])]
        return np.add.reduceat(of_units, begins)

    @property
    def most_units(self) -> int:
        """Limit on units per stage, for the fastest device."""
        units, stages = len(self.units.units), self.placement.stages
        mean = float(units / stages * (1 / self.paces).max() / (1 / self.paces).mean())
        # If one unit is larger than all others, balanced stages of the small ones are long.
        balanced = int(np.diff(self._balanced_stages).max())
        return min(units - stages + 1, max(round(MAX_STAGE_RATIO * mean), balanced) + 2)

    def fill(self, type_: int, level: int, begin: int, count: int) -> None:
        """Fill the table's row for a stage of `count` units from `begin` on, at a level, on a device type."""
        stage = self._stage(begin, begin + count, level)
        sums = self.units.average.stage_sums(stage, self.examples[type_])
        recomputes = any(name != "none" for _, name in stage)
        dropped = sums.activation - sums.activation_recomputed if recomputes else 0
        retained = sums.activation - dropped
        recompute_bytes = min(sums.recompute_workspace_input, dropped) if recomputes else 0
        row = self.space.rows[type_, level, begin, count]
        row[1:] = (
            sums.backward_input, sums.backward_weight,
            retained, recompute_bytes, sums.activation_after_input, sums.static,
            sums.workspace, sums.static_on_host, *self._host_times(begin, begin + count),
            sums.recompute if recomputes else 0, dropped,
            sums.optimizer_step + self.units.stage_entries.get("optimizer_step", 0), sums.activation,
            0 if self.units.offload_bandwidth is None else sums.activation / self.units.offload_bandwidth,
            *([getattr(sums, name) for name in OVERLAPS] if self.units.streams else [0] * len(OVERLAPS)),
            states_on_host(self.units.units[begin : begin + count]), sums.gathered,
            sums.parameter_gather + self.units.stage_entries.get("parameter_gather", 0),
        )  # fmt: skip
        # A nonnegative first entry marks the row as filled.
        row[0] = sums.forward

    def _host_times(self, begin: int, end: int) -> tuple[Number, Number, Number]:
        """Times of a stage's parameter load, gradient drain and optimizer step on the host."""
        if not self.units.hostable:
            return 0, 0, 0
        assert self.units.offload_bandwidth is not None
        hosted_units = [unit.on_host for unit in self.units.units[begin:end] if unit.on_host is not None]
        loads, drains = sum(h.parameters for h in hosted_units), sum(h.gradients for h in hosted_units)
        bandwidth = self.units.offload_bandwidth
        return loads / bandwidth, drains / bandwidth, sum(h.step for h in hosted_units)

    @cached_property
    def levels(self) -> int:
        """The number of recomputation levels."""
        return len(self._strategies)

    @cached_property
    def _strategies(self) -> list[list[str]]:
        """The strategy of each unit by level; with few combinations, every one of them is a level."""
        if math.prod(len(unit.strategies) for unit in self.units.units) <= MAX_ENUMERATED_CHOICES:
            choices = [[*names] for names in product(*(unit.strategies for unit in self.units.units))]
            return sorted(choices, key=self._retained_bytes, reverse=True)
        prices = sorted({step.price for unit in self.units.units for step in unit.savings()})
        # Between two neighbouring prices all choices are the same.
        between = [0.0, *((a * b) ** 0.5 for a, b in pairwise(prices)), *(2 * price for price in prices[-1:])]
        chosen = [[_strategy(unit, price) for unit in self.units.units] for price in between]
        return [row for n, row in enumerate(chosen) if row not in chosen[:n]]

    def _retained_bytes(self, names: Sequence[str]) -> float:
        """Bytes of a micro-batch that all units retain."""
        return sum(float(unit.strategies[name].activation) for unit, name in zip(self.units.units, names, strict=True))

    @cached_property
    def balanced_counts(self) -> tuple[int, ...]:
        """Units per stage that balance the times of devices rather than of stages: a local optimum of `even_out`."""
        pace_of = np.ones(self.placement.devices)
        pace_of[self.device_of] = self.paces
        states = np.concatenate(([0.0], np.cumsum([float(unit.static) for unit in self.units.units])))
        cuts = self._balanced_stages.copy()
        capacity = np.maximum(self.limits - float(self.units.static), MIN_CAPACITY)
        even_out(cuts, self._work_before, states, self.device_of, self.paces, pace_of, capacity, self.most_units)
        return tuple(np.diff(cuts).tolist())

    @cached_property
    def _work_before(self) -> Floats:
        """Prefix sums of the units' times."""
        return np.concatenate(([0.0], np.cumsum([float(unit.work) for unit in self.units.units])))

    @cached_property
    def _balanced_stages(self) -> Ints:
        """First units of stages of nearly equal times, and the end of the last stage."""
        stages, units, sums = self.placement.stages, len(self.units.units), self._work_before
        ends = np.searchsorted(sums, sums[-1] * np.arange(1, stages) / stages)
        ends = np.maximum(ends, np.arange(1, stages))
        ends = np.minimum(np.maximum.accumulate(ends), units - np.arange(stages - 1, 0, -1))
        for n in range(1, len(ends)):
            ends[n] = max(ends[n], ends[n - 1] + 1)
        return np.concatenate(([0], ends, [units]))

    def partition(self, point: Point) -> Partition:
        """The units of each stage with their recomputation strategies."""
        ends = accumulate(point.counts, initial=0)
        return Partition(
            self._stage(begin, end, level) for (begin, end), level in zip(pairwise(ends), point.levels, strict=True)
        )

    def deeper(self, partition: Partition) -> Partition:
        """The partition with each stage at the first level that retains considerably less, else at the last."""
        return Partition(self._deeper(stage, d) for stage, d in zip(partition, self.placement.device_of, strict=True))

    def _deeper(self, stage: tuple[tuple[int, str], ...], device: int) -> tuple[tuple[int, str], ...]:
        max_bytes = DEEPER_LEVEL_FRACTION * self.units.stage_sums(stage, device).activation_recomputed
        for level in range(self.levels):
            deeper = self._stage(stage[0][0], stage[-1][0] + 1, level)
            if self.units.stage_sums(deeper, device).activation_recomputed < max_bytes:
                break
        return deeper

    def _stage(self, begin: int, end: int, level: int) -> tuple[tuple[int, str], ...]:
        """The units from `begin` to `end`, with their strategies at a level."""
        names = self._strategies[level]
        return tuple((index, names[index]) for index in range(begin, end))

    def table(self, point: Point) -> tuple[StageTable, float]:
        """The list scheduler's input for a point, and the bytes of states that exceed the fullest device."""
        begins = accumulate(point.counts[:-1], initial=0)
        for type_, level, begin, count in zip(self.type_of, point.levels, begins, point.counts, strict=True):
            self.fill(type_, level, begin, count)
        stages, (capacity, host) = np.zeros((self.placement.stages, COLUMNS)), np.zeros((2, self.placement.devices))
        lacking = fill(self.space, point.rows, stages, capacity, host, np.zeros(ROW_INDICES, np.int64))
        return StageTable(stages, self.device_of, capacity, self.down, self.up, host), lacking

    def solution(self, point: Point) -> Solution:
        """The list schedule of a point, with its costs."""
        table, _ = self.table(point)
        placed = schedule(table, self.scales, np.array(point.policy), np.array(point.max_in_flight))
        partition = self.partition(point)
        ordered = Schedule(
            name="joint",
            placement=self.placement,
            micro_batches=self.problem.micro_batches,
            orders=placed.orders(self.device_of),
            fused_recompute=partition.recomputing,
            offload_fraction={s: share / QUARTERS for s, share in enumerate(point.shares) if 0 < share < QUARTERS},
        )
        hosted = [s for s, on_host in enumerate(point.hosted) if on_host]
        return Solution(
            schedule=ordered.with_host_steps(hosted),
            costs=self.units.stage_costs(partition, self.placement, on_host=hosted),
            partition=partition,
        )


@jit
def even_out(
    cuts: Ints,
    sums: Floats,
    states: Floats,
    device_of: Ints,
    paces: Floats,
    pace_of: Floats,
    capacity: Floats,
    max_units: int,
) -> None:
    """Move one cut, or several consecutive ones together, by one unit while that balances the devices' times.

    Args:
        cuts: The first unit of every stage, and the number of units; changed in place.
        sums: Prefix sums of the units' times.
        states: Prefix sums of the units' state bytes.
        device_of: Device of each stage.
        paces: Per stage, the model's time on its device relative to the fastest device.
        pace_of: The same per device.
        capacity: Bytes per device.
        max_units: Limit on units per stage.
    """
    best = _unevenness(cuts, sums, states, device_of, paces, pace_of, capacity)
    improved = True
    while improved:
        improved = False
        for begin in range(1, len(cuts) - 1):
            for end in range(begin, len(cuts) - 1):
                for step in (-1, 1):
                    cuts[begin : end + 1] += step
                    before, after = cuts[begin] - cuts[begin - 1], cuts[end + 1] - cuts[end]
                    # Only the stages on both sides of the moved cuts change their length.
                    if min(before, after) >= 1 and max(before, after) <= max_units:
                        value = _unevenness(cuts, sums, states, device_of, paces, pace_of, capacity)
                        if value < best * (1 - 1e-12):
                            best, improved = value, True
                            continue
                    cuts[begin : end + 1] -= step


@jit
def _unevenness(
    cuts: Ints, sums: Floats, states: Floats, device_of: Ints, paces: Floats, pace_of: Floats, capacity: Floats
) -> float:
    """Imbalance of the devices' times, then of the stages', with a penalty for states beyond a device's memory."""
    loads, static = np.zeros(len(capacity)), np.zeros(len(capacity))
    stages = devices = lacking = 0.0
    for s in range(len(device_of)):
        load = (sums[cuts[s + 1]] - sums[cuts[s]]) * paces[s]
        loads[device_of[s]] += load
        static[device_of[s]] += states[cuts[s + 1]] - states[cuts[s]]
        stages += load**2 / paces[s]
    for d in range(len(capacity)):
        # Squares divided by the pace have their minimum where the times are equal.
        devices += loads[d] ** 2 / pace_of[d]
        lacking += max(static[d] - MAX_STATES_FRACTION * capacity[d], 0.0)
    unevenness: float = devices + 1e-3 * stages + 1e3 * lacking / capacity.min() * sums[-1] ** 2
    return unevenness


def _strategy(unit: Unit, price: float) -> str:
    return min(
        unit.strategies,
        key=lambda name: (
            float(unit.strategies[name].recompute) + price * float(unit.strategies[name].activation),
            name != "none",
        ),
    )
