"""Splits of a model's units into stages from which planners start."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import InputError, Placement

NORM_POWER = 16
"""Exponent p of the p-norm of the devices' work that is minimized; a larger p approaches the maximum."""


def even_counts(units: Units, stages: int) -> list[int]:
    """Megatron's even split, in units per stage: equal runs between embedding and head, the longer ones last.

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
    """The split that minimizes the work of the largest stage, by dynamic programming.

    Stages are placed on the devices round robin.  Raises InputError if there are fewer units than stages.
    """
    _check(units, stages)
    tables = units.on_devices or (units.units,)
    return list(_balanced(tuple(tuple(float(u.work) for u in table) for table in tables), stages))


@lru_cache(maxsize=4096)
def _balanced(works: tuple[tuple[float, ...], ...], stages: int) -> tuple[int, ...]:
    """The balanced split of units with this work on each device.

    As the last stage begins later, its work falls and the largest stage before it grows.  The optimum is where the two
    cross, which moves monotonically with the number of units.
    """
    totals = [[0.0, *accumulate(work)] for work in works]
    n = len(works[0])
    # best[i]: the smallest possible largest stage over the first i units; cuts[s][i]: where its last stage begins.
    best = totals[0]
    cuts: list[list[int]] = []
    for s in range(1, stages):
        total = totals[s % len(totals)]
        row, cut, crossing = [math.inf] * (n + 1), [0] * (n + 1), s
        for end in range(n if s == stages - 1 else s + 1, n - (stages - 1 - s) + 1):
            while crossing < end - 1 and best[crossing] < total[end] - total[crossing]:
                crossing += 1
            begin, largest = crossing, max(best[crossing], total[end] - total[crossing])
            if crossing > s and total[end] - total[crossing - 1] < largest:
                begin, largest = crossing - 1, total[end] - total[crossing - 1]
            while begin + 1 < end and best[begin + 1] <= largest:
                begin += 1
            row[end], cut[end] = largest, begin
        best = row
        cuts.append(cut)
    counts = []
    end = n
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return (end, *reversed(counts))


def balanced_by_device(units: Units, placement: Placement) -> list[int]:
    """A split, in units per stage, that balances the work of devices with several stages each.

    It starts from balanced stages and moves one or several adjacent stage boundaries by one unit while that balances
    the devices better.  This local optimum need not be the best split.

    Raises InputError if there are fewer units than stages.
    """
    counts = balanced_counts(units, placement.stages)
    if placement.chunks == 1:
        return counts
    return _rebalanced(counts, [float(unit.work) for unit in units.units], placement)


def balanced_within(
    units: Units, placement: Placement, limits: Sequence[float], *, micro_batches: int
) -> list[int] | None:
    """A balanced split that fits the devices' limits, in bytes, with full recomputation.

    It balances a weighted sum of each unit's fractions of work and states, with the smallest weight of states that
    fits.  None if the split by work alone fits, if no weight fits, or if there are several types of devices.  Raises
    InputError if there are fewer units than stages.
    """
    _check(units, placement.stages)
    work = [float(unit.work) for unit in units.units]
    states = [float(unit.static) for unit in units.units]
    by_work = balanced_by_device(units, placement)
    helps = 0 < sum(states) <= sum(limits) and not units.on_devices
    if not helps or _has_capacity(units, by_work, placement, limits, micro_batches):
        return None
    for share in (step / STATE_WEIGHT_STEPS for step in range(1, STATE_WEIGHT_STEPS + 1)):
        weights = [
            (1 - share) * time / sum(work) + share * size / sum(states) for time, size in zip(work, states, strict=True)
        ]
        counts = _rebalanced(list(_balanced((tuple(weights),), placement.stages)), weights, placement)
        if _has_capacity(units, counts, placement, limits, micro_batches):
            return counts
    return None


STATE_WEIGHT_STEPS = 8
"""Number of steps in which the weight of the states grows to 1."""


def _has_capacity(
    units: Units, counts: Sequence[int], placement: Placement, limits: Sequence[float], micro_batches: int
) -> bool:
    """Whether states and activations of (interleaved) 1F1B fit every device with full recomputation.

    Stage s of S has S - s micro-batches in flight, or about 2 (S - s) / v with v chunks.
    """
    costs = units.stage_costs(Partition.cut(units, counts, strategy="full"), placement)
    restored = costs.recompute_workspace or (0,) * placement.stages
    factor = 1.0 if placement.chunks == 1 else 2 / placement.chunks
    retained = [
        min(micro_batches, factor * (placement.stages - stage)) * float(size)
        for stage, size in enumerate(costs.activation_recomputed)
    ]
    return all(
        costs.static_of(device) + sum(retained[stage] for stage in stages) + max(restored[stage] for stage in stages)
        <= limits[device]
        for device, stages in enumerate(placement.stages_of)
    )


def _rebalanced(counts: Sequence[int], work: Sequence[float], placement: Placement) -> list[int]:
    """The split after moving boundaries while that balances the devices better."""
    mean = sum(work) / placement.devices
    ends = list(accumulate(counts))
    improved = True
    while improved:
        improved = False
        for begin in range(len(ends) - 1):
            for step in (1, -1):
                end = _best_end(ends, begin, step, work, mean, placement.device_of)
                if end is not None:
                    ends[begin : end + 1] = [boundary + step for boundary in ends[begin : end + 1]]
                    improved = True
    return [b - a for a, b in zip((0, *ends), ends, strict=False)]


def _best_end(
    ends: list[int], begin: int, step: int, work: Sequence[float], mean: float, device_of: Sequence[int]
) -> int | None:
    """The last boundary of the best run from `begin` to move by `step`; None if no run balances the devices better.

    Stages between moved boundaries keep their length; the stages before and after the run gain or lose a unit.
    """
    if step < 0 and ends[begin] - (ends[begin - 1] if begin else 0) < 2:
        return None
    loads = [0.0] * (max(device_of) + 1)
    for d, first, last in zip(device_of, (0, *ends), ends, strict=False):
        loads[d] += sum(work[first:last]) / mean
    uneven, best, best_end = 0.0, -1e-9, None
    for end in range(begin, len(ends) - 1):
        # Work of the unit that crosses the boundary.
        crossed = step * work[ends[end] if step > 0 else ends[end] - 1] / mean
        gains, loses = device_of[end], device_of[end + 1]
        uneven += (loads[gains] + crossed) ** NORM_POWER - loads[gains] ** NORM_POWER
        loads[gains] += crossed
        change = (loads[loses] - crossed) ** NORM_POWER - loads[loses] ** NORM_POWER
        loads[loses] -= crossed
        uneven += change
        if uneven < best and (step < 0 or ends[end + 1] - ends[end] > 1):
            best, best_end = uneven, end
    return best_end


def even_and_balanced(units: Units, stages: int) -> list[tuple[int, ...]]:
    """The even and the balanced split, or one of them if they are equal.

    Raises InputError if there are fewer units than stages.
    """
    return list(dict.fromkeys((tuple(even_counts(units, stages)), tuple(balanced_counts(units, stages)))))


def _check(units: Units, stages: int) -> None:
    if len(units.units) < stages:
        raise InputError(f"{len(units.units)} model units cannot fill {stages} stages; use fewer devices or chunks.")
