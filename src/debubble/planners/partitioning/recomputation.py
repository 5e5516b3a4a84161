"""The least recomputation that fits, for a fixed order of operations.

Each device is a separate knapsack problem: save bytes until its peak fits, at the least recompute time.  Increments are
taken greedily by time per byte, weighted by the micro-batches of the stage in flight at the peak; then superfluous ones
are removed.  Peaks come from the schedule's order, not from a formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.errors import InfeasibleError, readable
from debubble.ir import Schedule, StageCosts
from debubble.ir.stage_costs import limits_of
from debubble.simulator import Repricer
from debubble.targets.levers import TargetLevers


@dataclass(frozen=True)
class Increment:
    """A step of one unit, or of a fixed stage, to more recomputation.

    Attributes:
        stage: The stage.
        unit: The unit's index in the model; for a fixed stage, the stage.
        strategy: The unit's strategy after the step.
        time: Additional recompute time per micro-batch.
        saved: Bytes saved at the stage's peak.
    """

    stage: int
    unit: int
    strategy: str
    time: float
    saved: float

    @property
    def price(self) -> float:
        """Time per byte saved."""
        return self.time / self.saved


def in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the maximum number of micro-batches between F and backward in the schedule's order."""
    maxima = [0] * schedule.stages
    for device, stages in enumerate(schedule.placement.stages_of):
        for stage, counts in zip(stages, zip(*schedule.in_flight(device), strict=True), strict=False):
            maxima[stage] = max(counts)
    return maxima


def cheapest_strategies(
    repricer: Repricer, units: Units, lengths: Sequence[int], allowed: Sequence[str] | None = None
) -> Partition:
    """The partition of these lengths with the least recomputation with which every device fits.

    `allowed`: the strategies to choose from in addition to `none` (None: all).  Raises InfeasibleError, naming the
    device, if full recomputation does not fit.
    """
    placement = repricer.schedule.placement
    bounds = list(accumulate(lengths, initial=0))
    counts_in_flight = in_flight(repricer.schedule)
    savings = {_key(units, i): unit.savings(allowed) for i, unit in enumerate(units.units)}
    increments: list[list[Increment]] = []
    for stages in placement.stages_of:
        steps = [
            Increment(s, i, name, time, saved * counts_in_flight[s])
            for s in stages
            for i in range(bounds[s], bounds[s + 1])
            for name, time, saved in savings[_key(units, i)]
        ]
        # A unit's later steps cost more per byte than its earlier ones, so a stable sort keeps their order.
        increments.append(sorted(steps, key=lambda step: step.price))

    def build(taken: Sequence[Sequence[Increment]]) -> Partition:
        strategy = {step.unit: step.strategy for steps in taken for step in steps}
        return Partition([(i, strategy.get(i, "none")) for i in range(a, b)] for a, b in pairwise(bounds))

    def peaks(taken: Sequence[Sequence[Increment]]) -> tuple[float, ...]:
        partition = build(taken)
        costs = units.stage_costs(partition, placement, on_host=repricer.schedule.host_steps)
        return repricer.peak_memory(costs, fused_recompute=partition.recomputing)

    limits = limits_of(units.memory_limit, placement.devices)
    superfluous = _last_of_each_type(units)
    return build(_min_increments(increments, peaks, limits, superfluous=superfluous, independent=repricer.lists_decide))


def cheapest_uniform(repricer: Repricer, units: Units, lengths: Sequence[int], levers: TargetLevers) -> Partition:
    """The fastest partition of these lengths that fits, with the same recomputation of all layers of the framework.

    Raises InfeasibleError if none fits.
    """
    placement = repricer.schedule.placement
    limits = limits_of(units.memory_limit, placement.devices)
    fitting: list[tuple[float, Partition]] = []
    missing = math.inf
    for ways in levers.uniform_partitions(units, lengths):
        for partition in ways:
            costs = units.stage_costs(partition, placement)
            peaks = repricer.peak_memory(costs, fused_recompute=partition.recomputing)
            excess = max(float(peak) - limit for peak, limit in zip(peaks, limits, strict=True))
            if excess <= 0:
                price = repricer.price(costs, fused_recompute=partition.recomputing)
                fitting.append((float(price.makespan), partition))
                break
            missing = min(missing, excess)
    if not fitting:
        raise InfeasibleError(
            f"{readable(missing)} are missing on the fullest device, in whatever way the target recomputes;"
            f"{_kept_outputs(units)} divide the model among more devices.",
            missing=missing,
        )
    return min(fitting, key=lambda pair: pair[0])[1]


def _kept_outputs(units: Units) -> str:
    """Words on the logits that the framework keeps, for an error message; empty if it keeps none."""
    if not units.kept_outputs:
        return ""
    return (
        f" {readable(float(units.kept_outputs))} are logits, which its last stage keeps of all micro-batches of a step:"
        " take fewer of them, or"
    )


def cheapest_stages(repricer: Repricer, costs: StageCosts) -> frozenset[int]:
    """The fixed stages that must recompute so that every device fits.

    Raises InfeasibleError, naming the device, if recomputing all of its stages does not suffice.
    """
    schedule = repricer.schedule
    counts_in_flight = in_flight(schedule)
    increments = [
        sorted(
            (
                Increment(s, s, "full", float(costs.recompute[s]), float(costs.dropped_bytes(s)) * counts_in_flight[s])
                for s in stages
                if costs.dropped_bytes(s) > 0
            ),
            key=lambda step: step.price,
        )
        for stages in schedule.placement.stages_of
    ]

    def stages_of(taken: Sequence[Sequence[Increment]]) -> frozenset[int]:
        return frozenset(step.stage for steps in taken for step in steps)

    def peaks(taken: Sequence[Sequence[Increment]]) -> tuple[float, ...]:
        return repricer.peak_memory(costs, fused_recompute=stages_of(taken))

    limits = limits_of(costs.memory_limit, schedule.devices)
    increments_taken = _min_increments(
        increments, peaks, limits, superfluous=lambda steps: list(range(len(steps))),
        independent=repricer.lists_decide,
    )  # fmt: skip
    return stages_of(increments_taken)


def _min_increments(
    increments: list[list[Increment]],
    peaks: Callable[[Sequence[Sequence[Increment]]], tuple[float, ...]],
    limits: list[float],
    *,
    superfluous: Callable[[list[Increment]], list[int]],
    independent: bool,
) -> list[list[Increment]]:
    """Per device, the cheapest increments with which its peak fits: bisection, then removal of superfluous ones.

    `superfluous` lists the indices of increments to try to remove; `independent` says whether a device's peak depends
    only on the increments of that device.
    """
    devices = range(len(increments))
    if all(peak <= limit for peak, limit in zip(peaks([[] for _ in devices]), limits, strict=True)):
        return [[] for _ in devices]
    low, high = [0] * len(increments), [len(steps) for steps in increments]
    for device, peak in enumerate(peaks(increments)):
        if peak > limits[device]:
            raise InfeasibleError(
                f"Device {device} needs {readable(peak)} even if everything recomputes;"
                f" its limit is {readable(limits[device])}; raise it, or divide the model among more devices.",
                missing=peak - limits[device],
            )
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        middle_peaks = peaks([steps[:n] for steps, n in zip(increments, middle, strict=True)])
        for device in devices:
            if low[device] == high[device]:
                continue
            if middle_peaks[device] <= limits[device]:
                high[device] = middle[device]
            else:
                low[device] = middle[device] + 1
    taken = [steps[:n] for steps, n in zip(increments, high, strict=True)]
    candidates = [superfluous(steps) for steps in taken]
    open_devices = [device for device in devices if candidates[device]]
    while open_devices:
        # If peaks are independent, one evaluation tests a candidate of every device.
        tried = open_devices if independent else open_devices[:1]
        fewer = [*taken]
        for device in tried:
            index = candidates[device].pop(0)
            fewer[device] = taken[device][:index] + taken[device][index + 1 :]
        fewer_peaks = peaks(fewer)
        fitting = {device for device in tried if fewer_peaks[device] <= limits[device]}
        for device in fitting:
            taken[device] = fewer[device]
        open_devices = [device for device in open_devices if device not in fitting and candidates[device]]
    return taken


def _key(units: Units, unit: int) -> tuple[str, float]:
    """The key of a unit's savings: units of the same type and size share them."""
    return units.units[unit].type, float(units.units[unit].activation)


def _last_of_each_type(units: Units) -> Callable[[list[Increment]], list[int]]:
    """Candidates for removal: per type of unit the last step of one unit, most expensive first."""

    def candidates(steps: list[Increment]) -> list[int]:
        last = {step.unit: index for index, step in enumerate(steps)}
        by_type = {(_key(units, unit), steps[index].strategy): index for unit, index in last.items()}
        return sorted(by_type.values(), key=lambda index: -steps[index].time)

    return candidates
