"""Plans per class of steps, for sequences of different lengths.

The steps of a run are divided into a few classes by their tokens.  The plan of a class assumes, for every k, the
largest k-th longest micro-batch of its steps, so that no step exceeds the memory limit.  All plans have the partition
of the run's plan; they differ in order, recomputation and offload.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import le
from pathlib import Path

import msgspec

from debubble.costs.lengths import MicroBatchSize
from debubble.costs.partition import partition_named
from debubble.errors import InfeasibleError
from debubble.files import user_cache
from debubble.ir import InputError
from debubble.planners.micro_batch_order import with_lengths
from debubble.planners.model_problem import problem_of
from debubble.plans import Plan
from debubble.runtime.steps.batch import Entries
from debubble.training.data.datasets import READING_PHASE
from debubble.training.data.packed import PackedSequences
from debubble.training.online.scheduler import better_orders

MAX_CLASSES = 4
"""Maximum number of classes of a run."""
EFFORT = 5.0
"""Effort of the search of a class's plan, in seconds of the reference machine."""


@dataclass(frozen=True)
class LengthSteps:
    """The batches of a run on sequences of different lengths, and the plan of each step."""

    plans: Sequence[Plan]
    """One plan per class, the fastest first."""
    sequences: PackedSequences
    phase = READING_PHASE

    def plan_of(self, first: int) -> Plan:
        """The fastest plan whose micro-batches are at least as long as those of the step from sample `first` on."""
        tokens = [size.tokens for size in _sizes(self.plans[0], self.sequences, first // self.sequences.per_step)]
        return next(plan for plan in self.plans if all(map(le, tokens, _descending(plan))))

    def tokens(self, first: int) -> int:
        """The tokens of the step from sample `first` on, over all replicas."""
        return sum(map(sum, self.sequences.lengths(first // self.sequences.per_step)))

    def batch(self, first: int, *, count: int) -> Sequence[Entries]:
        """The micro-batches of the replica whose samples start at `first`, in the order of the step's plan."""
        step, within = divmod(first, self.sequences.per_step)
        ranks = ranks_of(self.plan_of(first - within))
        return self.sequences.batch(step, replica=within // count, ranks=ranks)


def ranks_of(plan: Plan) -> list[int]:
    """Per micro-batch of a plan, its rank by length (0: longest)."""
    assert plan.costs.micro_batch_scale is not None
    scale = plan.costs.micro_batch_scale
    by_length = sorted(range(len(scale)), key=lambda position: -scale[position])
    ranks = [0] * len(scale)
    for rank, position in enumerate(by_length):
        ranks[position] = rank
    return ranks


def _descending(plan: Plan) -> list[float]:
    assert plan.costs.micro_batch_scale is not None
    return sorted(map(float, plan.costs.micro_batch_scale), reverse=True)


def length_plans(plan: Plan, sequences: PackedSequences, *, steps: int, folder: Path | None = None) -> Sequence[Plan]:
    """The plans of the classes of a run's steps, the fastest first.

    Plans are cached in the folder, by default the user's cache.

    Raises InputError if no plan of a class fits the memory limit.
    """
    cache = folder or user_cache("plans")
    plans = [_cached(plan, sizes, cache) for sizes in classes(plan, sequences, steps=steps)]
    return sorted(plans, key=lambda p: float(p.simulate().makespan))


def _sizes(plan: Plan, sequences: PackedSequences, step: int) -> list[MicroBatchSize]:
    """The micro-batch sizes of a step, longest first; the maximum over replicas counts."""
    size, longest = plan.options.micro_batch_size, plan.options.sequence_length
    return [
        MicroBatchSize.from_lengths(lengths, micro_batch_size=size, sequence_length=longest)
        for lengths in sequences.lengths(step)[:: sequences.replicas]
    ]


def classes(plan: Plan, sequences: PackedSequences, *, steps: int) -> list[list[MicroBatchSize]]:
    """The micro-batch sizes of each class, longest first: the maximum over its steps."""
    sizes_of_steps = [_sizes(plan, sequences, step) for step in range(steps)]
    sizes_of_steps.sort(key=lambda sizes: sum(size.tokens for size in sizes))
    number = min(MAX_CLASSES, steps)
    groups = [sizes_of_steps[k * steps // number : (k + 1) * steps // number] for k in range(number)]
    bounds = [
        [MicroBatchSize(max(s.tokens for s in kth), max(s.keys for s in kth)) for kth in zip(*group, strict=True)]
        for group in groups
    ]
    return [bound for index, bound in enumerate(bounds) if bound not in bounds[:index]]


def _cached(plan: Plan, sizes: Sequence[MicroBatchSize], folder: Path) -> Plan:
    problem = replace(
        plan, solve_seconds=0.0, candidates=(), what_ifs=(), other_targets={}, origin=None, degree_search=None
    )
    key = msgspec.json.encode([msgspec.structs.replace(problem.to_file(), model_name=None), sizes, EFFORT])
    file = folder / f"lengths-{hashlib.sha256(key).hexdigest()[:16]}.json"
    if file.exists():
        return Plan.load(file)
    made = _planned(plan, sizes)
    made.save(file)
    return made


def _planned(plan: Plan, sizes: Sequence[MicroBatchSize]) -> Plan:
    """The plan for micro-batches of these sizes, in a better order if one is found."""
    assert plan.model_on_cluster is not None
    schedule = plan.schedule
    problem = problem_of(
        *plan.model_on_cluster, plan.options, micro_batches=plan.micro_batches, pipeline=plan.devices,
        chunks=schedule.placement.chunks, profile=plan.profile,
    )  # fmt: skip
    units = with_lengths(problem, sizes).units
    partition = partition_named(plan.partition, units)
    costs = units.stage_costs(partition, schedule.placement, on_host=schedule.host_steps)
    planned = replace(plan, costs=costs, lower_bound=0, candidates=(), timeline=None)
    try:
        better_plans = [better.plan for better in better_orders(planned, effort=EFFORT)]
        best = better_plans[-1] if better_plans else planned
        best.simulate()
    except InfeasibleError as error:
        raise InputError(
            f"A step of these lengths does not fit the plan's memory limit: {error} Plan with --lengths, or with fewer"
            " sequences in a micro-batch."
        ) from None
    return best
