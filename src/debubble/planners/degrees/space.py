"""The space that is searched: every choice of degrees that divides the model, the batch and the devices.

Two choices are left out because another one is never slower and never larger:

* ZeRO-0 over more than one rank: ZeRO-1 scatters gradients and gathers weights, at most the bytes of ZeRO-0's
  all-reduce, and divides states and step (`costs.step`);
* any ZeRO level but 0 where there is nothing to divide over.

What an option fixes is kept.
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
"""Levels that are tried where there are ranks to divide over."""
MOST_SLICES, MIN_SLICE_TOKENS = 64, 4096
"""The most slices of a sequence that are tried, and the fewest tokens of each: shorter ones make products slower."""
FEW = 4
"""Micro-batches or slices for each pipeline device with which the bubble is small."""
MOST_SEQUENCES = 10**9
"""More than any step has; its divisors are found by trying."""


def with_cpu_optimizer(options: RunOptions) -> RunOptions | None:
    """The options with all optimizer states on hosts; None if they are there, or the optimizer is not Adam's."""
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
    """Sequence length, optimizer, dtype, LoRA and post-validation; its degrees are not looked at."""
    fixed: Mapping[str, int | None] = field(default_factory=dict)
    """Degrees by name (those of `Degrees`) that are not searched."""
    effort: float = DEFAULT_EFFORT
    deadline: float | None = None
    cache: bool = False
    seed: int = 0
    target: str | None = None
    """The framework that is to run the plan; None: none in particular."""
    tolerance: float = 0.0
    """Share of the fastest step by which a simpler plan may be slower and is preferred."""
    swap: Swap = "host"
    """Where activations may go."""
    zero_levels: tuple[int, ...] = ZERO_LEVELS
    """Levels that are tried where no target has its own."""

    def __post_init__(self) -> None:
        for name, degree in self.fixed.items():
            if degree is not None and degree < (0 if name == "zero" else 1):
                raise InputError(f"--{name.replace('_', '-')} must be at least 1, not {degree}.")
        if self.global_batch < 1:
            raise InputError(f"A step needs a global batch of at least one sequence, not {self.global_batch}.")
        if self.global_batch > MOST_SEQUENCES:
            raise InputError(f"A step may have up to {MOST_SEQUENCES:,} sequences, not {self.global_batch}.")

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
        """The job with all optimizer states on hosts; None as of its options."""
        options = with_cpu_optimizer(self.options)
        return None if options is None else replace(self, options=options)

    def for_target(self, name: str) -> Job:
        """The job as a framework runs it, at the price of its kernels where the job names none."""
        return replace(self, target=name, options=targets[name].priced(self.options))

    def runs_as_planned(self, degrees: Degrees) -> bool:
        """Tell whether the target, or debubble's runtime, runs every plan; none is known for an unknown family."""
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
    """A few legal choices that need no listing of all: one micro-batch size, tensor ranks within a node, ZeRO-1 or 3.

    For each number of tensor ranks and ZeRO level they come with few pipeline devices first.
    """
    node, count = job.cluster.slowest.devices_per_node, job.cluster.count
    usual = {"context": 1, "micro_batch_size": 1, "expert_tensor": None, "slices": 1}
    ranks = _choices(job, "tensor", [n for n in (1, 2, 4, 8) if n <= node and count % n == 0])
    listed: list[Degrees] = []
    for tensor in ranks:
        with suppress(InputError):
            listed += configurations(replace(job, fixed={**usual, **job.fixed, "tensor": tensor}))
    simple = [degrees for degrees in listed if degrees.zero != 2]
    yield from sorted(simple, key=lambda degrees: (degrees.zero == 3, degrees.tensor, in_order(degrees)))


def smallest_batches(job: Job) -> list[Degrees]:
    """The legal choices with every ZeRO level, each with the smallest micro-batches that are allowed.

    Raises InputError as `configurations` does.
    """
    smallest: dict[Degrees, Degrees] = {}
    for degrees in configurations(job):
        of_all_sizes = of_one_size(degrees)
        if of_all_sizes not in smallest or degrees.micro_batch_size < smallest[of_all_sizes].micro_batch_size:
            smallest[of_all_sizes] = degrees
    undivided = [replace(degrees, zero=0) for degrees in smallest.values() if degrees.zero and "zero" not in job.fixed]
    return sorted({*smallest.values(), *(degrees for degrees in undivided if _is_legal(job, degrees))}, key=in_order)


def _is_legal(job: Job, degrees: Degrees) -> bool:
    """Tell whether the model and the job's target run with a choice."""
    try:
        _check(job, degrees)
    except InputError:
        return False
    return True


def of_one_size(degrees: Degrees) -> Degrees:
    """The choice that stands for all sizes of micro-batches."""
    return replace(degrees, micro_batch_size=1, micro_batches=1)


def in_order(degrees: Degrees) -> list[int]:
    """The key by which choices of degrees are listed: the pipeline first, then as `Degrees` has them."""
    return [each or 0 for each in astuple(degrees)]


def configurations(job: Job) -> list[Degrees]:
    """All legal choices of degrees.

    Raises InputError if there is none; the sentence says what of the fixed degrees is in the way.
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
    count, given = job.cluster.count, {name: degree for name in RANKS if (degree := job.fixed.get(name))}
    if count % math.prod(given.values()):
        words = " ".join(f"--{name} {degree}" for name, degree in given.items())
        raise InputError(f"{words} cannot divide {count} devices: give degrees whose product divides {count}.")
    raise InputError(
        f"No choice of degrees{' with ' * bool(fixed)}{fixed} divides a global batch of {job.global_batch} and uses all"
        f" {job.cluster.count} devices: {'fix fewer of them' if fixed else 'change the batch'}."
    )


RANKS = ("tensor", "context", "data", "pipeline")
"""The degrees whose product is the number of devices."""


def _divisions(job: Job) -> Iterator[Degrees]:
    """Every way to divide devices and batch, whether the model allows it or not."""
    count = job.cluster.count
    for ranks in itertools.product(*(_choices(job, name, divisors(count)) for name in RANKS)):
        degrees = Degrees(**dict(zip(RANKS, ranks, strict=True)))
        if degrees.devices == count and job.global_batch % degrees.data == 0:
            yield from _choices_of_ranks(job, degrees)


def _choices_of_ranks(job: Job, degrees: Degrees) -> Iterator[Degrees]:
    """Expert degrees, ZeRO levels and micro-batches for these ranks."""
    ranks, batch = degrees.data * degrees.context, job.global_batch // degrees.data
    levels = _choices(job, "zero", _zero_levels(job, degrees.pipeline) if ranks > 1 else (0,))
    sizes = _choices(job, "micro_batch_size", divisors(batch))
    for divided, zero, size in itertools.product(_expert_divisions(job, degrees), levels, sizes):
        (number,) = _choices(job, "micro_batches", (batch // size,))
        if number * size == batch:
            whole = replace(
                divided, zero=zero, micro_batch_size=size, micro_batches=number, chunks=job.fixed.get("chunks")
            )
            for slices in _choices(
                job, "slices", slice_choices(whole, length=job.options.sequence_length, target=job.target)
            ):
                yield replace(whole, slices=slices)


def slice_choices(degrees: Degrees, *, length: int, target: str | None) -> tuple[int, ...]:
    """The numbers of slices that sequences of so many tokens may be cut into: whole, or as many as fill the pipeline.

    Where sequences are few and long these are FEW slices for each pipeline device, or as many as there are tokens for.
    """
    possible, needed = _numbers_of_slices(degrees, length=length, target=target), FEW * degrees.pipeline
    filling = next((n for n in possible if n * degrees.micro_batches >= needed), possible[-1])
    return tuple(dict.fromkeys((1, filling)))


def in_most_slices(job: Job, degrees: Degrees) -> Degrees | None:
    """The choice in as many slices as there are tokens for, which take the least memory; None if it cannot be cut."""
    most = _numbers_of_slices(degrees, length=job.options.sequence_length, target=job.target)[-1]
    cut = replace(degrees, slices=most)
    try:
        _check(job, cut)
    except InputError:
        return None
    return cut if most > 1 and "slices" not in job.fixed else None


def _numbers_of_slices(degrees: Degrees, *, length: int, target: str | None) -> list[int]:
    if degrees.pipeline == 1 or degrees.context > 1 or target is not None:
        return [1]
    powers = (2**i for i in range(MOST_SLICES.bit_length()))
    return [n for n in powers if length % n == 0 and n * MIN_SLICE_TOKENS <= length] or [1]


def _zero_levels(job: Job, pipeline: int) -> tuple[int, ...]:
    if job.target is None:
        return job.zero_levels
    levels = targets[job.target].zero_levels(pipeline)
    return tuple(level for level in ZERO_LEVELS if level in levels) or (0,)


def _expert_divisions(job: Job, degrees: Degrees) -> Iterator[Degrees]:
    """Every expert is divided by the tensor-parallel ranks, or whole, and all ranks divide the experts between them."""
    experts, ranks = job.model.experts, degrees.data * degrees.context
    whole = (1,) if experts is not None and degrees.tensor > 1 else ()
    for shards in _choices(job, "expert_tensor", (None, *whole)):
        among = ranks if shards is None else degrees.tensor * ranks // shards
        shared = [e for e in divisors(among) if experts is not None and experts.count % e == 0] or [1]
        for expert in _choices(job, "expert", shared):
            yield replace(degrees, expert=expert, expert_tensor=shards)


T = TypeVar("T")


def _choices(job: Job, name: str, otherwise: Sequence[T]) -> Sequence[T]:
    """The value that an option fixes, which has the type of the others, or these."""
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
    """The numbers that divide it, from 1 to itself."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
