"""Layers dealt to devices: whether what every device can hold is enough for all of them, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from debubble.kernels import jit
from debubble.papers.scope.program.instance import Instance
from debubble.search.effort import Effort

LARGEST = 50_000
"""States of the dynamic program, beyond which runs are too many for it."""
NOTHING = -(2**40)
"""The layers dealt where nothing can be dealt."""
DEAL, STATE = 1.2e-4, 6e-10
"""Seconds to deal all layers, and of that for each choice of a device in each state."""

Load = tuple[int, ...]
"""Layers of each run."""


@dataclass(frozen=True)
class Capacity:
    """What devices can hold that may hold the same runs.

    Attributes:
        devices: These devices.
        runs: The runs that they may hold.
        most: By device, and by layers of each of these runs but the largest one: the most layers of that beside them;
            -1 where they do not fit.  More fit nowhere with more layers of another run.
        needed: By run, the layers without which a chunk would be empty.
    """

    devices: tuple[int, ...]
    runs: tuple[int, ...]
    most: Any
    needed: Mapping[int, int]


def dealable(inst: Instance) -> bool:
    """Tell whether runs are few enough for the dynamic program."""
    return math.prod(count + 1 for count in inst.counts) <= LARGEST * (max(inst.counts) + 1)


def largest_run(counts: Sequence[int]) -> int:
    """The run with the most layers."""
    return max(range(len(counts)), key=lambda r: counts[r])


def most_of_largest(fits: Any, at: int | None) -> Any:
    """The `most` of one device.

    Args:
        fits: By layers of each of its runs: whether it can hold so many.
        at: The largest run among these; None if it may not hold that.
    """
    if at is None:
        return np.where(fits, 0, -1)[None]
    fits = np.moveaxis(fits, at, -1)
    return np.where(fits.any(axis=-1), fits.shape[-1] - 1 - fits[..., ::-1].argmax(axis=-1), -1)[None]


def dealt(counts: Sequence[int], capacities: Sequence[Capacity], effort: Effort) -> list[Load] | None:
    """Loads of the devices, in the order of their own runs, that hold all layers; None if there are none.

    Loads that fit are taken to fit with fewer layers too, as long as no chunk is empty.
    """
    effort.spend(DEAL)
    largest = largest_run(counts)
    holders = [sum(len(each.devices) for each in capacities if r in each.runs) for r in range(len(counts))]
    shared = [r for r, number in enumerate(holders) if number > 1 and r != largest]
    parts = []
    for each in capacities:
        choices = _choices(counts, each, shared, largest)
        if choices is None:
            return None
        parts.append(choices)
    per_device, rows, held = (np.concatenate(some) for some in zip(*parts, strict=True))
    total = np.array([counts[r] for r in shared], dtype=np.int64)
    effort.spend(STATE * len(rows) * math.prod(counts[r] + 1 for r in shared))
    chosen = _chosen(total, counts[largest], np.concatenate(([0], np.cumsum(per_device))), rows, held).tolist()
    if not chosen:
        return None
    devices = [(each, device) for each in capacities for device in each.devices]
    loads = [
        dict(zip(shared, row, strict=True)) | {largest: number}
        for row, number in zip(rows[chosen].tolist(), held[chosen].tolist(), strict=True)
    ]
    for run in (*shared, largest):
        needed = [each.needed.get(run, 0) for each, _ in devices]
        _take(loads, run, sum(load[run] for load in loads) - counts[run], needed)
    found = {
        device: tuple(load.get(r, counts[r]) for r in each.runs)
        for (each, device), load in zip(devices, loads, strict=True)
    }
    return [found[device] for device in range(len(found))]


def _choices(
    counts: Sequence[int], capacity: Capacity, shared: Sequence[int], largest: int
) -> tuple[Any, Any, Any] | None:
    """How many choices each device has, layers of the other shared runs, a row each, and the most of the largest one.

    Returns:
        None if some device has none.
    """
    most = capacity.most
    others = [run for run in capacity.runs if run != largest]
    for at, run in reversed(list(enumerate(others, start=1))):
        if run not in shared:  # no other device can hold it
            if most.shape[at] <= counts[run]:
                return None
            most = most.take(-1, axis=at)
    useful = most >= 0
    for axis in range(1, most.ndim):
        # Where one layer more is possible beside as many, it is better.
        fewer, more = (slice(None),) * axis + (slice(-1),), (slice(None),) * axis + (slice(1, None),)
        useful[fewer] &= most[more] < most[fewer]
    device, *rows = np.nonzero(useful)
    per_device = np.bincount(device, minlength=len(most))
    if not per_device.all():
        return None
    numbers = np.zeros((len(device), len(shared)), dtype=np.int64)
    for row, run in zip(rows, (run for run in others if run in shared), strict=True):
        numbers[:, shared.index(run)] = row
    return per_device, numbers, most[useful]


@jit
def _chosen(total: Any, count: int, starts: Any, numbers: Any, held: Any) -> Any:
    """A row for each device, so that all layers are dealt; none if that is impossible.

    Args:
        total: Layers of each shared run.
        count: Layers of the largest one.
        starts: Where the rows of each device begin, and in the end where they end.
        numbers: Per row, layers of each shared run.
        held: Per row, layers of the largest one.
    """
    runs, devices = len(total), len(starts) - 1
    # A state is the layers of the shared runs dealt so far, at least, and has a digit for each run.
    strides = np.ones(runs + 1, np.int64)
    for run in range(runs - 1, -1, -1):
        strides[run] = strides[run + 1] * (total[run] + 1)
    states = strides[0]
    best = np.full((devices + 1, states), NOTHING)  # the most layers of the largest run
    best[0, 0] = 0
    rows, before = np.empty((devices + 1, states), np.int64), np.empty((devices + 1, states), np.int64)
    dealt = np.empty(runs, np.int64)
    for device in range(devices):
        for state in range(states):
            if best[device, state] == NOTHING:
                continue
            for run in range(runs):
                dealt[run] = state % strides[run] // strides[run + 1]
            for row in range(starts[device], starts[device + 1]):
                after = 0
                for run in range(runs):
                    after += strides[run + 1] * min(total[run], dealt[run] + numbers[row, run])
                if best[device, state] + held[row] > best[device + 1, after]:
                    best[device + 1, after] = best[device, state] + held[row]
                    rows[device + 1, after], before[device + 1, after] = row, state
    chosen = np.empty(devices, np.int64)
    state = states - 1
    if best[devices, state] < count:
        return chosen[:0]
    for device in range(devices, 0, -1):
        chosen[device - 1], state = rows[device, state], before[device, state]
    return chosen


def _take(loads: Sequence[dict[int, int]], run: int, many: int, needed: Sequence[int]) -> None:
    """Take so many layers of a run away, one from each device in turn, where more than needed are left."""
    while many > 0:
        spare = [load for load, least in zip(loads, needed, strict=True) if load[run] > least]
        if not spare:
            return
        for load in spare[:many]:
            load[run] -= 1
        many -= len(spare[:many])
