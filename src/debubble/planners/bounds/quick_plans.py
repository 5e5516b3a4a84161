"""A lower bound of a quick plan's pipeline, by its order and its memory, before either is built.

A quick plan has balanced stages in the order of 1F1B or interleaved 1F1B.  Its device d, with the stages d, p + d, ...,

* starts when the first micro-batch has come through the stages before d, and is followed by the backwards of these;
* has all its own work to do, and what it must recompute so that the forwards before its first backward fit next to what
  this one restores;
* starts that backward, of its last stage, when the first micro-batch has gone through all stages and back to it; what
  these forwards of its own do not fill of this time is idle.

With hosts, which step the deepest chunks and take the activations of the shallowest one, the same is an estimate, as
ChronosPipe's orders keep less than interleaved 1F1B, and a host may be ahead of its device or after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import add

from debubble.costs.unit import Strategy
from debubble.errors import readable
from debubble.ir import InfeasibleError, Number, Placement
from debubble.planners.bounds.ramps import ROUNDING
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.problem import Problem
from debubble.schedules.interleaved import group_sizes, turns

IN_TRANSIT = 2
"""Micro-batches of a chunk on the device while its activations are offloaded."""


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
        self._gathered = _sums([float(unit.gathered) for unit in units])
        self._workspace = [float(unit.workspace) for unit in units]
        self._kinds = [id(unit.strategies) for unit in units]
        hosts, link = [unit.on_host for unit in units], float(self._units.offload_bandwidth or math.inf)
        self._on_host = _sums(
            [float(u.static - host.static) if host else 0.0 for u, host in zip(units, hosts, strict=True)]
        )
        self._down = _sums([float(host.gradients) / link if host else 0.0 for host in hosts])
        self._host_step = _sums([float(host.step) if host else 0.0 for host in hosts])
        # Layers of one kind have one table of strategies.
        self._savings = {
            id(unit.strategies): unit.savings(activation_of=_least_kept)
            for unit in {id(u.strategies): u for u in units}.values()
        }

    def of(self, chunks: int, *, hosted: int = 0, offloaded: int = 0) -> float:
        """Seconds that the pipeline takes at least with so many stages per device; with hosts an estimate.

        Args:
            chunks: Stages per device.
            hosted: How many of a device's deepest ones its host steps.
            offloaded: How many of its shallowest ones have their activations on the host.

        Raises:
            InfeasibleError: The forwards before the first backward do not fit, however much is recomputed.
        """
        problem, p = self._problem, self._problem.devices
        ends = list(accumulate(balanced_counts(self._units, p * chunks), initial=0))
        stages = list(pairwise(ends))
        forward, backward = (
            [totals[s % len(totals)][b] - totals[s % len(totals)][a] for s, (a, b) in enumerate(stages)]
            for totals in (self._forward, self._backward)
        )
        hops = [0.0] * len(stages)
        if p > 1:
            hops[:-1] = map(float, self._units.communication_between(Placement.looped(p, chunks))[:-1])
        through, back = (_sums([*map(add, seconds, hops)]) for seconds in (forward, backward))
        alive = first_forwards(p, problem.micro_batches, chunks, slices=problem.slices)
        most = 0.0
        for d, limit in enumerate(problem.limits):
            indices = range(d, p * chunks, p)
            own_stages = [stages[s] for s in indices]
            on_device = [min(n, IN_TRANSIT) if chunk < offloaded else n for chunk, n in enumerate(alive[d])]
            buffers = float(self._units.buffers(indices, p * chunks))
            capacity = limit + sum(self._on_host[b] - self._on_host[a] for a, b in own_stages[chunks - hosted :])
            recompute_time = self._least_recomputation(own_stages, on_device, capacity, device=d, buffers=buffers)
            own = problem.micro_batches * (sum(forward[s] + backward[s] for s in indices) + recompute_time)
            filled = sum(count * forward[s] for count, s in zip(alive[d], indices, strict=True))
            arrival = through[-1] - through[d] + hops[indices[-1]] + back[-1] - back[indices[-1] + 1]
            inside = max(own, arrival + own - filled)
            outside = through[d] + back[d] if problem.objective == "makespan" else 0.0
            most = max(most, outside + inside)
            if hosted:
                waves = min(p, problem.micro_batches)
                left = list(accumulate((waves * backward[s] for s in indices), initial=0.0))[chunks - hosted : chunks]
                most = max(most, through[d] + inside + self._host_delay(own_stages[chunks - hosted :], left))
        return most * (1 - ROUNDING)

    def uneven(self) -> float:
        """Seconds that 1F1B may take on stages of any lengths, if all devices' memory is one; an estimate.

        Raises InfeasibleError if that does not suffice, however much is recomputed.
        """
        problem, p = self._problem, self._problem.devices
        stages = list(pairwise(accumulate(balanced_counts(self._units, p), initial=0)))
        alive = [min(p - d, problem.micro_batches) for d in range(p)]
        recompute_time = self._least_recomputation(stages, alive, sum(problem.limits), device=0)
        work = min(forward[-1] + backward[-1] for forward, backward in zip(self._forward, self._backward, strict=True))
        return (problem.micro_batches + p - 1) * (work + recompute_time) / p

    def _host_delay(self, stages: Sequence[tuple[int, int]], left: Sequence[float]) -> float:
        """Seconds from a device's last backward to the end of the steps of these stages on its host.

        `left` is the time of the backwards that the device still has after the last one of each: those of shallower
        stages, for as many micro-batches as there are devices.
        """
        end = -math.inf
        for (a, b), backwards in zip(reversed(stages), reversed(left), strict=True):
            end = max(end, self._down[b] - self._down[a] - backwards) + self._host_step[b] - self._host_step[a]
        return end

    def _least_recomputation(
        self,
        stages: Sequence[tuple[int, int]],
        alive: Sequence[int],
        limit: float,
        *,
        device: int,
        buffers: float = 0.0,
    ) -> float:
        """Seconds of recomputation per micro-batch that a device needs at least to hold so many of each stage.

        Raises InfeasibleError if no recomputation is enough.
        """
        units = self._units
        workspace = max(max(self._workspace[a:b]) for a, b in stages)
        gathered = sorted(self._gathered[b] - self._gathered[a] for a, b in stages)[-2:] if units.gathers else ()
        states = float(units.static) + workspace + sum(self._static[b] - self._static[a] for a, b in stages)
        states += sum(gathered) + buffers
        kept = sum(count * (self._kept[b] - self._kept[a]) for count, (a, b) in zip(alive, stages, strict=True))
        missing = (states + kept) * (1 - ROUNDING) - limit
        if missing <= 0:
            return 0.0
        numbers: Counter[tuple[int, int]] = Counter()
        for count, (a, b) in zip(alive, stages, strict=True):
            for kind, number in Counter(self._kinds[a:b]).items():
                numbers[kind, count] += number
        # The first backward begins with the last unit, of which it has one micro-batch's whole activation.
        last, count = self._kinds[stages[-1][1] - 1], alive[-1]
        numbers[last, count] -= 1
        numbers[last, count - 1] += 1
        savings = [
            (max(0.0, seconds) / (saved * count), number * max(0.0, seconds), number * count * saved)
            for (kind, count), number in numbers.items()
            if count and number
            for _, seconds, saved in self._savings[kind]
        ]
        spent = 0.0
        for price, seconds, saved in sorted(savings):
            if saved >= missing:
                return spent + price * missing
            spent, missing = spent + seconds, missing - saved
        raise InfeasibleError(
            f"Device {device} needs {readable(limit + missing)} even if everything recomputes; its limit is"
            f" {readable(limit)}; raise it, or divide the model among more devices.",
            missing=missing,
        )


@lru_cache(maxsize=4096)
def first_forwards(devices: int, micro_batches: int, chunks: int, *, slices: int = 1) -> tuple[tuple[int, ...], ...]:
    """The micro-batches that each device has on each of its stages, in order, when its first backward starts.

    With one chunk these are 1F1B's, else those of interleaved 1F1B, or of both on slices of sequences.
    """
    if chunks == 1:
        return tuple((min(micro_batches, devices - d + slices - 1),) for d in range(devices))
    sizes = [size * slices for size in group_sizes(micro_batches // slices, -(-devices // slices))]
    order = turns(sizes, range(chunks))
    counts = []
    for d in range(devices):
        ahead = Counter(chunk for chunk, _ in order[: 2 * (devices - d - 1) + (chunks - 1) * max(sizes) + slices])
        counts.append(tuple(ahead[chunk] for chunk in range(chunks)))
    return tuple(counts)


def _least_kept(strategy: Strategy) -> Number:
    """Bytes that a unit keeps, at best where the half before it recomputes with it."""
    return strategy.activation if strategy.after_full is None else min(strategy.activation, strategy.after_full)


def _sums(values: Sequence[float]) -> list[float]:
    """Sums of the first values: of none, of one, ..., of all."""
    return list(accumulate(values, initial=0.0))
