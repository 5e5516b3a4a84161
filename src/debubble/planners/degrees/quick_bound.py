"""A lower bound of a quick plan's pipeline, by its order and its memory, before either is built.

A quick plan has balanced stages in the order of 1F1B or interleaved 1F1B.  Its device d, with the stages d, p + d, ...,

* starts when the first micro-batch has come through the stages before d, and is followed by the backwards of these;
* has all its own work to do, and what it must recompute so that the forwards before its first backward fit;
* starts that backward, of its last stage, when the first micro-batch has gone through all stages and back to it; what
  these forwards of its own do not fill of this time is idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from debubble.costs.units import Strategy, Unit
from debubble.errors import readable
from debubble.ir import InfeasibleError
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.problem import Problem
from debubble.schedules.interleaved import group_sizes, turns

ROUNDING = 1e-9
"""Share that bounds are lowered by, so that rounding never lifts one above the time that it bounds."""


class PipelineBounds:
    """Bounds of one model problem's quick plans, for any number of chunks."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._units = problem.units
        units, tables = self._units.units, self._units.on_devices or (self._units.units,)
        self._forward = [_sums([float(unit.forward) for unit in table]) for table in tables]
        self._backward = [
            _sums([float(unit.backward_input + unit.backward_weight) for unit in table]) for table in tables
        ]
        self._kept = _sums([float(unit.activation) for unit in units])
        self._static = _sums([float(unit.static) for unit in units])
        # Layers of one kind have one table of strategies.
        self._savings = {id(unit.strategies): _savings(unit) for unit in {id(u.strategies): u for u in units}.values()}

    def of(self, chunks: int) -> float:
        """Seconds that the pipeline takes at least with so many stages per device.

        Raises InfeasibleError if the forwards before the first backward do not fit, however much is recomputed.
        """
        problem, p = self._problem, self._problem.devices
        ends = list(accumulate(balanced_counts(self._units, p * chunks), initial=0))
        stages = list(pairwise(ends))
        forward, backward = (
            [totals[s % len(totals)][b] - totals[s % len(totals)][a] for s, (a, b) in enumerate(stages)]
            for totals in (self._forward, self._backward)
        )
        hop = float(self._units.communication) if p > 1 else 0.0
        through = _sums([seconds + hop for seconds in forward])
        back = _sums([seconds + hop for seconds in backward])
        alive = first_forwards(p, problem.micro_batches, chunks)
        most = 0.0
        for d, limit in enumerate(problem.limits):
            held = range(d, p * chunks, p)
            again = self._least_recomputation([stages[s] for s in held], alive[d], limit, device=d)
            own = problem.micro_batches * (sum(forward[s] + backward[s] for s in held) + again)
            filled = sum(count * forward[s] for count, s in zip(alive[d], held, strict=True))
            arrival = through[-1] - hop - through[d] + back[-1] - back[held[-1] + 1]
            inside = max(own, arrival + own - filled)
            outside = through[d] + back[d] if problem.objective == "makespan" else 0.0
            most = max(most, outside + inside)
        return most * (1 - ROUNDING)

    def _least_recomputation(
        self, stages: Sequence[tuple[int, int]], alive: Sequence[int], limit: float, *, device: int
    ) -> float:
        """Seconds of recomputation per micro-batch that a device needs at least to hold so many of each stage.

        Raises InfeasibleError if no recomputation is enough.
        """
        units = self._units
        workspace = max(float(unit.workspace) for a, b in stages for unit in units.units[a:b])
        states = float(units.static) + workspace + sum(self._static[b] - self._static[a] for a, b in stages)
        kept = sum(count * (self._kept[b] - self._kept[a]) for count, (a, b) in zip(alive, stages, strict=True))
        missing = (states + kept) * (1 - ROUNDING) - limit
        if missing <= 0:
            return 0.0
        savings = [
            (seconds / (saved * count), number * seconds, number * count * saved)
            for count, (a, b) in zip(alive, stages, strict=True)
            if count
            for kind, number in Counter(id(unit.strategies) for unit in units.units[a:b]).items()
            for seconds, saved in self._savings[kind]
        ]
        spent = 0.0
        for price, seconds, saved in sorted(savings):
            if saved >= missing:
                return spent + price * missing
            spent, missing = spent + seconds, missing - saved
        raise InfeasibleError(
            f"Device {device} needs {readable(limit + missing)} even if everything recomputes; its limit is"
            f" {readable(limit)}; raise it, or use more devices or a larger --tensor degree.",
            missing=missing,
        )


@lru_cache(maxsize=4096)
def first_forwards(devices: int, micro_batches: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """The micro-batches that each device has on each of its stages, in order, when its first backward starts.

    With one chunk these are 1F1B's, else those of interleaved 1F1B.
    """
    if chunks == 1:
        return tuple((min(micro_batches, devices - d),) for d in range(devices))
    sizes = group_sizes(micro_batches, devices)
    order = turns(sizes, range(chunks))
    counts = []
    for d in range(devices):
        ahead = Counter(chunk for chunk, _ in order[: 2 * (devices - d - 1) + (chunks - 1) * max(sizes) + 1])
        counts.append(tuple(ahead[chunk] for chunk in range(chunks)))
    return tuple(counts)


def _savings(unit: Unit) -> list[tuple[float, float]]:
    """Seconds and bytes of each step along the convex hull of a unit's strategies: no mix of them saves more."""
    ways = [(_least(strategy), float(strategy.recompute)) for strategy in unit.strategies.values()]
    kept, spent = float(unit.activation), 0.0
    steps: list[tuple[float, float]] = []
    while smaller := [way for way in ways if way[0] < kept]:
        less, seconds = min(smaller, key=lambda way: ((way[1] - spent) / (kept - way[0]), way[0]))
        steps.append((max(0.0, seconds - spent), kept - less))
        kept, spent = less, seconds
    return steps


def _least(strategy: Strategy) -> float:
    """Bytes that a unit keeps, at best where the half before it recomputes with it."""
    shared = strategy.activation if strategy.after_full is None else min(strategy.activation, strategy.after_full)
    return float(shared)


def _sums(values: Sequence[float]) -> list[float]:
    """Sums of the first values: of none, of one, ..., of all."""
    return list(accumulate(values, initial=0.0))
