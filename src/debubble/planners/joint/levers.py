"""A point of the joint search: everything that is chosen but the order, and what it costs.

A point says how many units each stage has, how each stage recomputes, what part of its activations it offloads, and how
the list scheduler orders.  Recomputation has levels, one per price of a byte: at a price, each unit takes the strategy
whose time and memory together cost least, so that level 0 recomputes nothing and the last one all that it can.
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
from debubble.planners.joint.annealing_kernel import ADDRESS, ENTRIES, QUARTERS, Space, fill
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
        levels: Per stage, its level of recomputation.
        shares: Per stage, the quarters of its activations that it offloads.
        most: Per stage, the micro-batches that may be in flight.
        hosted: Per stage, whether its optimizer's states and step are the host's.
        policy: The list scheduler's entries.
    """

    counts: tuple[int, ...]
    levels: tuple[int, ...]
    shares: tuple[int, ...]
    most: tuple[int, ...]
    hosted: tuple[bool, ...]
    policy: tuple[float, ...]

    @property
    def rows(self) -> Ints:
        """The point's rows per stage, as the chain has them."""
        return np.array((self.counts, self.levels, self.shares, self.most, self.hosted), dtype=np.int64)

    @staticmethod
    def of(rows: Ints, policy: Floats) -> Point:
        """The point of a chain's arrays."""
        counts, levels, shares, most, hosted = rows.tolist()
        return Point(
            tuple(counts), tuple(levels), tuple(shares), tuple(most), tuple(map(bool, hosted)), tuple(policy.tolist())
        )


MAX_STAGE_RATIO = 2.5
"""Units of the longest stage that the search tries, in times of the mean."""
MAX_LISTED_WAYS = 64
"""Ways in which a whole model can recompute, up to which each is tried."""
BOUNDLESS = 1e30
"""Bytes of a device or host without a limit."""
BACKLOGS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 1e9)
PATIENCES = (0.0, 0.25, 0.5, 0.75, 1.0)
AGES = (0.0, 0.3, 1.0, 3.0, 10.0)
PREFETCHES = (1.0, 2.0, 3.0, 4.0, 6.0)
AHEADS = (0.0, 1.0, 2.0, 4.0, 8.0)


def policy_choices(stages: int, *, first: Sequence[float] = ()) -> tuple[Sequence[float], ...]:
    """The values that each entry of a policy may have, in the order of the list scheduler's entries.

    `first` is what the last one may be, which backwards come first; it is there where hosts may step.
    """
    horizons = [float(operations) for operations in range(1, 2 * stages)]
    return BACKLOGS, PATIENCES, horizons, PREFETCHES, AGES, AHEADS, *([first] if first else [])


DEEPER_SHARE = 0.85
"""The part of what a stage keeps, below which a level is a deeper one for some of its micro-batches."""
LEAST_CAPACITY = 1.0
"""Bytes of a device on which nothing fits: measures of what it lacks divide by its capacity."""
STATES_SHARE = 0.95
"""The part of devices' room that states may take: in the partitions that a search begins with, and where all stay."""
CROWDED_SHARE = 0.6
"""The part of devices' room that states may take before plans are drawn as where hosts have to step: four settings
between the two are 2.4% faster so."""

SHORT_SHARE = 0.85
"""The part above which plans are drawn whose hosts step as little as they have to, from the deepest stages on: five
settings are 4% faster in the mean so (llama2-70b on 16 H100 by 17%), and three below it 0.6% slower."""


def exceeds_devices(problem: Problem, units: Units) -> bool:
    """True if devices have no room for all states, so that hosts have to step."""
    return units.hostable and _states_share(problem, units) > STATES_SHARE


def is_crowded(problem: Problem, units: Units) -> bool:
    """True if states would take most of the devices' memory, and hosts may step."""
    return units.hostable and _states_share(problem, units) > CROWDED_SHARE


def is_short(problem: Problem, units: Units) -> bool:
    """True if states would take nearly all of the devices' memory, and hosts may step."""
    return units.hostable and _states_share(problem, units) > SHORT_SHARE


def _states_share(problem: Problem, units: Units) -> float:
    """The share of the devices' memory that all states would take there."""
    rooms = sum(problem.limits) - len(problem.limits) * float(units.static)
    states = sum(float(unit.static) for unit in units.units)
    return states / rooms if rooms > 0 else math.inf


class Levers:
    """The points of a problem for one placement."""

    def __init__(self, problem: Problem, units: Units, placement: Placement) -> None:
        self.problem, self.placement, self.units = problem, placement, units
        self.device_of = np.array(placement.device_of)
        types = [id(units.on(device)) for device in range(placement.devices)]
        self.examples = [types.index(each) for each in dict.fromkeys(types)]
        """A device of each type."""
        self.type_of = np.array([*map([*dict.fromkeys(types)].index, types)])[self.device_of]
        group_of = {d: g for g, group in enumerate(self.units.link_groups) for d in group}
        links = [group_of.get(d, len(group_of) + d) for d in range(placement.devices)]
        lanes = {link: n for n, link in enumerate(dict.fromkeys(links))}
        self.down = np.array([lanes[link] for link in links])
        half = self.units.host_link == "half-duplex"
        self.up = self.down if half else self.down + placement.devices
        buffers = [float(units.buffers(own, placement.stages)) for own in placement.stages_of]
        self.limits = np.maximum(np.array(problem.limits) - buffers, LEAST_CAPACITY)
        work = np.array([float(sum(unit.work for unit in units.on(device))) for device in self.examples])
        self.paces = (work / work.min() if work.min() else np.ones(len(work)))[self.type_of]
        """Per stage, the time of the model on its device over that on the fastest."""
        self.scales = np.array([*map(float, problem.entries.micro_batch_scale or (1,) * problem.micro_batches)])
        """Per micro-batch, its length over that of a whole one."""
        self.longest = 4 * problem.micro_batches * float(work.max())
        """Longer than any step that is not stuck."""
        self.crowded = is_crowded(problem, units)

    @cached_property
    def policies(self) -> tuple[Sequence[float], ...]:
        """The values of the policy's entries."""
        first = (BY_AGE, HOSTS_FIRST, BY_STAGE, BY_DEEP_STAGE) if self.crowded else (BY_AGE, HOSTS_FIRST)
        return policy_choices(self.placement.stages, first=first if self.units.hostable else ())

    @cached_property
    def space(self) -> Space:
        """The constants that the compiled chain reads."""
        units, choices = self.units, self.policies
        table = np.zeros((len(choices), max(map(len, choices))))
        for n, entry in enumerate(choices):
            table[n, : len(entry)] = entry
        return Space(
            rows=np.full((len(self.examples), self.levels, len(units.units), self.most_units + 1, ENTRIES), -1.0),
            type_of=self.type_of,
            device_of=self.device_of,
            limits=np.where(np.isinf(self.limits), BOUNDLESS, self.limits),
            down=self.down,
            up=self.up,
            host=BOUNDLESS if self.units.host_memory is None else float(self.units.host_memory),
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
            full=0,
            free=self._free,
            saved=self._saved,
            tails=self._tails,
        )

    @property
    def _on_device(self) -> Ints:
        """For every stage, 1 if no host may step it."""
        kept = self.problem.stepped_on_device(self.placement)
        return np.array([int(stage in kept) for stage in range(self.placement.stages)])

    @property
    def _tails(self) -> Floats:
        """The time after the pipeline's last operation if devices step nothing, next to nothing, or all themselves."""
        tail = self.problem.tail
        return np.array([0.0 if tail is None else tail.after(unstepped=share) for share in (0.0, 1e-12, 1.0)])

    @property
    def _saved(self) -> Floats:
        """Per stage of the balanced counts, the bytes of states that leave the device if a host steps it."""
        saved = [0.0 if u.on_host is None else float(u.static - u.on_host.static) for u in self.units.units]
        return self._of_stages(saved)

    @property
    def _free(self) -> Floats:
        """Per device, the bytes beside all states of its units of the balanced counts."""
        states = self._of_stages([float(unit.static) for unit in self.units.units])
        return self.limits - float(self.units.static) - np.bincount(self.device_of, states)

    def _of_stages(self, of_units: Sequence[float]) -> Floats:
        """The sums of units' figures by stage of the balanced counts."""
        begins = [0, *accumulate(self.balanced_counts[:-1])]
        return np.add.reduceat(of_units, begins)

    @property
    def most_units(self) -> int:
        """Units of the longest stage that is tried, on the fastest device."""
        units, stages = len(self.units.units), self.placement.stages
        mean = float(units / stages * (1 / self.paces).max() / (1 / self.paces).mean())
        # Next to one unit that is larger than all others, a balanced stage has many of these.
        balanced = int(np.diff(self._balanced_stages).max())
        return min(units - stages + 1, max(round(MAX_STAGE_RATIO * mean), balanced) + 2)

    def fill(self, type_: int, level: int, begin: int, count: int) -> None:
        """Fill a row of the table: a stage of so many units, from one on, at a level, on a type of device."""
        stage = self._stage(begin, begin + count, level)
        sums = self.units.average.stage_sums(stage, self.examples[type_])
        recomputes = any(name != "none" for _, name in stage)
        dropped = sums.activation - sums.activation_recomputed if recomputes else 0
        kept = sums.activation - dropped
        recompute_bytes = min(sums.recompute_workspace_input, dropped) if recomputes else 0
        row = self.space.rows[type_, level, begin, count]
        row[1:] = (
            sums.backward_input, sums.backward_weight,
            kept, recompute_bytes, sums.activation_after_input, sums.static + sums.gathered,
            sums.workspace, sums.static_on_host + sums.gathered, *self._host_times(begin, begin + count),
            sums.recompute if recomputes else 0, dropped,
            sums.optimizer_step + self.units.stage_entries.get("optimizer_step", 0), sums.activation,
            0 if self.units.offload_bandwidth is None else sums.activation / self.units.offload_bandwidth,
            *([getattr(sums, name) for name in OVERLAPS] if self.units.streams else [0] * len(OVERLAPS)),
            states_on_host(self.units.units[begin : begin + count]),
        )  # fmt: skip
        # It says that the row is known.
        row[0] = sums.forward

    def _host_times(self, begin: int, end: int) -> tuple[Number, Number, Number]:
        """Times in which parameters come from the host, gradients go there, and it steps, for the units of a stage."""
        if not self.units.hostable:
            return 0, 0, 0
        assert self.units.offload_bandwidth is not None
        hosted_units = [unit.on_host for unit in self.units.units[begin:end] if unit.on_host is not None]
        loads, drains = sum(h.parameters for h in hosted_units), sum(h.gradients for h in hosted_units)
        bandwidth = self.units.offload_bandwidth
        return loads / bandwidth, drains / bandwidth, sum(h.step for h in hosted_units)

    @cached_property
    def levels(self) -> int:
        """The number of levels of recomputation."""
        return len(self._strategies)

    @cached_property
    def _strategies(self) -> list[list[str]]:
        """The strategy of each unit by level; of a model with few ways to recompute, each of them is a level."""
        if math.prod(len(unit.strategies) for unit in self.units.units) <= MAX_LISTED_WAYS:
            ways = [[*names] for names in product(*(unit.strategies for unit in self.units.units))]
            return sorted(ways, key=self._kept, reverse=True)
        prices = sorted({step.price for unit in self.units.units for step in unit.savings()})
        # Between two neighbouring prices all choices are the same.
        between = [0.0, *((a * b) ** 0.5 for a, b in pairwise(prices)), *(2 * price for price in prices[-1:])]
        chosen = [[_strategy(unit, price) for unit in self.units.units] for price in between]
        return [row for n, row in enumerate(chosen) if row not in chosen[:n]]

    def _kept(self, names: Sequence[str]) -> float:
        """Bytes that all units keep of a micro-batch."""
        return sum(float(unit.strategies[name].activation) for unit, name in zip(self.units.units, names, strict=True))

    @cached_property
    def balanced_counts(self) -> tuple[int, ...]:
        """Units per stage such that devices, not stages, take equal times, as far as moves of single units go.

        Boundaries between stages move, alone or several together, while that evens out the devices' times.
        """
        pace_of = np.ones(self.placement.devices)
        pace_of[self.device_of] = self.paces
        states = np.concatenate(([0.0], np.cumsum([float(unit.static) for unit in self.units.units])))
        cuts = self._balanced_stages.copy()
        capacity = np.maximum(self.limits - float(self.units.static), LEAST_CAPACITY)
        even_out(cuts, self._work_before, states, self.device_of, self.paces, pace_of, capacity, self.most_units)
        return tuple(np.diff(cuts).tolist())

    @cached_property
    def _work_before(self) -> Floats:
        """The time of all units before each unit, and before the end."""
        return np.concatenate(([0.0], np.cumsum([float(unit.work) for unit in self.units.units])))

    @cached_property
    def _balanced_stages(self) -> Ints:
        """First units of stages of equal times, as far as whole units allow, and the end of the last one."""
        stages, units, sums = self.placement.stages, len(self.units.units), self._work_before
        ends = np.searchsorted(sums, sums[-1] * np.arange(1, stages) / stages)
        ends = np.maximum(ends, np.arange(1, stages))
        ends = np.minimum(np.maximum.accumulate(ends), units - np.arange(stages - 1, 0, -1))
        for n in range(1, len(ends)):
            ends[n] = max(ends[n], ends[n - 1] + 1)
        return np.concatenate(([0], ends, [units]))

    def partition(self, point: Point) -> Partition:
        """The units of each stage with their strategies."""
        ends = accumulate(point.counts, initial=0)
        return Partition(
            self._stage(begin, end, level) for (begin, end), level in zip(pairwise(ends), point.levels, strict=True)
        )

    def deeper(self, partition: Partition) -> Partition:
        """The units of a partition, each stage at the first level that keeps well less than it does, else the last."""
        return Partition(self._deeper(stage, d) for stage, d in zip(partition, self.placement.device_of, strict=True))

    def _deeper(self, stage: tuple[tuple[int, str], ...], device: int) -> tuple[tuple[int, str], ...]:
        most = DEEPER_SHARE * self.units.stage_sums(stage, device).activation_recomputed
        for level in range(self.levels):
            deeper = self._stage(stage[0][0], stage[-1][0] + 1, level)
            if self.units.stage_sums(deeper, device).activation_recomputed < most:
                break
        return deeper

    def _stage(self, begin: int, end: int, level: int) -> tuple[tuple[int, str], ...]:
        """The units from one index to another, with their strategies at a level."""
        names = self._strategies[level]
        return tuple((index, names[index]) for index in range(begin, end))

    def table(self, point: Point) -> tuple[StageTable, float]:
        """The point as the list scheduler sees it, and the bytes that its states lack on the fullest device."""
        begins = accumulate(point.counts[:-1], initial=0)
        for type_, level, begin, count in zip(self.type_of, point.levels, begins, point.counts, strict=True):
            self.fill(type_, level, begin, count)
        stages, (capacity, host) = np.zeros((self.placement.stages, COLUMNS)), np.zeros((2, self.placement.devices))
        lacking = fill(self.space, point.rows, stages, capacity, host, np.zeros(ADDRESS, np.int64))
        return StageTable(stages, self.device_of, capacity, self.down, self.up, host), lacking

    def solution(self, point: Point) -> Solution:
        """The schedule of a point with its costs, as the list scheduler orders it."""
        table, _ = self.table(point)
        made = schedule(table, self.scales, np.array(point.policy), np.array(point.most))
        partition = self.partition(point)
        ordered = Schedule(
            name="joint",
            placement=self.placement,
            micro_batches=self.problem.micro_batches,
            orders=made.orders(self.device_of),
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
    most: int,
) -> None:
    """Move the cuts between stages by one unit, alone or several in a row, while that evens out the devices' times.

    Args:
        cuts: The first unit of every stage, and the number of units; it is changed.
        sums: Time of the first units, by their number.
        states: Bytes of their states.
        device_of: Per stage, its device.
        paces: Per stage, the time of the model on its device over that on the fastest.
        pace_of: The same per device.
        capacity: Bytes per device.
        most: Units of the longest stage.
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
                    # The lengths of the stages between these two do not change.
                    if min(before, after) >= 1 and max(before, after) <= most:
                        value = _unevenness(cuts, sums, states, device_of, paces, pace_of, capacity)
                        if value < best * (1 - 1e-12):
                            best, improved = value, True
                            continue
                    cuts[begin : end + 1] -= step


@jit
def _unevenness(
    cuts: Ints, sums: Floats, states: Floats, device_of: Ints, paces: Floats, pace_of: Floats, capacity: Floats
) -> float:
    """Least where devices, and then stages, take equal times, and no device lacks room for its states."""
    loads, static = np.zeros(len(capacity)), np.zeros(len(capacity))
    stages = devices = lacking = 0.0
    for s in range(len(device_of)):
        load = (sums[cuts[s + 1]] - sums[cuts[s]]) * paces[s]
        loads[device_of[s]] += load
        static[device_of[s]] += states[cuts[s + 1]] - states[cuts[s]]
        stages += load**2 / paces[s]
    for d in range(len(capacity)):
        # Divided by the pace, the squares are least where the times are equal.
        devices += loads[d] ** 2 / pace_of[d]
        lacking += max(static[d] - STATES_SHARE * capacity[d], 0.0)
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
