"""Units per stage: the splits of a model that planners start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InputError, Placement

SHARPNESS = 16
"""Power of the norm of the devices' work that is made small: the larger, the more the busiest device alone counts."""


def even_counts(units: Units, stages: int) -> list[int]:
    """Megatron's even split, as units per stage: those between embedding and head in equal runs, longer ones last.

    Raises InputError if there are fewer units than stages.
    """
    _check(units, stages)
    types = [unit.type for unit in units.units]
    embedding, head = int(types[0] == "embedding"), int(types[-1] == "head")
    inner = len(types) - embedding - head
    counts = [inner // stages + (s >= stages - inner % stages) for s in range(stages)]
    counts[0] += embedding
    counts[-1] += head
    return counts if all(counts) else balanced_counts(units, stages)


def balanced_counts(units: Units, stages: int) -> list[int]:
    """The split whose largest stage has the least work, found exactly by dynamic programming.

    Stages lie on the devices in turn.  Raises InputError if there are fewer units than stages.
    """
    _check(units, stages)
    tables = units.on_devices or (units.units,)
    return list(_balanced(tuple(tuple(float(u.work) for u in table) for table in tables), stages))


@lru_cache(maxsize=4096)
def _balanced(works: tuple[tuple[float, ...], ...], stages: int) -> tuple[int, ...]:
    """The split of units with this work on each device.

    Where the last stage begins, its work falls and the largest of the stages before it grows; the best place is where
    the two meet, which only moves on as the units become more.
    """
    totals = [[0.0, *accumulate(work)] for work in works]
    n = len(works[0])
    # least[i]: the smallest possible largest stage over the first i units; cuts[s][i]: where its last stage begins.
    least = totals[0]
    cuts: list[list[int]] = []
    for s in range(1, stages):
        total = totals[s % len(totals)]
        row, cut, meet = [math.inf] * (n + 1), [0] * (n + 1), s
        for end in range(n if s == stages - 1 else s + 1, n - (stages - 1 - s) + 1):
            while meet < end - 1 and least[meet] < total[end] - total[meet]:
                meet += 1
            begin, largest = meet, max(least[meet], total[end] - total[meet])
            if meet > s and total[end] - total[meet - 1] < largest:
                begin, largest = meet - 1, total[end] - total[meet - 1]
            while begin + 1 < end and least[begin + 1] <= largest:
                begin += 1
            row[end], cut[end] = largest, begin
        least = row
        cuts.append(cut)
    counts = []
    end = n
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return (end, *reversed(counts))


def balanced_by_device(units: Units, placement: Placement) -> list[int]:
    """A split such that the busiest device, with all of its stages, has little work, as units per stage.

    It begins with the stages as even as they can be, and moves boundaries between stages, one or several in a row by
    one unit, while that evens out the devices.  It need not be the best split.

    Raises InputError if there are fewer units than stages.
    """
    counts = balanced_counts(units, placement.stages)
    return counts if placement.chunks == 1 else _evened(counts, [float(unit.work) for unit in units.units], placement)


def balanced_within(
    units: Units, placement: Placement, limits: Sequence[float], *, micro_batches: int
) -> list[int] | None:
    """A split of little work on the busiest device, in which every device has room if it recomputes everything.

    A unit weighs its share of the work and its share of the states; the states count as little as fits.  None if the
    split by work alone has room under the devices' limits, in bytes, if none has, or if devices are of several types.
    Raises InputError if there are fewer units than stages.
    """
    _check(units, placement.stages)
    work = [float(unit.work) for unit in units.units]
    states = [float(unit.static) for unit in units.units]
    by_work = balanced_by_device(units, placement)
    helps = 0 < sum(states) <= sum(limits) and not units.on_devices
    if not helps or _has_capacity(units, by_work, placement, limits, micro_batches):
        return None
    for share in (step / STATES_STEPS for step in range(1, STATES_STEPS + 1)):
        weights = [
            (1 - share) * time / sum(work) + share * size / sum(states) for time, size in zip(work, states, strict=True)
        ]
        counts = _evened(list(_balanced((tuple(weights),), placement.stages)), weights, placement)
        if _has_capacity(units, counts, placement, limits, micro_batches):
            return counts
    return None


STATES_STEPS = 8
"""Steps in which the states' share of the weights grows."""


def _has_capacity(
    units: Units, counts: Sequence[int], placement: Placement, limits: Sequence[float], micro_batches: int
) -> bool:
    """Tell whether every device has room for its states and for what (interleaved) 1F1B keeps if all recomputes.

    Stage s of S then keeps S - s micro-batches, and about 2 (S - s) / v with v chunks.
    """
    costs = units.stage_costs(Partition.cut(units, counts, strategy="full"), placement)
    restored = costs.recompute_workspace or (0,) * placement.stages
    each = 1.0 if placement.chunks == 1 else 2 / placement.chunks
    kept = [
        min(micro_batches, each * (placement.stages - stage)) * float(size)
        for stage, size in enumerate(costs.activation_recomputed)
    ]
    return all(
        costs.static_of(device) + sum(kept[stage] for stage in stages) + max(restored[stage] for stage in stages)
        <= limits[device]
        for device, stages in enumerate(placement.stages_of)
    )


def _evened(counts: Sequence[int], work: Sequence[float], placement: Placement) -> list[int]:
    """A split with boundaries moved while that evens out the devices."""
    mean = sum(work) / placement.devices
    ends = list(accumulate(counts))
    improved = True
    while improved:
        improved = False
        for begin in range(len(ends) - 1):
            for step in (1, -1):
                end = _best_end(ends, begin, step, work, mean, placement.device_of)
                if end is not None:
                    ends[begin : end + 1] = [at + step for at in ends[begin : end + 1]]
                    improved = True
    return [b - a for a, b in zip((0, *ends), ends, strict=False)]


def _best_end(
    ends: list[int], begin: int, step: int, work: Sequence[float], mean: float, device_of: Sequence[int]
) -> int | None:
    """The last of the boundaries from `begin` on that move together by `step`, if that evens out the devices.

    Stages between two boundaries that move keep their length; the ones before and after them gain or lose a unit.
    """
    if step < 0 and ends[begin] - (ends[begin - 1] if begin else 0) < 2:
        return None
    loads = [0.0] * (max(device_of) + 1)
    for d, first, last in zip(device_of, (0, *ends), ends, strict=False):
        loads[d] += sum(work[first:last]) / mean
    uneven, best, best_end = 0.0, -1e-9, None
    for end in range(begin, len(ends) - 1):
        # The unit that passes from one side of the boundary to the other.
        crossed = step * work[ends[end] if step > 0 else ends[end] - 1] / mean
        gains, loses = device_of[end], device_of[end + 1]
        uneven += (loads[gains] + crossed) ** SHARPNESS - loads[gains] ** SHARPNESS
        loads[gains] += crossed
        change = (loads[loses] - crossed) ** SHARPNESS - loads[loses] ** SHARPNESS
        loads[loses] -= crossed
        uneven += change
        if uneven < best and (step < 0 or ends[end + 1] - ends[end] > 1):
            best, best_end = uneven, end
    return best_end


def even_and_balanced(units: Units, stages: int) -> list[tuple[int, ...]]:
    """The even and the balanced split, or one of them if they are equal: where planners begin.

    Raises InputError if there are fewer units than stages.
    """
    return list(dict.fromkeys((tuple(even_counts(units, stages)), tuple(balanced_counts(units, stages)))))


def _check(units: Units, stages: int) -> None:
    if len(units.units) < stages:
        raise InputError(f"{len(units.units)} model units cannot fill {stages} stages; use fewer devices or chunks.")
