"""A plan for each class of steps on sequences of different lengths.

The steps of a run are divided into a few classes by their tokens.  The plan of a class counts on the largest k-th
longest micro-batch of its steps for every k, so that no device exceeds its limit in any of them.  All plans have the
units of the run's plan in their stages: what changes between steps is the order, recomputation and offload.
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

CLASSES = 4
"""Most classes of a run."""
EFFORT = 5.0
"""Work of the search of a class's plan, in seconds of the reference machine."""


@dataclass(frozen=True)
class LengthSteps:
    """The batches of a run on sequences of different lengths, and the plan of each step."""

    plans: Sequence[Plan]
    """A plan for each class, the fastest first."""
    sequences: PackedSequences
    phase = READING_PHASE

    def plan_of(self, first: int) -> Plan:
        """The fastest plan that has room for the micro-batches of the step that begins with a sample."""
        tokens = [size.tokens for size in _sizes(self.plans[0], self.sequences, first // self.sequences.per_step)]
        return next(plan for plan in self.plans if all(map(le, tokens, _descending(plan))))

    def tokens(self, first: int) -> int:
        """The tokens of the step that begins with a sample, over all replicas."""
        return sum(map(sum, self.sequences.lengths(first // self.sequences.per_step)))

    def batch(self, first: int, *, count: int) -> Sequence[Entries]:
        """The micro-batches of the replica whose samples of a step begin so, in the order of the step's plan."""
        step, within = divmod(first, self.sequences.per_step)
        ranks = ranks_of(self.plan_of(first - within))
        return self.sequences.batch(step, replica=within // count, ranks=ranks)


def ranks_of(plan: Plan) -> list[int]:
    """Which micro-batch, counted from the longest, stands at each place of a plan."""
    assert plan.costs.micro_batch_scale is not None
    scale = plan.costs.micro_batch_scale
    by_length = sorted(range(len(scale)), key=lambda place: -scale[place])
    ranks = [0] * len(scale)
    for rank, place in enumerate(by_length):
        ranks[place] = rank
    return ranks


def _descending(plan: Plan) -> list[float]:
    assert plan.costs.micro_batch_scale is not None
    return sorted(map(float, plan.costs.micro_batch_scale), reverse=True)


def length_plans(plan: Plan, sequences: PackedSequences, *, steps: int, folder: Path | None = None) -> Sequence[Plan]:
    """The plans of the classes of so many steps, the fastest first.

    Those that were made before are read from the folder, by default this user's cache.

    Raises InputError if no plan of a class fits the memory limit.
    """
    place = folder or user_cache("plans")
    made = [_cached(plan, sizes, place) for sizes in classes(plan, sequences, steps=steps)]
    return sorted(made, key=lambda each: float(each.simulate().makespan))


def _sizes(plan: Plan, sequences: PackedSequences, step: int) -> list[MicroBatchSize]:
    """The sizes of the micro-batches of a step, longest first; of those that replicas have at once the longest."""
    size, longest = plan.options.micro_batch_size, plan.options.sequence_length
    return [
        MicroBatchSize.from_lengths(lengths, micro_batch_size=size, sequence_length=longest)
        for lengths in sequences.lengths(step)[:: sequences.replicas]
    ]


def classes(plan: Plan, sequences: PackedSequences, *, steps: int) -> list[list[MicroBatchSize]]:
    """The sizes of the micro-batches of each class, longest first: the largest of its steps."""
    found = [_sizes(plan, sequences, step) for step in range(steps)]
    found.sort(key=lambda sizes: sum(size.tokens for size in sizes))
    number = min(CLASSES, steps)
    groups = [found[k * steps // number : (k + 1) * steps // number] for k in range(number)]
    bounds = [
        [MicroBatchSize(max(s.tokens for s in each), max(s.keys for s in each)) for each in zip(*group, strict=True)]
        for group in groups
    ]
    return [bound for at, bound in enumerate(bounds) if bound not in bounds[:at]]


def _cached(plan: Plan, sizes: Sequence[MicroBatchSize], folder: Path) -> Plan:
    runs = replace(
        plan, solve_seconds=0.0, candidates=(), what_ifs=(), other_targets={}, origin=None, degree_search=None
    )
    asked = msgspec.json.encode([msgspec.structs.replace(runs.to_file(), model_name=None), sizes, EFFORT])
    file = folder / f"lengths-{hashlib.sha256(asked).hexdigest()[:16]}.json"
    if file.exists():
        return Plan.load(file)
    made = _planned(plan, sizes)
    made.save(file)
    return made


def _planned(plan: Plan, sizes: Sequence[MicroBatchSize]) -> Plan:
    """The plan with micro-batches of these sizes, in a better order if there is one."""
    assert plan.model_on_cluster is not None
    schedule = plan.schedule
    problem = problem_of(
        *plan.model_on_cluster, plan.options, micro_batches=plan.micro_batches, pipeline=plan.devices,
        chunks=schedule.placement.chunks, profile=plan.profile,
    )  # fmt: skip
    units = with_lengths(problem, sizes).units
    partition = partition_named(plan.partition, units)
    costs = units.stage_costs(partition, schedule.placement, on_host=schedule.host_steps)
    own = replace(plan, costs=costs, lower_bound=0, candidates=(), timeline=None)
    try:
        found = [better.plan for better in better_orders(own, effort=EFFORT)]
        best = found[-1] if found else own
        best.simulate()
    except InfeasibleError as error:
        raise InputError(
            f"A step of these lengths does not fit the plan's memory limit: {error} Plan with --lengths, or with fewer"
            " sequences in a micro-batch."
        ) from None
    return best
