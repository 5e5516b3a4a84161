"""Changes to a job that does not fit, each planned to confirm that it fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

from debubble.costs import model_units
from debubble.errors import readable_bytes
from debubble.ir import DebubbleError, InputError, RunOptions, UnsupportedError
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.estimate import estimated_step, quick_bound, quick_step, step_bound
from debubble.planners.degrees.memory import footprint, too_large
from debubble.planners.degrees.ranking import Ranking, rank
from debubble.planners.degrees.shortlist import shortlist
from debubble.planners.degrees.space import Job
from debubble.planners.degrees.usual import with_cpu_optimizers
from debubble.planners.problem import Problem
from debubble.planners.registry import planners
from debubble.search.effort import Deadline, Effort
from debubble.targets.target import targets

TRIAL_EFFORT = 1.0
"""Effort for the quick plans of one change, in seconds of the reference machine; a first plan that fits is exempt."""
DEVICE_MULTIPLES = (2, 3, 4, 5, 6, 8, 12, 16)
"""Factors by which the number of devices is multiplied."""
QUANTIZED_FORMAT, MIN_SEQUENCE_LENGTH = "nf4-dq", 512
"""Format of frozen weights, and least number of tokens of a sequence, that are tried with LoRA."""
CLUSTER_OPTIONS = {"devices", "devices_per_node", "memory_limit"}
"""Entries of a cluster that the command line can set."""
LORA_RANK = 16
"""Rank of the adapters that replace training of the full model."""
DEFAULT_SECONDS = 15.0
"""Wall-clock seconds after which no further change is tried if the job has no deadline."""
MAX_REMEDIES = 5
"""Number of changes that are reported."""
FRAMEWORKS = ("torchtitan", "megatron", "deepspeed")
"""Frameworks to try if the job names none; they gather less at a time than debubble's runtime."""
OFFLOAD_PLANNERS = ("chronos", "pipeoffload")
"""Planners with CPU optimizer or activation offload, which run if no quick plan fits."""
OFFLOAD_CHOICES = 2
"""Number of choices of degrees per change that they plan, those that seem to fit first, by estimated step; one more is
that of least memory."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change with which the job fits, and the step of a quick plan, or of a plan with host offload, that has it.

    Attributes:
        change: The options of `plan` that change.
        degrees: All degrees.
        step_time: Seconds of a step.
        on_host: What is offloaded to the host, in words; None: nothing.
    """

    change: str
    degrees: Degrees
    step_time: float
    on_host: str | None = None

    def __str__(self) -> str:
        host = "" if self.on_host is None else f" ({self.on_host} on the host)"
        return f"{self.change}{host}: {self.step_time:.4g} s per step"


def remedies(job: Job, clock: Deadline | None = None) -> list[Remedy]:
    """The first changes that fit, cheapest first.

    In order: a framework, other degrees, a CPU optimizer, LoRA, bf16 gradients, all states in bf16, more devices, and
    8-bit moments.  LoRA is also tried with quantized weights and shorter sequences.  LoRA and smaller states keep the
    job's fixed degrees; LoRA drops them if nothing fits with them.  If no quick plan of other degrees, bf16 states or
    more devices fits, plans with CPU optimizer or activation offload are tried.  Plans that no framework runs are
    skipped.  No change is begun, and no planner runs, after the job's deadline or that of `clock`.
    """
    return [_with_batch(remedy, job) for remedy in islice(_remedies(job, clock or _clock(job)), MAX_REMEDIES)]


def _with_batch(remedy: Remedy, job: Job) -> Remedy:
    """The remedy with the number of micro-batches that keeps the global batch, if the job fixes another number."""
    fixed, needed = job.fixed.get("micro_batches"), remedy.degrees.micro_batches
    if fixed is None or fixed == needed:
        return remedy
    return replace(remedy, change=f"{remedy.change} --micro-batches {needed}")


def _clock(job: Job) -> Deadline:
    """The deadline for trying changes."""
    return Deadline(DEFAULT_SECONDS if job.deadline is None else job.deadline)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A job that does not fit with any choice of degrees, the reason, and changes with which it fits.

    As text: a line each for the job, the reason, the model's states, and every change.

    Attributes:
        job: The job.
        reason: Why nothing fits.
        remedies: The changes that fit.
        planner: The planner that was asked, if not `auto`; the changes do not use it.
        cut_off: Whether the deadline passed before every change was tried.
    """

    job: Job
    reason: str
    remedies: tuple[Remedy, ...]
    planner: str | None = None
    cut_off: bool = False

    def __str__(self) -> str:
        job, devices = self.job, self.job.cluster.to_dict()["devices"]
        asked = f"{job.global_batch} sequence{'s' * (job.global_batch != 1)} of {job.options.sequence_length} tokens"
        changes = [f"  {remedy}" for remedy in self.remedies]
        instead = ", its degrees in place of the job's" if job.fixed else ""
        tried = f"What fits{self.elsewhere} (tried, by quick plans); add one of these{instead}:"
        tried = tried if changes else self.without_remedy
        return "\n".join((f"Nothing fits {devices} with {asked} per step.", self.reason, self.states, tried, *changes))

    @property
    def elsewhere(self) -> str:
        """The option to drop from the call for any change, in words."""
        return "" if self.planner is None else f" without --planner {self.planner}"

    @property
    def without_remedy(self) -> str:
        """The sentence if no change is known to help."""
        if self.cut_off and self.job.deadline is not None:
            return "The deadline passed before a change was found that fits."
        return "No change was found that fits."

    @property
    def states(self) -> str:
        """A sentence on the model's undivided states, and on the memory of all devices unless the reason states it."""
        on_devices = replace(self.job, options=replace(self.job.options, host_optimizer=0.0))
        states, hosted = map(readable_bytes, _states(on_devices))
        words = f"One copy of the model's states is {states} ({hosted} with the optimizer on the host)"
        limit = f"a plan may use {readable_bytes(float(sum(self.job.cluster.memory_limits)))} on all"
        if limit in self.reason:
            return f"{words}."
        return f"{words}, and {limit} {self.job.cluster.count} devices together, activations included."


def misfit(job: Job, reason: str, *, planner: str | None = None) -> Misfit:
    """Try changes of a job that does not fit; `planner` is the one that was asked, if not `auto`."""
    clock = _clock(job)
    changes = tuple(remedies(job, clock))
    return Misfit(job=job, reason=reason, remedies=changes, planner=planner, cut_off=clock.exceeded)


def _states(job: Job) -> tuple[float, float]:
    """Device bytes of one copy of the model's states, without and with a CPU optimizer."""
    options = replace(
        job.options, tensor=1, data=job.cluster.count, context=1, expert=1, expert_tensor=None, zero=0,
        micro_batch_size=1, slices=1,
    )  # fmt: skip
    units = model_units(job.model, job.cluster, options, pipeline=1).units
    hosted = sum(float(unit.on_host.static if unit.on_host else unit.static) for unit in units)
    return sum(float(unit.static) for unit in units), hosted


def option_words(degrees: Degrees) -> str:
    """The degrees as options of `plan`."""
    names = ("pipeline", "tensor", "data", "context", "expert", "zero", "micro_batch_size", "slices")
    values = vars(degrees)
    changed = [(name, values[name]) for name in names if values[name] != getattr(Degrees(), name)]
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changed) or "--pipeline 1"


def _states_in_bf16(options: RunOptions) -> Iterator[tuple[str, RunOptions]]:
    """Options of `plan` for bf16 gradients, then for all states in bf16, with the run options that they set."""
    if options.dtype != "bf16" or options.master_dtype != "fp32" or options.lora:
        return
    if options.gradient_dtype == "fp32":
        yield "--gradient-dtype bf16", replace(options, gradient_dtype="bf16")
    yield "--master-dtype bf16", replace(options, master_dtype="bf16")


def _remedies(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """Every change that fits, cheapest first."""
    yield from _frameworks(job, clock)
    if job.fixed:
        fixed = {name: degree for name, degree in job.fixed.items() if name != "zero"}
        divided, unfixed = list(_quick_remedy("", replace(job, fixed=fixed))), replace(job, fixed={})
        other = list(_quick_remedy("", unfixed)) or list(_host_remedy("", unfixed, clock))
        yield from {remedy.change: remedy for remedy in (*divided, *other)}.values()
    yield from _cpu_optimizer(job, clock)
    yield from _adapters(job, clock)
    for change, options in _states_in_bf16(job.options):
        if not clock.passed:
            small = replace(job, options=options)
            yield from list(_quick_remedy(change, small)) or _host_remedy(change, small, clock)
    if not clock.passed:
        yield from _more_devices(replace(job, fixed={}), clock)
    if job.options.optimizer in ("adam", "adamw") and not job.options.lora and not clock.passed:
        smaller = replace(job, options=replace(job.options, optimizer="adamw-8bit"))
        yield from _quick_remedy("--optimizer adamw-8bit", smaller)


def _frameworks(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """The fixed degrees in the framework that is fastest with them, of those in which they fit."""
    if job.target is not None or not job.fixed or clock.passed:
        return
    result: list[Remedy] = []
    for name in FRAMEWORKS:
        with suppress(InputError):
            result += _quick_remedy(f"--for {name}", job.for_target(name))
    yield from sorted(result, key=lambda remedy: remedy.step_time)[:1]


def _cpu_optimizer(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """A CPU optimizer, in the first framework in which that fits."""
    if clock.passed:
        return
    for change, changed in with_cpu_optimizers(job):
        with suppress(InputError):  # a framework without CPU optimizer
            fitting = list(_quick_remedy(change, changed)) or list(_quick_remedy(change, replace(changed, fixed={})))
            yield from fitting
            if fitting:
                return


def _adapters(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """LoRA, else LoRA with quantized weights, else also with shorter sequences: the first that fits."""
    rank, length = job.options.lora or LORA_RANK, job.options.sequence_length
    lengths = [length // divisor for divisor in (1, 2, 4, 8) if length // divisor >= MIN_SEQUENCE_LENGTH]
    quantized = [(shorter, QUANTIZED_FORMAT) for shorter in lengths]
    for tokens, quantize in dict.fromkeys([(length, job.options.quantize), *quantized]):
        adapted = replace(job.options, lora=rank, quantize=quantize, sequence_length=tokens)
        if adapted == job.options or clock.passed:
            continue
        changes = {"--lora": rank, "--quantize": quantize, "--sequence-length": tokens}
        now = (job.options.lora, job.options.quantize, length)
        words = [f"{name} {then}" for (name, then), before in zip(changes.items(), now, strict=True) if then != before]
        with suppress(InputError):  # not every model's weights can be quantized
            change, small = " ".join(words), replace(job, options=adapted)
            fitting = list(_quick_remedy(change, small)) or list(_quick_remedy(change, replace(small, fixed={})))
            yield from fitting
            if fitting:
                return


def _more_devices(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """The smallest multiple of the devices that fits, preceded by a smaller one that fits with host offload."""
    with_host: list[Remedy] = []
    for multiple in DEVICE_MULTIPLES:
        larger = job.cluster.with_count(multiple * job.cluster.count)
        if larger is None or clock.passed:
            return
        entries = larger.to_dict()
        of_file = entries.keys() - CLUSTER_OPTIONS
        change = f"devices: {entries['devices']} in the cluster file" if of_file else f"--cluster {entries['devices']}"
        more = replace(job, cluster=larger)
        quick = list(_quick_remedy(change, more))
        yield from quick
        if quick:
            return
        if not with_host:
            with_host = list(_host_remedy(change, more, clock))
            yield from with_host


def _quick_remedy(change: str, job: Job) -> Iterator[Remedy]:
    """The change with its best degrees, if a quick plan of it fits."""
    best = _best(job) if _has_capacity(job) else None
    if best is not None:
        target = "" if best.target is None else f"--for {best.target}"
        words = _words(" ".join(filter(None, [change, target])), best.degrees)
        yield Remedy(change=words, degrees=best.degrees, step_time=best.step)


def _host_remedy(change: str, job: Job, clock: Deadline) -> Iterator[Remedy]:
    """The change with its best degrees, if a plan with host offload fits."""
    if clock.passed or not _has_capacity(job, with_host=True):
        return
    try:
        problems = {degrees: job.problem(degrees) for degrees in shortlist(job, cpu_optimizer=True).choices}
    except DebubbleError:
        return
    possible = [d for d, problem in problems.items() if too_large(problem) is None and job.runs_as_planned(d)]
    if not possible:
        return
    limit = min(job.cluster.memory_limits)

    def promise(degrees: Degrees) -> tuple[bool, float]:
        return _min_memory(degrees, problems[degrees]) > limit, estimated_step(problems[degrees])

    promising = sorted(possible, key=promise)[:OFFLOAD_CHOICES]
    smallest = min(possible, key=lambda degrees: _min_memory(degrees, problems[degrees]))
    plans: list[tuple[float, Degrees, str]] = []
    for degrees in dict.fromkeys([*promising, smallest]):
        for name in OFFLOAD_PLANNERS:
            if clock.passed:
                break
            try:
                answer = planners[name](replace(problems[degrees], effort=TRIAL_EFFORT, deadline=clock.remaining))
            except DebubbleError:
                continue
            answer.solution.raise_if_interrupted()
            on_host = "optimizers" if answer.solution.schedule.host_steps else "activations"
            plans.append((float(answer.time), degrees, on_host))
    if plans:
        step, degrees, on_host = min(plans, key=lambda plan: plan[0])
        yield Remedy(change=_words(change, degrees), degrees=degrees, step_time=step, on_host=on_host)


def _has_capacity(job: Job, *, with_host: bool = False) -> bool:
    """Whether the states may fit all devices together, checked before any choice of degrees."""
    try:
        states, hosted = _states(job)
    except DebubbleError:  # the model cannot run with the change
        return False
    return (hosted if with_host else states) <= sum(job.cluster.memory_limits)


def _min_memory(degrees: Degrees, problem: Problem) -> float:
    """Bytes on the fullest device with full recomputation and a CPU optimizer."""
    parts = footprint(degrees, problem).recomputed
    return parts.total - parts.optimizer


def _words(change: str, degrees: Degrees) -> str:
    return " ".join(filter(None, [change, option_words(degrees)]))


@dataclass(frozen=True, kw_only=True)
class _QuickPlan:
    """Degrees, seconds of a step, and the framework to plan for if debubble's runtime cannot run them."""

    degrees: Degrees
    step: float
    target: str | None


def _best(job: Job) -> _QuickPlan | None:
    """The fastest quick plan of the shortlist, with its best micro-batch size; None if none fits and runs."""
    try:
        listed = shortlist(job)
    except DebubbleError:
        return None
    effort = Effort(TRIAL_EFFORT)
    plan = _fastest(job, listed.choices, effort)
    if plan is None:
        return None
    return _fastest(job, listed.sizes_of(plan.degrees), effort) or plan


def _fastest(job: Job, choices: Sequence[Degrees], effort: Effort) -> _QuickPlan | None:
    """The fastest quick plan of these choices that some framework runs; None if none fits."""
    problems = {degrees: job.problem(degrees) for degrees in choices}
    plans: dict[Degrees, _QuickPlan] = {}

    def step(degrees: Degrees) -> float:
        plans[degrees] = _runnable_plan(job, degrees, effort)
        return plans[degrees].step

    ranking: Ranking[Degrees] = Ranking()
    rank(
        [degrees for degrees, problem in problems.items() if too_large(problem) is None],
        bounds=[lambda degrees: step_bound(problems[degrees]), lambda degrees: quick_bound(problems[degrees])],
        step=step, count=1, ranking=ranking, effort_spent=lambda: effort.over,
    )  # fmt: skip
    return next((plans[degrees] for degrees in ranking.best(1)), None)


def _runnable_plan(job: Job, degrees: Degrees, effort: Effort) -> _QuickPlan:
    """The quick plan, or else the fastest one for a framework; raises DebubbleError if none fits and runs.

    Plain torch, for which the user has to write a training script, comes last.
    """
    if job.runs_as_planned(degrees):
        return _QuickPlan(degrees=degrees, step=_quick_step(job, degrees, effort), target=None)
    plans: list[tuple[bool, float, str]] = []
    for name, target in targets.items():
        with suppress(DebubbleError):
            target.check(job.run_options(degrees), job.model, pipeline=degrees.pipeline)
            if target.runs_on(job.cluster.slowest.name):
                plans.append((not target.framework, _quick_step(job.for_target(name), degrees, effort), name))
    if not plans:
        raise UnsupportedError("No framework runs it.")
    _, step, name = min(plans)
    return _QuickPlan(degrees=degrees, step=step, target=name)


def _quick_step(job: Job, degrees: Degrees, effort: Effort) -> float:
    """Seconds of the quick plan's step; raises DebubbleError if it does not fit."""
    return quick_step(job.problem(degrees), spend=effort.spend)[0]
