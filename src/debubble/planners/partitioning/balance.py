"""Units per stage: the splits of a model that planners start from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from debubble.costs.units import Units
from debubble.ir import InputError


def even_counts(units: Units, stages: int) -> list[int]:
    """Megatron's even split: the units between embedding and head in equal runs, longer ones last.

    Args:
        units: The model.
        stages: Stages to fill.

    Returns:
        Units per stage.

    Raises:
        InputError: If there are fewer units than stages.
    """
    _check(units, stages)
    types = [unit.type for unit in units.units]
    embedding, head = int(types[0] == "embedding"), int(types[-1] == "head")
    inner = len(types) - embedding - head
    counts = [inner // stages + (s >= stages - inner % stages) for s in range(stages)]
    counts[0] += embedding
    counts[-1] += head
    return counts if all(counts) else balanced_counts(units, stages)


def balanced_counts(units: Units, stages: int, *, weights: Sequence[float] | None = None) -> list[int]:
    """The split whose largest stage has the least work, found exactly by dynamic programming.

    Args:
        units: The model.
        stages: Stages to fill.
        weights: What counts as the work of each unit; None: its compute time.

    Returns:
        Units per stage.

    Raises:
        InputError: If there are fewer units than stages.
    """
    _check(units, stages)
    work = [float(u.work) for u in units.units] if weights is None else list(weights)
    total = [0.0, *accumulate(work)]
    n = len(work)
    # least[i]: the smallest possible largest stage over the first i units; cuts[s][i]: where its last stage begins.
    least = total[:]
    cuts: list[list[int]] = []
    for s in range(1, stages):
        row, cut = [float("inf")] * (n + 1), [0] * (n + 1)
        for end in range(s + 1, n + 1):
            for begin in range(end - 1, s - 1, -1):
                last = total[end] - total[begin]
                if last >= row[end]:
                    break
                if max(least[begin], last) < row[end]:
                    row[end], cut[end] = max(least[begin], last), begin
        least = row
        cuts.append(cut)
    counts = []
    end = n
    for cut in reversed(cuts):
        counts.append(end - cut[end])
        end = cut[end]
    return [end, *reversed(counts)]


def even_and_balanced(units: Units, stages: int) -> list[tuple[int, ...]]:
    """The even and the balanced split, or one of them if they are equal: where planners begin.

    Raises:
        InputError: If there are fewer units than stages.
    """
    return list(dict.fromkeys((tuple(even_counts(units, stages)), tuple(balanced_counts(units, stages)))))


def _check(units: Units, stages: int) -> None:
    if len(units.units) < stages:
        raise InputError(f"{len(units.units)} model units cannot fill {stages} stages; use fewer devices or chunks.")
