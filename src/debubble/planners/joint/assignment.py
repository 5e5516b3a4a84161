"""Units assigned to devices freely, so that some devices hold more stages than others.

Stages are runs of units, and with as many of them on every device some models cannot be divided evenly: of three
half-layers for each device, one device also has the head.  An assignment names the device of every unit; neighbours on
one device are a stage.

Weight gradients may be delayed to the end of the step where memory allows it.  A device is then done when it has been
idle in the warm-up and has done its work for all micro-batches, and devices with less work may be idle for longer.
First assignments go down the devices and up again, skipping those that are full: a device is full when its work and
the time until all its stages have begun exceed the least limit within which all units find a place.  Exchanges balance
the devices, and annealing continues from the best.  It scores an assignment by the list schedule of the warm-up, which
takes a fifth of the time of the whole step; the whole step is scheduled for the most promising ones.
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
    AFTER,
    COLUMNS,
    FORWARD,
    FREED,
    INPUT,
    KEPT,
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
"""Policy of the list scheduler: weight gradients wait as long as anything else can run, deep stages go first."""
PATIENCES = 0.0, 0.06
"""The patience of the list scheduler with weight gradients that is tried for whole steps: with none at all the last
micro-batches of some assignments come back late."""
MOST_STAGES = 6
"""Stages per device, on average, that a first assignment has at most."""
ROUNDS = 8
"""Times that a first assignment is made, with the waits that the one before it showed."""
MIN_UNIT_WORK = 0.25
"""A unit with less work, in means, fills no turn of a device: an embedding costs next to nothing."""
CHAINS, PARTS = 4, 2
"""Chains from the best first assignment, and parts of the effort: in the second all continue from the best of them."""
TEMPERATURE = 0.1
"""At which they begin, in logarithms of the unevenness; they cool to none."""
NORM_EXPONENT = 1000.0
"""Logarithm by which a device weighs more that is done later, per part of the step by which it is."""
LAST, NEXT = 0.4, 6.0
"""Share of moves in which the device that is done last gives a unit away; mean rank of the device that does else."""
ROTATIONS, ANYWHERE, NEAR, NEIGHBOUR = 0.3, 0.4, 8.0, 2.0
"""Share of the exchanges that are of three units and not two; share of those in which the second one is anywhere, else
its mean distance in units; and the mean distance between the second and the third."""
KEPT_WAIT_SHARE = 0.5
"""The part of its wait that a device keeps at least, whatever units it gets."""
PROMISING_GAP = 1e-4
"""The part of the step that the first ramp has to promise before the whole step is ordered."""
WHOLE_STEP_PRICE = 10.0
"""Price of ordering a whole step, in prices of the first ramp."""
DRAW_PRICE, TRIAL_PRICE = 4e-5, (3e-4, 3e-8)
"""Seconds of the reference machine to draw a change; to score it, and more per pair of a stage and a micro-batch."""


def assign(problem: Problem, units: Units) -> Solution:
    """Assign the units to devices and order them with the list scheduler; nothing is recomputed or offloaded.

    Raises InfeasibleError if no assignment that was tried fits.
    """
    assignments, effort = _Assignments(problem, units), problem.begun()
    first = min(assignments.first(), key=_time, default=None)
    if first is None or math.isinf(first.time):
        raise InfeasibleError("No assignment of units to devices that was tried fits without recomputation.")
    best = assignments.whole(first)
    for part in range(PARTS):
        efforts = [Effort(CORES * problem.effort / (PARTS * CHAINS), deadline=effort.deadline) for _ in range(CHAINS)]
        seeds = [(PARTS * problem.seed + part) * CHAINS + chain for chain in range(CHAINS)]
        with ThreadPoolExecutor(available_cores()) as pool:
            best = min(pool.map(assignments.improved, [best] * CHAINS, efforts, seeds), key=_time)
    return replace(assignments.solution(best), cut_off=effort.cut_off)


@dataclass(frozen=True)
class _State:
    """An assignment, and when its devices can be done.

    Attributes:
        device_of: Per unit, its device.
        ends: Per device, all of its work and the time that it is idle before the first micro-batch is back.
        waits: Per device, the time that it is idle before all of its stages have begun.
    """

    device_of: Ints
    ends: Floats
    waits: Floats

    @property
    def time(self) -> float:
        """The end of the last device."""
        return float(self.ends.max())

    def unevenness(self, time: float) -> float:
        """The less, the fewer devices are done as late as a time or later; at most 0 if none is."""
        return math.log(float(np.exp(NORM_EXPONENT * (self.ends / time - 1)).sum()))


def _time(found: _State | _WholeStep) -> float:
    return found.time


@dataclass(frozen=True)
class _WholeStep:
    """An assignment with the time of the list schedule of its whole step, and the policy that made it."""

    state: _State
    time: float
    policy: Floats


@dataclass(frozen=True)
class _Assignments:
    """All assignments of a problem's units, and what they cost."""

    problem: Problem
    units: Units

    @cached_property
    def work(self) -> Floats:
        """[device, unit]: time of a micro-batch."""
        tables = [self.units.on(device) for device in range(self.problem.devices)]
        return np.array([[float(unit.work) for unit in table] for table in tables])

    @cached_property
    def _rows(self) -> Floats:
        """[device, unit, column]: what a unit adds to the row of its stage."""
        rows = np.zeros((*self.work.shape, COLUMNS))
        for device in range(self.problem.devices):
            for n, unit in enumerate(self.units.on(device)):
                sums = self.units.stage_sums(((n, "none"),), device)
                rows[device, n, [FORWARD, INPUT, WEIGHT, KEPT, FREED, AFTER]] = (
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
        """The bytes of each device for states and activations."""
        workspace = max(float(unit.workspace) for unit in self.units.units)
        devices = self.problem.devices
        buffers = [float(self.units.buffers((d,), devices)) for d in range(devices)]
        capacity: Floats = np.minimum(self.problem.limits, 1e30) - float(self.units.static) - workspace - buffers
        return capacity

    @cached_property
    def _kinds(self) -> list[tuple[float, ...]]:
        """The numbers of each unit that equal units share."""
        return [(*map(float, (u.forward, u.backward_input, u.work, u.static)),) for u in self.units.units]

    @cached_property
    def _fills_turn(self) -> list[bool]:
        """For each unit, whether it counts where devices take turns."""
        return [bool(work >= MIN_UNIT_WORK * self.work[0].mean()) for work in self.work[0]]

    @cached_property
    def _messages(self) -> Floats:
        """The time of a message from every device to every other."""
        devices = range(self.problem.devices)
        return np.array([[float(self.units.message(a, b)) for b in devices] for a in devices])

    @cached_property
    def _ramp(self) -> float:
        """Time until the first micro-batch is back where it began, if every unit were a stage."""
        messages = 2 * float(self.units.communication) * (len(self.units.units) - 1)
        return messages + sum(float(unit.forward + unit.backward_input) for unit in self.units.units)

    def loads(self, device_of: Ints) -> Floats:
        """The work of each device for all micro-batches."""
        own = self.work[device_of, np.arange(len(device_of))]
        loads: Floats = self.problem.micro_batches * np.bincount(
            device_of, weights=own, minlength=self.problem.devices
        ).astype(np.float64)
        return loads

    def table(self, device_of: Ints) -> StageTable:
        """The stages of an assignment, as the list scheduler sees them."""
        begins, own, devices = _begins(device_of), np.arange(len(device_of)), np.arange(self.problem.devices)
        stages = np.add.reduceat(self._rows[device_of, own], begins)
        stages[:-1, SEND] = self._messages[device_of[begins[:-1]], device_of[begins[1:]]]
        states = np.bincount(device_of, weights=self._states[device_of, own], minlength=len(devices))
        endless = np.full(len(devices), np.inf)
        return StageTable(stages, device_of[begins], self._capacity - states, devices, devices + len(devices), endless)

    def state(self, device_of: Ints, threshold: float = math.inf) -> _State:
        """An assignment with what the list schedule of the first ramp shows; infinite times beyond a threshold."""
        table, m = self.table(device_of), self.problem.micro_batches
        most, count, devices = np.full(len(table.stages), m), 3 * len(table.stages) * m, len(table.capacity)
        operations, starts = np.empty((count, 3), dtype=np.int64), np.empty(count)
        placed, time, missing = place(*table, np.ones(m), POLICY, most, threshold, self._ramp, operations, starts)
        kinds, stages, numbers = operations[:placed].T
        starts, times, where = starts[:placed], table.stages[stages, kinds], table.device_of[stages]
        horizon = min(self._ramp, float(time))
        # It gets stuck for lack of memory where nothing more is under way.
        ended = float((starts + times).max(initial=0.0)) + float(self.units.communication)
        if ended < horizon or (missing == 0 and math.isinf(time)):
            never = np.full(devices, math.inf)
            return _State(device_of, never, never)
        first = (kinds == F) & (numbers == 0)
        begun, ends = np.zeros(devices), np.full(devices, horizon)
        np.maximum.at(begun, where[first], starts[first])
        np.maximum.at(ends, where, starts + times)
        before = starts < begun[where]
        waits = begun - np.bincount(where[before], weights=times[before], minlength=devices)
        idle = ends - np.bincount(where, weights=times, minlength=devices)
        return _State(device_of, self.loads(device_of) + idle, waits)

    def whole(self, state: _State, threshold: float = math.inf) -> _WholeStep:
        """The fastest list schedule of an assignment's whole step; of infinite time if all end after a threshold."""
        table, m = self.table(state.device_of), self.problem.micro_batches
        most, nothing = np.full(len(table.stages), m), (np.empty((0, 3), dtype=np.int64), np.empty(0))
        best = _WholeStep(state, math.inf, POLICY)
        for timeout in PATIENCES:
            policy = POLICY.copy()
            policy[WAIT_LIMIT] = timeout
            _, time, missing = place(*table, np.ones(m), policy, most, min(threshold, best.time), np.inf, *nothing)
            if not missing and time < best.time:
                best = _WholeStep(state, float(time), policy)
        return best

    def first(self) -> Iterator[_State]:
        """First assignments, in turns of some units each: every device's work and wait come out as even as can be."""
        devices, count = self.problem.devices, self.work.shape[1]
        for turn in sorted({math.ceil(count / (devices * stages)) for stages in range(2, MOST_STAGES + 1)}):
            ways = [float(u.forward) + float(self.units.communication) / turn for u in self.units.units]
            waits = np.array([*accumulate(ways, initial=0.0)])[np.minimum(np.arange(devices) * turn, count - 1)]
            for _ in range(ROUNDS):
                assigned = self._down_and_up(waits, turn)
                if assigned is None:
                    break
                state = self.state(assigned)
                evened = self._evened(assigned, waits, kept=devices * turn)
                yield from (state, self.state(evened), self.state(self._in_turn(evened, turn)))
                waits = (waits + state.waits) / 2

    def _down_and_up(self, waits: Floats, turn: int) -> Ints | None:
        """The assignment of the least time within which all units find a place; None if their states have no room."""
        m = self.problem.micro_batches
        least = m * float(self.work.min(axis=0).sum()) / self.problem.devices
        most, found = 2 * m * float(self.work.max(axis=0).sum()) + float(waits.max()), None
        while most - least > 1e-4 * most:
            time = (least + most) / 2
            assigned = self._assigned_within((time - waits) / m, turn)
            if assigned is None:
                least = time
            else:
                most, found = time, assigned
        return found

    def _assigned_within(self, limits: Floats, turn: int) -> Ints | None:
        """Go down the devices and up again, in turns of some units, past those that are full; None if all are."""
        devices, count = self.work.shape
        path = [*range(devices), *reversed(range(devices))]
        loads, states, device_of = np.zeros(devices), np.zeros(devices), np.empty(count, np.int64)
        at = unit = refused = 0
        while unit < count and refused < len(path):
            device, begin, taken = path[at % len(path)], unit, 0
            while unit < count and taken < turn:
                load, state = loads[device] + self.work[device, unit], states[device] + self._states[device, unit]
                if load > limits[device] * (1 + 1e-12) or state > self._capacity[device]:
                    break
                loads[device], states[device], device_of[unit] = load, state, device
                taken += self._fills_turn[unit]
                unit += 1
            at += 1
            refused = refused + 1 if unit == begin else 0
        return device_of if unit == count and len(set(device_of.tolist())) == devices else None

    def _evened(self, device_of: Ints, waits: Floats, *, kept: int) -> Ints:
        """Exchange units of the device that is done last for others', the first ones aside, while that evens it out."""
        m, movable = self.problem.micro_batches, np.arange(len(device_of)) >= kept
        while True:
            ends = self.loads(device_of) + waits
            last = int(np.argmax(ends))
            best, exchange = ends[last] * (1 - 1e-12), None
            others = np.flatnonzero((device_of != last) & movable)
            for unit in np.flatnonzero((device_of == last) & movable):
                theirs = device_of[others]
                own = ends[last] + m * (self.work[last, others] - self.work[last, unit])
                longer = np.maximum(own, ends[theirs] + m * (self.work[theirs, unit] - self.work[theirs, others]))
                if len(longer) and longer.min() < best:
                    best, exchange = longer.min(), (int(unit), int(others[np.argmin(longer)]))
            if exchange is None:
                return device_of
            device_of = _rotated(device_of, exchange)

    def _in_turn(self, device_of: Ints, turn: int) -> Ints:
        """Assign every device units of the same kinds again, in the order in which it is passed down and up."""
        devices, count = self.problem.devices, len(device_of)
        needs = [Counter(self._kinds[unit] for unit in np.flatnonzero(device_of == d)) for d in range(devices)]
        again, unit, path = np.empty(count, np.int64), 0, [*range(devices)]
        left = path
        while unit < count:
            device = next((d for d in left if needs[d][self._kinds[unit]]), None)
            if device is None:
                left = path = path[::-1]
                continue
            left, taken = [d for d in left if d != device], 0
            while unit < count and taken < turn and needs[device][self._kinds[unit]]:
                needs[device][self._kinds[unit]] -= 1
                again[unit] = device
                taken += self._fills_turn[unit]
                unit += 1
        return again

    def improved(self, best: _WholeStep, effort: Effort, seed: int) -> _WholeStep:
        """Anneal by changes of two or three units' places until the effort is spent; the best assignment on the way.

        What the first ramp says is held against the whole step where it promises more than the best.
        """
        state = best.state
        dice, time, promised = random.Random(seed), state.time, state.time
        price = TRIAL_PRICE[0] + TRIAL_PRICE[1] * len(_begins(state.device_of)) * self.problem.micro_batches
        while not effort.over:
            effort.spend(DRAW_PRICE)
            units = self._change(state, dice)
            if units is None:
                continue
            temperature = TEMPERATURE * effort.left / effort.seconds
            allowed = state.unevenness(time) - temperature * math.log(1 - dice.random())
            limit = time * (1 + allowed / NORM_EXPONENT)
            loads, assigned = self.loads(state.device_of), _rotated(state.device_of, units)
            ends = self.loads(assigned) + KEPT_WAIT_SHARE * (state.ends - loads)
            if ends[state.device_of[[*units]]].max() >= limit:
                continue
            effort.spend(price)
            found = self.state(assigned, limit)
            if found.time < math.inf and found.unevenness(time) <= allowed:
                state = found
                if state.time < promised * (1 - PROMISING_GAP):
                    effort.spend(WHOLE_STEP_PRICE * price)
                    checked = self.whole(state, best.time)
                    if checked.time < best.time:
                        best, promised = checked, state.time
                    else:
                        state = best.state
        return best

    def _change(self, state: _State, dice: random.Random) -> tuple[int, ...] | None:
        """Units of two or three devices, the first of one that is done late; None if the draw has none."""

        def alongside(unit: int, distance: float) -> int:
            return unit + dice.choice((-1, 1)) * (1 + int(dice.expovariate(1 / distance)))

        count = len(state.device_of)
        rank = 0 if dice.random() < LAST else min(int(dice.expovariate(1 / NEXT)), len(state.ends) - 1)
        mine = np.flatnonzero(state.device_of == np.argsort(-state.ends, kind="stable")[rank])
        one = int(mine[dice.randrange(len(mine))])
        if dice.random() < ROTATIONS:
            two = dice.randrange(count)
            units: tuple[int, ...] = (one, two, alongside(two, NEIGHBOUR))
        else:
            units = (one, dice.randrange(count) if dice.random() < ANYWHERE else alongside(one, NEAR))
        if not all(0 <= unit < count for unit in units):
            return None
        return units if len(set(state.device_of[[*units]].tolist())) == len(units) else None

    def solution(self, found: _WholeStep) -> Solution:
        """The list schedule of an assignment, with its stages' costs."""
        device_of = found.state.device_of
        table, m = self.table(device_of), self.problem.micro_batches
        placement = Placement.of(table.device_of.tolist())
        cuts = [*_begins(device_of).tolist(), len(device_of)]
        partition = Partition.cut(self.units, [end - begin for begin, end in pairwise(cuts)])
        made = schedule(table, np.ones(m), found.policy, np.full(len(table.stages), m))
        if made.missing:
            raise InfeasibleError(
                "The fastest assignment of units to devices that was found does not fit without recomputation."
            )
        return Solution(
            schedule=Schedule(name="joint", placement=placement, micro_batches=m, orders=made.orders(table.device_of)),
            costs=self.units.stage_costs(partition, placement),
            partition=partition,
        )


def _begins(device_of: Ints) -> Ints:
    """The first unit of every stage."""
    return np.flatnonzero(np.append(True, np.diff(device_of) != 0))


def _rotated(device_of: Ints, units: tuple[int, ...]) -> Ints:
    """The assignment in which each of the units goes to the device of the next."""
    changed = device_of.copy()
    changed[[*units]] = device_of[[*units[1:], units[0]]]
    return changed
