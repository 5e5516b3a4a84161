"""Layers dealt to devices: whether what every device can hold is enough for all of them, by dynamic programming."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from debubble.planners.scope.instance import Instance

LARGEST = 50_000
"""States of the dynamic program, beyond which runs are too many for it."""
DEAL = 2e-3
"""Seconds to deal all layers."""
NONE = -(2**40)
"""The layers dealt where nothing can be dealt."""

Load = tuple[int, ...]
"""Layers of each run."""


@dataclass(frozen=True)
class Capacity:
    """What a device can hold.

    Attributes:
        runs: The runs that it may hold.
        fits: By the layers of each of these runs: whether it can hold so many.
        needed: Layers of each of these runs without which a chunk would be empty.
    """

    runs: tuple[int, ...]
    fits: Any
    needed: tuple[int, ...]


def dealable(inst: Instance) -> bool:
    """Tell whether runs are few enough for the dynamic program."""
    return math.prod(count + 1 for count in inst.counts) <= LARGEST * (max(inst.counts) + 1)


def dealt(counts: Sequence[int], capacities: Sequence[Capacity]) -> list[Load] | None:
    """Loads of the devices, in the order of their own runs, that hold all layers; None if there are none.

    Loads that fit are taken to fit with fewer layers too, as long as no chunk is empty.
    """
    last = max(range(len(counts)), key=lambda r: counts[r])
    holders = [sum(r in each.runs for each in capacities) for r in range(len(counts))]
    shared = [r for r, number in enumerate(holders) if number > 1 and r != last]
    best: Any = np.full([counts[r] + 1 for r in shared], NONE)
    best[(0,) * len(shared)] = 0
    steps = []
    for each in capacities:
        some, held = _choices(counts, each, shared, last)
        if not held:
            return None
        steps.append((best, some, held))
        best = _after(best, some, held)
    total = tuple(counts[r] for r in shared)
    most = int(best[total])
    if most < counts[last]:
        return None
    loads: list[dict[int, int]] = []
    for before, some, held in reversed(steps):
        for numbers, number in zip(some, held, strict=True):
            rest = tuple(max(0, a - n) for a, n in zip(total, numbers, strict=True))
            if before[rest] + number == most:
                break
        total, most = rest, most - number
        loads.insert(0, dict(zip(shared, numbers, strict=True)) | {last: number})
    for run in (*shared, last):
        needed = [dict(zip(each.runs, each.needed, strict=True)).get(run, 0) for each in capacities]
        _take(loads, run, sum(load[run] for load in loads) - counts[run], needed)
    return [tuple(load.get(r, counts[r]) for r in each.runs) for load, each in zip(loads, capacities, strict=True)]


def _choices(
    counts: Sequence[int], capacity: Capacity, shared: Sequence[int], last: int
) -> tuple[list[Load], list[int]]:
    """Layers of the other shared runs, a row each, and the most of the last one that fit beside them."""
    fits = capacity.fits
    for at, run in reversed(list(enumerate(capacity.runs))):
        if run != last and run not in shared:  # no other device can hold it
            all_of_it = fits.shape[at] > counts[run]
            fits = fits.take(-1, axis=at) & all_of_it
    kept = [run for run in capacity.runs if run == last or run in shared]
    if last in kept:
        fits = np.moveaxis(fits, kept.index(last), -1)
        kept.remove(last)
        held = np.where(fits.any(axis=-1), fits.shape[-1] - 1 - fits[..., ::-1].argmax(axis=-1), -1)
    else:
        held = np.where(fits, 0, -1)
    useful = held >= 0
    for axis in range(held.ndim):
        # Where one layer more is possible beside as many, it is better.
        one_more = np.roll(held, -1, axis=axis)
        one_more[(slice(None),) * axis + (-1,)] = -1
        useful &= one_more < held
    rows = np.argwhere(useful)
    some = np.zeros((len(rows), len(shared)), dtype=np.int64)
    for at, run in enumerate(kept):
        some[:, shared.index(run)] = rows[:, at]
    return [tuple(row) for row in some.tolist()], held[useful].tolist()


def _after(best: Any, some: Sequence[Load], held: Sequence[int]) -> Any:
    """By the layers of the shared runs dealt so far, at least: the most of the last run with one more device."""
    most = [max(numbers) for numbers in zip(*some, strict=True)]
    # What lies before the first state is as good as that.
    padded = best[np.ix_(*(np.maximum(np.arange(-n, size), 0) for n, size in zip(most, best.shape, strict=True)))]
    further: Any = np.full(best.shape, NONE)
    one: Any = np.empty(best.shape, dtype=further.dtype)
    for numbers, number in zip(some, held, strict=True):
        spans = zip(most, numbers, best.shape, strict=True)
        np.add(padded[tuple(slice(m - n, m - n + size) for m, n, size in spans)], number, out=one)
        np.maximum(further, one, out=further)
    return further


def _take(loads: Sequence[dict[int, int]], run: int, many: int, needed: Sequence[int]) -> None:
    """Take so many layers of a run away, one from each device in turn, where more than needed are left."""
    while many > 0:
        spare = [load for load, least in zip(loads, needed, strict=True) if load[run] > least]
        if not spare:
            return
        for load in spare[:many]:
            load[run] -= 1
        many -= len(spare[:many])
