"""A lower bound on a quick plan's pipeline, from its order and memory, without building it.

A quick plan has balanced stages in the order of 1F1B or interleaved 1F1B.  Its device d, with the stages d, p + d, ...,

* starts when the first micro-batch has passed the stages before d, and their backwards follow its last one;
* does the work of its stages, and the recomputation without which the forwards before its first backward, and the
  activations that this backward restores, do not fit;
* starts that backward, of its last stage, when the first micro-batch has passed all stages and returned to it; the time
  until then that its forwards do not fill is idle.

With a CPU optimizer for the deepest chunks and offloaded activations of the shallowest ones, the same is an estimate:
ChronosPipe's orders need less memory than interleaved 1F1B, and CPU steps may end before or after the device's work.
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
"""Number of micro-batches of a chunk with offloaded activations that are on the device at a time."""


class PipelineBounds:
    """Bounds on the quick plans of one model problem, for any number of chunks."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._units = problem.units
        units, tables = self._units.units, self._units.on_devices or (self._units.units,)
        self._forward = [_sums([float(unit.forward) for unit in table]) for table in tables]
        self._backward = [
            _sums([float(unit.backward_input + unit.backward_weight) for unit in table]) for table in tables
        ]
        self._retained = _sums([float(unit.activation) for unit in units])
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
        # Layers of one kind share one table of strategies.
        self._savings = {
            id(unit.strategies): unit.savings(activation_of=_min_retained)
            for unit in {id(u.strategies): u for u in units}.values()
        }

    def bound(self, chunks: int, *, hosted: int = 0, offloaded: int = 0) -> float:
        """Lower bound in seconds on the pipeline; with host offload, an estimate.

        Args:
            chunks: Stages per device.
            hosted: Number of a device's deepest stages with a CPU optimizer.
            offloaded: Number of its shallowest stages with offloaded activations.

        Raises:
            InfeasibleError: The forwards before the first backward do not fit even with full recomputation.
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
        forward_sums, backward_sums = (_sums([*map(add, seconds, hops)]) for seconds in (forward, backward))
        in_flight = first_forwards(p, problem.micro_batches, chunks, slices=problem.slices)
        longest = 0.0
        for d, limit in enumerate(problem.limits):
            indices = range(d, p * chunks, p)
            local_stages = [stages[s] for s in indices]
            on_device = [min(n, IN_TRANSIT) if chunk < offloaded else n for chunk, n in enumerate(in_flight[d])]
            buffers = float(self._units.buffers(indices, p * chunks))
            capacity = limit + sum(self._on_host[b] - self._on_host[a] for a, b in local_stages[chunks - hosted :])
            recompute_time = self._min_recomputation(local_stages, on_device, capacity, device=d, buffers=buffers)
            work = problem.micro_batches * (sum(forward[s] + backward[s] for s in indices) + recompute_time)
            filled = sum(count * forward[s] for count, s in zip(in_flight[d], indices, strict=True))
            arrival = forward_sums[-1] - forward_sums[d] + hops[indices[-1]] + backward_sums[-1]
            arrival -= backward_sums[indices[-1] + 1]
            inside = max(work, arrival + work - filled)
            outside = forward_sums[d] + backward_sums[d] if problem.objective == "makespan" else 0.0
            longest = max(longest, outside + inside)
            if hosted:
                waves = min(p, problem.micro_batches)
                remaining = list(accumulate((waves * backward[s] for s in indices), initial=0.0))
                delay = self._host_delay(local_stages[chunks - hosted :], remaining[chunks - hosted : chunks])
                longest = max(longest, forward_sums[d] + inside + delay)
        return longest * (1 - ROUNDING)

    def uneven_estimate(self) -> float:
        """Estimated seconds of 1F1B on uneven stages, as if all devices shared one memory.

        Raises InfeasibleError if that is too small even with full recomputation.
        """
        problem, p = self._problem, self._problem.devices
        stages = list(pairwise(accumulate(balanced_counts(self._units, p), initial=0)))
        in_flight = [min(p - d, problem.micro_batches) for d in range(p)]
        recompute_time = self._min_recomputation(stages, in_flight, sum(problem.limits), device=0)
        work = min(forward[-1] + backward[-1] for forward, backward in zip(self._forward, self._backward, strict=True))
        return (problem.micro_batches + p - 1) * (work + recompute_time) / p

    def _host_delay(self, stages: Sequence[tuple[int, int]], remaining: Sequence[float]) -> float:
        """Seconds from a device's last backward to the end of the CPU optimizer steps of these stages.

        `remaining` is the time of the backwards that the device has after the last one of each stage: those of its
        shallower stages, for as many micro-batches as there are devices.
        """
        end = -math.inf
        for (a, b), backwards in zip(reversed(stages), reversed(remaining), strict=True):
            end = max(end, self._down[b] - self._down[a] - backwards) + self._host_step[b] - self._host_step[a]
        return end

    def _min_recomputation(
        self,
        stages: Sequence[tuple[int, int]],
        in_flight: Sequence[int],
        limit: float,
        *,
        device: int,
        buffers: float = 0.0,
    ) -> float:
        """Least seconds of recomputation per micro-batch with which these micro-batches in flight per stage fit.

        Raises InfeasibleError if full recomputation is not enough.
        """
        units = self._units
        workspace = max(max(self._workspace[a:b]) for a, b in stages)
        gathered = sorted(self._gathered[b] - self._gathered[a] for a, b in stages)[-2:] if units.gathers else ()
        states = float(units.static) + workspace + sum(self._static[b] - self._static[a] for a, b in stages)
        states += sum(gathered) + buffers
        retained = [self._retained[b] - self._retained[a] for a, b in stages]
        activations = sum(count * size for count, size in zip(in_flight, retained, strict=True))
        missing = (states + activations) * (1 - ROUNDING) - limit
        if missing <= 0:
            return 0.0
        numbers: Counter[tuple[int, int]] = Counter()
        for count, (a, b) in zip(in_flight, stages, strict=True):
            for kind, number in Counter(self._kinds[a:b]).items():
                numbers[kind, count] += number
        # The first backward begins with the last unit, and needs the full activation of one micro-batch of it.
        last, count = self._kinds[stages[-1][1] - 1], in_flight[-1]
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
    """Per device and chunk, the micro-batches in flight when the device's first backward starts.

    The order is 1F1B with one chunk and interleaved 1F1B with several, in both cases also with sliced sequences.
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


def _min_retained(strategy: Strategy) -> Number:
    """Bytes of activations that a unit retains, at best if the half-layer before it recomputes with it."""
    return strategy.activation if strategy.after_full is None else min(strategy.activation, strategy.after_full)


def _sums(values: Sequence[float]) -> list[float]:
    """Prefix sums of the values, beginning with 0."""
    return list(accumulate(values, initial=0.0))
