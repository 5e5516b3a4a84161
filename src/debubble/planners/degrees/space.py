"""The search space: every choice of degrees that divides the model, the batch and the devices.

Two kinds of choices are omitted because another choice is never slower and never larger:

* ZeRO-0 over more than one rank: ZeRO-1 scatters gradients and gathers weights, at most the bytes of ZeRO-0's
  all-reduce, and divides states and step (`costs.step`);
* any ZeRO level but 0 on a single rank.

Fixed degrees are kept.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from typing import TypeVar, cast

from debubble.costs import Cluster, framework_of_options
from debubble.costs.analytical.option_checks import check, check_has_experts, check_slices
from debubble.costs.devices.parallel_layout import Layout
from debubble.costs.step import parameter_bytes
from debubble.ir import DEFAULT_EFFORT, InputError, RunOptions
from debubble.ir.degrees import Degrees
from debubble.models import Model
from debubble.planners.model_problem import problem_of
from debubble.planners.problem import Problem, Swap
from debubble.schedules.registry import check_size
from debubble.targets.target import targets

ZERO_LEVELS = (1, 2, 3)
"""ZeRO levels to try if there are several ranks to shard over."""
MAX_SLICES, MIN_SLICE_TOKENS = 64, 4096
"""Maximum slices of a sequence, and minimum tokens per slice; shorter slices make GEMMs slower."""
SLICES_PER_DEVICE = 4
"""Micro-batches or slices per pipeline device with which the bubble is small."""
MAX_GLOBAL_BATCH = 10**9
"""Maximum sequences per step, as divisors are found by trial division."""


def with_cpu_optimizer(options: RunOptions) -> RunOptions | None:
    """The options with all optimizer states on hosts; None if some are there already, with LoRA, or without Adam."""
    if options.host_optimizer or options.lora or options.optimizer not in ("adam", "adamw"):
        return None
    return replace(options, host_optimizer=1.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train on given devices: all of a plan's inputs but its degrees."""

    model: Model
    cluster: Cluster
    global_batch: int
    """Sequences per step."""
    options: RunOptions = field(default_factory=RunOptions)
    """Sequence length, optimizer, dtype, LoRA and post-validation; the degrees in it are ignored."""
    fixed: Mapping[str, int | None] = field(default_factory=dict)
    """Degrees by name (those of `Degrees`) that are not searched."""
    effort: float = DEFAULT_EFFORT
    deadline: float | None = None
    cache: bool = False
    seed: int = 0
    target: str | None = None
    """The framework that is to run the plan; None: any."""
    tolerance: float = 0.0
    """Fraction of the fastest step by which a simpler plan may be slower."""
    swap: Swap = "host"
    """Where activations may go."""
    zero_levels: tuple[int, ...] = ZERO_LEVELS
    """ZeRO levels to try if no target restricts them."""

    def __post_init__(self) -> None:
        for name, degree in self.fixed.items():
            if degree is not None and degree < (0 if name == "zero" else 1):
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {degree}.")
        if self.global_batch < 1:
            raise InputError(f"A step needs a global batch of at least one sequence, not {self.global_batch}.")
        if self.global_batch > MAX_GLOBAL_BATCH:
            raise InputError(f"A step may have up to {MAX_GLOBAL_BATCH:,} sequences, not {self.global_batch}.")

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.global_batch * self.options.sequence_length

    def run_options(self, degrees: Degrees) -> RunOptions:
        """The run's options with these degrees."""
        return replace(
            self.options, tensor=degrees.tensor, data=degrees.data, context=degrees.context, expert=degrees.expert,
            expert_tensor=degrees.expert_tensor, zero=degrees.zero, micro_batch_size=degrees.micro_batch_size,
            slices=degrees.slices,
        )  # fmt: skip

    def with_cpu_optimizer(self) -> Job | None:
        """The job with all optimizer states on hosts; None under the conditions of `with_cpu_optimizer`."""
        options = with_cpu_optimizer(self.options)
        return None if options is None else replace(self, options=options)

    def for_target(self, name: str) -> Job:
        """The job for a framework, with the costs of its kernels if the job specifies none."""
        return replace(self, target=name, options=targets[name].priced(self.options))

    def runs_as_planned(self, degrees: Degrees) -> bool:
        """Whether the target, or debubble's runtime, runs every plan; assumed for models of an unknown family."""
        if not self.model.known:
            return True
        target = targets[self.target or "debubble"]
        return target.refusal(self.run_options(degrees), self.model, pipeline=degrees.pipeline) is None

    def problem(self, degrees: Degrees) -> Problem:
        """The problem that planners solve for these degrees.  Raises InputError if they do not fit the job."""
        return problem_of(
            self.model, self.cluster, self.run_options(degrees), micro_batches=degrees.micro_batches,
            pipeline=degrees.pipeline, chunks=degrees.chunks, effort=self.effort, deadline=self.deadline,
            cache=self.cache, seed=self.seed, target=self.target,
        ).swapping(self.swap)  # fmt: skip


def ordinary_choices(job: Job) -> Iterator[Degrees]:
    """Common legal choices, without listing all: micro-batch size 1, tensor parallelism within a node, ZeRO-1 or 3.

    They are sorted by ZeRO level, tensor degree and pipeline degree.
    """
    node, count = job.cluster.slowest.devices_per_node, job.cluster.count
    usual = {"context": 1, "micro_batch_size": 1, "expert_tensor": None, "slices": 1}
    ranks = _choices(job, "tensor", [n for n in (1, 2, 4, 8) if n <= node and count % n == 0])
    listed: list[Degrees] = []
    for tensor in ranks:
        with suppress(InputError):
            listed += configurations(replace(job, fixed={**usual, **job.fixed, "tensor": tensor}))
    simple = [degrees for degrees in listed if degrees.zero != 2]
    yield from sorted(simple, key=lambda degrees: (degrees.zero == 3, degrees.tensor, degrees_key(degrees)))


def smallest_batches(job: Job) -> list[Degrees]:
    """The legal choices with every ZeRO level, each with the smallest micro-batches that are allowed.

    Raises InputError as `configurations` does.
    """
    smallest: dict[Degrees, Degrees] = {}
    for degrees in configurations(job):
        key = without_batch_size(degrees)
        if key not in smallest or degrees.micro_batch_size < smallest[key].micro_batch_size:
            smallest[key] = degrees
    undivided = [replace(degrees, zero=0) for degrees in smallest.values() if degrees.zero and "zero" not in job.fixed]
    return sorted({*smallest.values(), *(degrees for degrees in undivided if _is_legal(job, degrees))}, key=degrees_key)


def _is_legal(job: Job, degrees: Degrees) -> bool:
    """Whether the model and the job's target run with a choice."""
    try:
        _check(job, degrees)
    except InputError:
        return False
    return True


def without_batch_size(degrees: Degrees) -> Degrees:
    """The choice that represents all its micro-batch sizes."""
    return replace(degrees, micro_batch_size=1, micro_batches=1)


def degrees_key(degrees: Degrees) -> list[int]:
    """The sort key of choices of degrees: the fields of `Degrees` in order."""
    return [value or 0 for value in astuple(degrees)]


def configurations(job: Job) -> list[Degrees]:
    """All legal choices of degrees.

    Raises InputError if there is none; its message names the fixed degrees that prevent one.
    """
    refusals: list[InputError] = []
    legal = []
    for degrees in _divisions(job):
        try:
            _check(job, degrees)
        except InputError as refusal:
            refusals.append(refusal)
        else:
            legal.append(degrees)
    if legal:
        return legal
    if refusals:
        raise refusals[0]
    fixed = " ".join(f"--{name.replace('_', '-')} {degree}" for name, degree in job.fixed.items())
    count, fixed_ranks = job.cluster.count, {name: degree for name in RANKS if (degree := job.fixed.get(name))}
    if count % math.prod(fixed_ranks.values()):
        words = " ".join(f"--{name} {degree}" for name, degree in fixed_ranks.items())
        raise InputError(f"{words} cannot divide {count} devices: give degrees whose product divides {count}.")
    raise InputError(
        f"No choice of degrees{' with ' * bool(fixed)}{fixed} divides a global batch of {job.global_batch} and uses all"
        f" {job.cluster.count} devices: {'fix fewer of them' if fixed else 'change the batch'}."
    )


RANKS = ("tensor", "context", "data", "pipeline")
"""The degrees whose product is the number of devices."""


def _divisions(job: Job) -> Iterator[Degrees]:
    """Every division of devices and batch, whether or not the model allows it."""
    count = job.cluster.count
    for ranks in itertools.product(*(_choices(job, name, divisors(count)) for name in RANKS)):
        degrees = Degrees(**dict(zip(RANKS, ranks, strict=True)))
        if degrees.devices == count and job.global_batch % degrees.data == 0:
            yield from _choices_of_ranks(job, degrees)


def _choices_of_ranks(job: Job, degrees: Degrees) -> Iterator[Degrees]:
    """All expert degrees, ZeRO levels, micro-batch sizes and slices for these ranks."""
    ranks, batch = degrees.data * degrees.context, job.global_batch // degrees.data
    levels = _choices(job, "zero", _zero_levels(job, degrees.pipeline) if ranks > 1 else (0,))
    sizes = _choices(job, "micro_batch_size", divisors(batch))
    for divided, zero, size in itertools.product(_expert_divisions(job, degrees), levels, sizes):
        (number,) = _choices(job, "micro_batches", (batch // size,))
        if number * size == batch:
            unsliced = replace(
                divided, zero=zero, micro_batch_size=size, micro_batches=number, chunks=job.fixed.get("chunks")
            )
            for slices in _choices(
                job, "slices", slice_choices(unsliced, length=job.options.sequence_length, target=job.target)
            ):
                yield replace(unsliced, slices=slices)


def slice_choices(degrees: Degrees, *, length: int, target: str | None) -> tuple[int, ...]:
    """Numbers of slices to try for sequences of this length: 1, and the number that fills the pipeline.

    The latter makes `SLICES_PER_DEVICE` slices per pipeline device; if `MIN_SLICE_TOKENS` rules that out, it is the
    largest possible number.
    """
    possible = _numbers_of_slices(degrees, length=length, target=target)
    needed = SLICES_PER_DEVICE * degrees.pipeline
    filling = next((n for n in possible if n * degrees.micro_batches >= needed), possible[-1])
    return tuple(dict.fromkeys((1, filling)))


def in_most_slices(job: Job, degrees: Degrees) -> Degrees | None:
    """The choice with as many slices as possible, which take the least memory; None if it cannot be sliced."""
    slices = _numbers_of_slices(degrees, length=job.options.sequence_length, target=job.target)[-1]
    sliced = replace(degrees, slices=slices)
    try:
        _check(job, sliced)
    except InputError:
        return None
    return sliced if slices > 1 and "slices" not in job.fixed else None


def _numbers_of_slices(degrees: Degrees, *, length: int, target: str | None) -> list[int]:
    if degrees.pipeline == 1 or degrees.context > 1 or target is not None:
        return [1]
    powers = (2**i for i in range(MAX_SLICES.bit_length()))
    return [n for n in powers if length % n == 0 and n * MIN_SLICE_TOKENS <= length] or [1]


def _zero_levels(job: Job, pipeline: int) -> tuple[int, ...]:
    if job.target is None:
        return job.zero_levels
    levels = targets[job.target].zero_levels(pipeline)
    return tuple(level for level in ZERO_LEVELS if level in levels) or (0,)


def _expert_divisions(job: Job, degrees: Degrees) -> Iterator[Degrees]:
    """Expert and expert-tensor degrees: experts sharded by the tensor-parallel ranks, or not sharded (1)."""
    experts, ranks = job.model.experts, degrees.data * degrees.context
    unsharded = (1,) if experts is not None and degrees.tensor > 1 else ()
    for shards in _choices(job, "expert_tensor", (None, *unsharded)):
        expert_ranks = ranks if shards is None else degrees.tensor * ranks // shards
        expert_degrees = [e for e in divisors(expert_ranks) if experts is not None and experts.count % e == 0] or [1]
        for expert in _choices(job, "expert", expert_degrees):
            yield replace(degrees, expert=expert, expert_tensor=shards)


T = TypeVar("T")


def _choices(job: Job, name: str, otherwise: Sequence[T]) -> Sequence[T]:
    """The fixed value of a degree, or else these values."""
    return (cast("T", job.fixed[name]),) if name in job.fixed else otherwise


def _check(job: Job, degrees: Degrees) -> None:
    options = job.run_options(degrees)
    check_has_experts(job.model, options)
    Layout.from_options(job.cluster, options, degrees.pipeline)
    check(job.model, options)
    if degrees.slices > 1:
        check_slices(job.model, options)
    if job.target is not None:
        targets[job.target].check(options, job.model, pipeline=degrees.pipeline)
    parameter_bytes(options, shards=1, framework=framework_of_options(options.framework))
    joined = job.target is not None and targets[job.target].levers is not None and not job.model.whole_layers
    units = len(job.model.units) - (job.model.layers if joined else 0)
    stages = degrees.pipeline * (degrees.chunks or 1)
    if stages > units:
        raise InputError(f"{units} model units cannot fill {stages} stages; use fewer pipeline devices or chunks.")
    check_size(stages, degrees.micro_batches)


def divisors(number: int) -> list[int]:
    """The divisors of a number, from 1 to itself."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
