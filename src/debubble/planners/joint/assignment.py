"""Free assignment of units to devices, so that some devices hold more stages than others.

Some models cannot be balanced with equal stage counts per device: with three half-layers per device, one device also
has the head.  An assignment gives the device of every unit; consecutive units on one device form a stage.

If memory allows delaying weight gradients to the end of the step, a device finishes after its work for all
micro-batches plus its idle time in the warm-up, so devices with less work may idle longer.  Initial assignments fill
the devices in a zigzag, skipping full ones: the limit on a device's work plus its wait until all its stages have begun
is the lowest for which all units can be assigned.  Exchanges balance the devices, and annealing continues from the
best.  It scores an assignment by the list schedule of the warm-up, which takes a fifth of the time of the full step;
full steps are scheduled for the most promising assignments only.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, Placement, Schedule
from debubble.ir.arrays import Floats, Ints
from debubble.planners.joint.list_scheduling.scheduler import place, schedule
from debubble.planners.joint.list_scheduling.stage_table import (
    COLUMNS,
    FORWARD,
    FREED_BY_I,
    FREED_BY_W,
    INPUT,
    RETAINED,
    SEND,
    WAIT_LIMIT,
    WEIGHT,
    F,
    StageTable,
)
from debubble.planners.problem import Problem, Solution
from debubble.processes import available_cores
from debubble.search.effort import CORES, Effort

POLICY = np.array([1e9, 0.0, 1.0, 1.0, 0.0, 0.0])
"""Policy of the list scheduler: weight gradients wait while anything else can run, and deep stages go first."""
WAIT_LIMITS = 0.0, 0.06
"""Values of WAIT_LIMIT tried for full steps: with 0 alone, the last micro-batches of some assignments return late."""
MAX_STAGES_PER_DEVICE = 6
"""Upper limit on the mean number of stages per device of initial assignments."""
WAIT_UPDATES = 8
"""Number of initial assignments per turn length, each with the waits measured for the previous ones."""
MIN_UNIT_WORK = 0.25
"""Units with less work than this multiple of the mean, such as an embedding, do not count in a device's turn."""
CHAINS, PHASES = 4, 2
"""Number of chains, and of phases of equal effort: in each phase all chains start from the best assignment so far."""
INITIAL_TEMPERATURE = 0.1
"""Initial temperature of the chains, in units of `unevenness`; it falls linearly to zero."""
NORM_EXPONENT = 1000.0
"""A device that finishes later by a fraction x of the step weighs exp(NORM_EXPONENT * x) times as much."""
LAST_DEVICE_SHARE, MEAN_DEVICE_RANK = 0.4, 6.0
"""Fraction of moves that take a unit from the last device to finish, and mean rank of the device in other moves."""
ROTATION_SHARE, UNIFORM_SHARE, MEAN_DISTANCE, MEAN_ROTATION_DISTANCE = 0.3, 0.4, 8.0, 2.0
"""Fraction of moves that rotate three units instead of exchanging two; fraction of exchanges whose second unit is drawn
uniformly, and its mean distance in units in the others; mean distance of a rotation's third unit from the second."""
MIN_RETAINED_WAIT = 0.5
"""Fraction of a device's wait that is assumed to remain after a move, to reject moves without scheduling."""
PROMISING_GAP = 1e-4
"""Relative gain in the warm-up score from which the full step is scheduled."""
WHOLE_STEP_PRICE = 10.0
"""Price of scheduling a full step, as a multiple of scheduling the warm-up."""
DRAW_PRICE, TRIAL_PRICE = 4e-5, (3e-4, 3e-8)
"""Seconds of the reference machine to draw a move; to score it, and in addition per pair of a stage and a
micro-batch."""


def assign(problem: Problem, units: Units) -> Solution:
    """Assign the units to devices and order them with the list scheduler, without recomputation and offload.

    Raises InfeasibleError if no assignment tried fits.
    """
    assignments, effort = _Assignments(problem, units), problem.begun()
    first = min(assignments.initial_states(), key=_time, default=None)
    if first is None or math.isinf(first.time):
        raise InfeasibleError("No assignment of units to devices that was tried fits without recomputation.")
    best = assignments.schedule_step(first)
    for phase in range(PHASES):
        efforts = [Effort(CORES * problem.effort / (PHASES * CHAINS), deadline=effort.deadline) for _ in range(CHAINS)]
        seeds = [(PHASES * problem.seed + phase) * CHAINS + chain for chain in range(CHAINS)]
        with ThreadPoolExecutor(available_cores()) as pool:
            best = min(pool.map(assignments.anneal, [best] * CHAINS, efforts, seeds), key=_time)
    return replace(assignments.solution(best), cut_off=effort.cut_off)


@dataclass(frozen=True)
class _State:
    """An assignment, and estimates of when its devices finish.

    Attributes:
        device_of: Device of each unit.
        ends: Per device, its total work plus its idle time before the first micro-batch is back.
        waits: Per device, its idle time before all of its stages have begun.
    """

    device_of: Ints
    ends: Floats
    waits: Floats

    @property
    def time(self) -> float:
        """The time at which the last device finishes."""
        return float(self.ends.max())

    def unevenness(self, time: float) -> float:
        """A soft count, on a log scale, of devices that finish at `time` or later; at most 0 if none exceeds it."""
        return math.log(float(np.exp(NORM_EXPONENT * (self.ends / time - 1)).sum()))


def _time(result: _State | _WholeStep) -> float:
    return result.time


@dataclass(frozen=True)
class _WholeStep:
    """An assignment with the time of its full step's list schedule, and the policy used."""

    state: _State
    time: float
    policy: Floats


@dataclass(frozen=True)
class _Assignments:
    """The search space of assignments of a problem's units, and their costs."""

    problem: Problem
    units: Units

    @cached_property
    def work(self) -> Floats:
        """[device, unit]: time of a micro-batch."""
        tables = [self.units.on(device) for device in range(self.problem.devices)]
        return np.array([[float(unit.work) for unit in table] for table in tables])

    @cached_property
    def _rows(self) -> Floats:
        """[device, unit, column]: a unit's contribution to its stage's row."""
        rows = np.zeros((*self.work.shape, COLUMNS))
        for device in range(self.problem.devices):
            for n, unit in enumerate(self.units.on(device)):
                sums = self.units.stage_sums(((n, "none"),), device)
                rows[device, n, [FORWARD, INPUT, WEIGHT, RETAINED, FREED_BY_I, FREED_BY_W]] = (
                    unit.forward, unit.backward_input, unit.backward_weight, sums.activation,
                    sums.activation - sums.activation_after_input, sums.activation_after_input,
                )  # fmt: skip
        return rows

    @cached_property
    def _states(self) -> Floats:
        """[device, unit]: bytes of states."""
        return np.array([[float(u.static) for u in self.units.on(d)] for d in range(self.problem.devices)])

    @cached_property
    def _capacity(self) -> Floats:
        """Bytes of each device available to states and activations."""
        workspace = max(float(unit.workspace) for unit in self.units.units)
        devices = self.problem.devices
        buffers = [float(self.units.buffers((d,), devices)) for d in range(devices)]
        capacity: Floats = np.minimum(self.problem.limits, 1e30) - float(self.units.static) - workspace - buffers
        return capacity

    @cached_property
    def _unit_costs(self) -> list[tuple[float, ...]]:
        """The costs of each unit; units with the same costs are interchangeable."""
        return [(*map(float, (u.forward, u.backward_input, u.work, u.static)),) for u in self.units.units]

    @cached_property
    def _fills_turn(self) -> list[bool]:
        """For each unit, whether it counts in a device's turn."""
        return [bool(work >= MIN_UNIT_WORK * self.work[0].mean()) for work in self.work[0]]

    @cached_property
    def _message_times(self) -> Floats:
        """The time of a message from every device to every other."""
        devices = range(self.problem.devices)
        return np.array([[float(self.units.message(a, b)) for b in devices] for a in devices])

    @cached_property
    def _ramp_time(self) -> float:
        """Time until the first micro-batch is back at the first unit, if every unit were a stage."""
        messages = 2 * float(self.units.communication) * (len(self.units.units) - 1)
        return messages + sum(float(unit.forward + unit.backward_input) for unit in self.units.units)

    def loads(self, device_of: Ints) -> Floats:
        """The work of each device for all micro-batches."""
        unit_work = self.work[device_of, np.arange(len(device_of))]
        loads: Floats = self.problem.micro_batches * np.bincount(
            device_of, weights=unit_work, minlength=self.problem.devices
        ).astype(np.float64)
        return loads

    def table(self, device_of: Ints) -> StageTable:
        """The list scheduler's input for an assignment."""
        begins, u, devices = _begins(device_of), np.arange(len(device_of)), np.arange(self.problem.devices)
        stages = np.add.reduceat(self._rows[device_of, u], begins)
        stages[:-1, SEND] = self._message_times[device_of[begins[:-1]], device_of[begins[1:]]]
        states = np.bincount(device_of, weights=self._states[device_of, u], minlength=len(devices))
        endless = np.full(len(devices), np.inf)
        return StageTable(stages, device_of[begins], self._capacity - states, devices, devices + len(devices), endless)

    def evaluate(self, device_of: Ints, threshold: float = math.inf) -> _State:
        """Estimate an assignment by the list schedule of its warm-up; times are infinite beyond the threshold."""
        table, m = self.table(device_of), self.problem.micro_batches
        limits, count, devices = np.full(len(table.stages), m), 3 * len(table.stages) * m, len(table.capacity)
        operations, starts = np.empty((count, 3), dtype=np.int64), np.empty(count)
        placed, time, missing = place(
            *table, np.ones(m), POLICY, limits, threshold, self._ramp_time, operations, starts
        )
        kinds, stages, numbers = operations[:placed].T
        starts, times, devices_of = starts[:placed], table.stages[stages, kinds], table.device_of[stages]
        horizon = min(self._ramp_time, float(time))
        # The scheduler is stuck for lack of memory if nothing is running at the horizon.
        ended = float((starts + times).max(initial=0.0)) + float(self.units.communication)
        if ended < horizon or (missing == 0 and math.isinf(time)):
            infinite = np.full(devices, math.inf)
            return _State(device_of, infinite, infinite)
        is_first = (kinds == F) & (numbers == 0)
        all_begun, ends = np.zeros(devices), np.full(devices, horizon)
        np.maximum.at(all_begun, devices_of[is_first], starts[is_first])
        np.maximum.at(ends, devices_of, starts + times)
        before = starts < all_begun[devices_of]
        waits = all_begun - np.bincount(devices_of[before], weights=times[before], minlength=devices)
        idle = ends - np.bincount(devices_of, weights=times, minlength=devices)
        return _State(device_of, self.loads(device_of) + idle, waits)

    def schedule_step(self, state: _State, threshold: float = math.inf) -> _WholeStep:
        """The fastest list schedule of an assignment's full step; its time is infinite if all exceed the threshold."""
        table, m = self.table(state.device_of), self.problem.micro_batches
        limits, no_record = np.full(len(table.stages), m), (np.empty((0, 3), dtype=np.int64), np.empty(0))
        best = _WholeStep(state, math.inf, POLICY)
        for timeout in WAIT_LIMITS:
            policy = POLICY.copy()
            policy[WAIT_LIMIT] = timeout
            _, time, missing = place(*table, np.ones(m), policy, limits, min(threshold, best.time), np.inf, *no_record)
            if not missing and time < best.time:
                best = _WholeStep(state, float(time), policy)
        return best

    def initial_states(self) -> Iterator[_State]:
        """Initial assignments, in turns of several units, that balance the devices' work plus wait."""
        devices, count = self.problem.devices, self.work.shape[1]
        for turn in sorted({math.ceil(count / (devices * stages)) for stages in range(2, MAX_STAGES_PER_DEVICE + 1)}):
            forward_times = [float(u.forward) + float(self.units.communication) / turn for u in self.units.units]
            first_units = np.minimum(np.arange(devices) * turn, count - 1)
            waits = np.array([*accumulate(forward_times, initial=0.0)])[first_units]
            for _ in range(WAIT_UPDATES):
                assigned = self._zigzag(waits, turn)
                if assigned is None:
                    break
                state = self.evaluate(assigned)
                balanced = self._balanced(assigned, waits, fixed=devices * turn)
                yield from (state, self.evaluate(balanced), self.evaluate(self._reassigned(balanced, turn)))
                waits = (waits + state.waits) / 2

    def _zigzag(self, waits: Floats, turn: int) -> Ints | None:
        """The zigzag assignment with the lowest time limit; None if the states do not fit."""
        m = self.problem.micro_batches
        low = m * float(self.work.min(axis=0).sum()) / self.problem.devices
        high, result = 2 * m * float(self.work.max(axis=0).sum()) + float(waits.max()), None
        while high - low > 1e-4 * high:
            time = (low + high) / 2
            assigned = self._assigned_within((time - waits) / m, turn)
            if assigned is None:
                low = time
            else:
                high, result = time, assigned
        return result

    def _assigned_within(self, limits: Floats, turn: int) -> Ints | None:
        """Assign turns of units down the devices and up again, skipping full ones; None if units remain."""
        devices, count = self.work.shape
        path = [*range(devices), *reversed(range(devices))]
        loads, states, device_of = np.zeros(devices), np.zeros(devices), np.empty(count, np.int64)
        turns = unit = full_in_a_row = 0
        while unit < count and full_in_a_row < len(path):
            device, begin, taken = path[turns % len(path)], unit, 0
            while unit < count and taken < turn:
                load, state = loads[device] + self.work[device, unit], states[device] + self._states[device, unit]
                if load > limits[device] * (1 + 1e-12) or state > self._capacity[device]:
                    break
                loads[device], states[device], device_of[unit] = load, state, device
                taken += self._fills_turn[unit]
                unit += 1
            turns += 1
            full_in_a_row = full_in_a_row + 1 if unit == begin else 0
        return device_of if unit == count and len(set(device_of.tolist())) == devices else None

    def _balanced(self, device_of: Ints, waits: Floats, *, fixed: int) -> Ints:
        """Exchange units of the device that finishes last, except the first, while that makes it finish earlier."""
        m, movable = self.problem.micro_batches, np.arange(len(device_of)) >= fixed
        while True:
            ends = self.loads(device_of) + waits
            last = int(np.argmax(ends))
            best, exchange = ends[last] * (1 - 1e-12), None
            candidates = np.flatnonzero((device_of != last) & movable)
            for unit in np.flatnonzero((device_of == last) & movable):
                owners = device_of[candidates]
                last_ends = ends[last] + m * (self.work[last, candidates] - self.work[last, unit])
                owner_ends = ends[owners] + m * (self.work[owners, unit] - self.work[owners, candidates])
                ends_after = np.maximum(last_ends, owner_ends)
                if len(ends_after) and ends_after.min() < best:
                    best, exchange = ends_after.min(), (int(unit), int(candidates[np.argmin(ends_after)]))
            if exchange is None:
                return device_of
            device_of = _rotated(device_of, exchange)

    def _reassigned(self, device_of: Ints, turn: int) -> Ints:
        """Assign every device the same number of units of each cost again, in zigzag order."""
        devices, count = self.problem.devices, len(device_of)
        counts = [Counter(self._unit_costs[unit] for unit in np.flatnonzero(device_of == d)) for d in range(devices)]
        reassigned, unit, path = np.empty(count, np.int64), 0, [*range(devices)]
        pending = path
        while unit < count:
            device = next((d for d in pending if counts[d][self._unit_costs[unit]]), None)
            if device is None:
                pending = path = path[::-1]
                continue
            pending, taken = [d for d in pending if d != device], 0
            while unit < count and taken < turn and counts[device][self._unit_costs[unit]]:
                counts[device][self._unit_costs[unit]] -= 1
                reassigned[unit] = device
                taken += self._fills_turn[unit]
                unit += 1
        return reassigned

    def anneal(self, best: _WholeStep, effort: Effort, seed: int) -> _WholeStep:
        """Anneal by moves of two or three units until the effort is spent, and return the best assignment.

        The full step is scheduled only if the warm-up score improves on that of the best assignment.
        """
        state = best.state
        rng, time, best_ramp = random.Random(seed), state.time, state.time
        price = TRIAL_PRICE[0] + TRIAL_PRICE[1] * len(_begins(state.device_of)) * self.problem.micro_batches
        while not effort.over:
            effort.spend(DRAW_PRICE)
            units = self._draw_units(state, rng)
            if units is None:
                continue
            temperature = INITIAL_TEMPERATURE * effort.remaining / effort.seconds
            max_unevenness = state.unevenness(time) - temperature * math.log(1 - rng.random())
            limit = time * (1 + max_unevenness / NORM_EXPONENT)
            loads, assigned = self.loads(state.device_of), _rotated(state.device_of, units)
            ends = self.loads(assigned) + MIN_RETAINED_WAIT * (state.ends - loads)
            if ends[state.device_of[[*units]]].max() >= limit:
                continue
            effort.spend(price)
            candidate = self.evaluate(assigned, limit)
            if candidate.time < math.inf and candidate.unevenness(time) <= max_unevenness:
                state = candidate
                if state.time < best_ramp * (1 - PROMISING_GAP):
                    effort.spend(WHOLE_STEP_PRICE * price)
                    full = self.schedule_step(state, best.time)
                    if full.time < best.time:
                        best, best_ramp = full, state.time
                    else:
                        state = best.state
        return best

    def _draw_units(self, state: _State, rng: random.Random) -> tuple[int, ...] | None:
        """Draw units of two or three devices, the first from a late device; None if the draw is invalid."""

        def alongside(unit: int, distance: float) -> int:
            return unit + rng.choice((-1, 1)) * (1 + int(rng.expovariate(1 / distance)))

        count = len(state.device_of)
        rank = 0 if rng.random() < LAST_DEVICE_SHARE else int(rng.expovariate(1 / MEAN_DEVICE_RANK))
        device = np.argsort(-state.ends, kind="stable")[min(rank, len(state.ends) - 1)]
        candidates = np.flatnonzero(state.device_of == device)
        first = int(candidates[rng.randrange(len(candidates))])
        if rng.random() < ROTATION_SHARE:
            second = rng.randrange(count)
            units: tuple[int, ...] = (first, second, alongside(second, MEAN_ROTATION_DISTANCE))
        else:
            units = (first, rng.randrange(count) if rng.random() < UNIFORM_SHARE else alongside(first, MEAN_DISTANCE))
        if not all(0 <= unit < count for unit in units):
            return None
        return units if len(set(state.device_of[[*units]].tolist())) == len(units) else None

    def solution(self, best: _WholeStep) -> Solution:
        """The list schedule of an assignment, with its costs."""
        device_of = best.state.device_of
        table, m = self.table(device_of), self.problem.micro_batches
        placement = Placement.of(table.device_of.tolist())
        cuts = [*_begins(device_of).tolist(), len(device_of)]
        partition = Partition.cut(self.units, [end - begin for begin, end in pairwise(cuts)])
        placed = schedule(table, np.ones(m), best.policy, np.full(len(table.stages), m))
        if placed.missing:
            raise InfeasibleError(
                "The fastest assignment of units to devices that was found does not fit without recomputation."
            )
        return Solution(
            schedule=Schedule(
                name="joint", placement=placement, micro_batches=m, orders=placed.orders(table.device_of)
            ),
            costs=self.units.stage_costs(partition, placement),
            partition=partition,
        )


def _begins(device_of: Ints) -> Ints:
    """The first unit of every stage."""
    return np.flatnonzero(np.append(True, np.diff(device_of) != 0))


def _rotated(device_of: Ints, units: tuple[int, ...]) -> Ints:
    """Assign each of the units to the device of the next one, cyclically."""
    changed = device_of.copy()
    changed[[*units]] = device_of[[*units[1:], units[0]]]
    return changed
