"""What ChronosPipe ALL can choose, and the schedule and costs that each choice makes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from debubble.costs.units import Partition, Units
from debubble.ir import Number, Placement, StageCosts
from debubble.planners.partition import balanced_counts, even_counts
from debubble.planners.problem import Problem, Solution
from debubble.schedules.chronos import periodic, reduce_gradients
from debubble.schedules.chronos_offload import offload_activations, offload_states

STEPS_PER_CHUNK = 4
"""rho is a multiple of a quarter."""
CHEAP = "cmb"
"""The operators that may recompute in the chunks that do not recompute in full."""
GROUPS = (1, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """ChronosPipe without the amount of recomputation, which follows from the limit."""

    chunks: int
    counts: tuple[int, ...] | None
    """Units per stage; None for fixed stages."""
    group: int = 1
    """Micro-batches whose gradients are reduced together."""
    rest: str = "none"
    """What units that do not recompute in full recompute."""
    offloaded: int = 0
    """Chunks after those that recompute whose activations go to the host."""
    hosted: int = 0
    """Deepest chunks whose optimizer states and step are the host's."""

    @property
    def means(self) -> int:
        """How many means to save memory it takes."""
        return (self.rest != "none") + self.offloaded + self.hosted

    def saves_no_more_than(self, other: Setting) -> bool:
        """Whether `other` is this one with more means to save memory."""
        same = (self.chunks, self.counts, self.group) == (other.chunks, other.counts, other.group)
        return (
            same
            and self.rest in ("none", other.rest)
            and self.offloaded <= other.offloaded
            and self.hosted <= other.hosted
        )


def settings(problem: Problem) -> list[Setting]:
    """Every setting worth trying, those with fewer means to save memory first."""
    return sorted(_settings(problem), key=lambda setting: setting.means)


def _settings(problem: Problem) -> Iterator[Setting]:
    units, costs = problem.units, problem.costs
    limited = problem.memory_limit is not None
    entries = units.stage_entries.get("gradient_reduce", 0) if units else costs.gradient_reduce if costs else 0
    groups = GROUPS if _positive(entries) else (1,)
    transfers = units.offload_bandwidth is not None if units else costs is not None and costs.offload is not None
    cheap = units is not None and any(CHEAP in unit.strategies for unit in units.units)
    for chunks in problem.chunk_choices:
        for counts in _partitions(units, problem.devices * chunks):
            for group in (g for g in groups if g <= problem.micro_batches):
                for hosted in range(chunks if limited and units and units.hostable else 1):
                    for rest in ("none", CHEAP) if limited and cheap else ("none",):
                        for offloaded in (0, 1) if limited and transfers else (0,):
                            yield Setting(
                                chunks=chunks, counts=counts, group=group, rest=rest, offloaded=offloaded, hosted=hosted
                            )  # fmt: skip


def build(problem: Problem, setting: Setting, *, steps: int, micro_batches: int) -> Solution:
    """The schedule and costs of a setting in which `steps` quarters of chunks recompute, shallow ones first."""
    shares = {c: min(Fraction(steps, STEPS_PER_CHUNK) - c, Fraction(1)) for c in range(-(-steps // STEPS_PER_CHUNK))}
    partition: Partition | None = None
    recompute: dict[int, Number] = dict(shares)
    if problem.units is None:
        assert problem.costs is not None
        costs = problem.costs
    else:
        partition, costs, recompute = _with_units(problem.units, problem.devices, setting, shares)
    made = periodic(
        "chronos",
        devices=problem.devices,
        micro_batches=micro_batches,
        chunks=setting.chunks,
        costs=costs,
        recompute=recompute,
        group=setting.group,
    )
    if any(costs.gradient_reduce):
        made = reduce_gradients(made, group=setting.group)
    if setting.offloaded:
        after = range(len(shares), min(len(shares) + setting.offloaded, setting.chunks))
        made = offload_activations(made, chunks=after, costs=costs)
    if setting.hosted:
        made = offload_states(made, chunks=range(setting.chunks - setting.hosted, setting.chunks))
    return Solution(schedule=made, costs=costs, partition=partition)


def _with_units(
    units: Units, devices: int, setting: Setting, shares: dict[int, Fraction]
) -> tuple[Partition, StageCosts, dict[int, Number]]:
    """The partition, its costs, and the chunks that recompute anything: their R recomputes just the chosen units."""
    assert setting.counts is not None
    partition: list[list[tuple[int, str]]] = []
    first = 0
    for stage, count in enumerate(setting.counts):
        full = math.ceil(shares.get(stage // devices, Fraction(0)) * count)
        chosen = [(i, "full" if i - first < full else setting.rest) for i in range(first, first + count)]
        partition.append([(i, name if name in units.units[i].strategies else "none") for i, name in chosen])
        first += count
    stages = devices * setting.chunks
    costs = units.stage_costs(
        partition, Placement.looped(devices, setting.chunks), on_host=range(stages - setting.hosted * devices, stages)
    )
    recomputing = {s // devices for s, stage in enumerate(partition) if any(name != "none" for _, name in stage)}
    return partition, costs, dict.fromkeys(recomputing, 1)


def _partitions(units: Units | None, stages: int) -> Sequence[tuple[int, ...] | None]:
    if units is None:
        return (None,)
    return list(dict.fromkeys((tuple(even_counts(units, stages)), tuple(balanced_counts(units, stages)))))


def _positive(value: Number | Sequence[Number]) -> bool:
    return any(value) if isinstance(value, Sequence) else value > 0
