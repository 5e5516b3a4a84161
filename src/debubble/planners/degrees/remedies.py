"""Changes that help where nothing fits: each was tried, and fits."""

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
"""Seconds of the reference machine for the quick plans of one change, once one of them fits."""
MULTIPLES = (2, 3, 4, 5, 6, 8, 12, 16)
"""Factors by which more devices are tried."""
QUANTIZED, LEAST_TOKENS = "nf4-dq", 512
"""The format of frozen weights that is tried next to LoRA, and the fewest tokens of a sequence."""
OPTIONS_OF_CLUSTER = {"devices", "devices_per_node", "memory_limit"}
"""Entries of a cluster that the command line says."""
LORA_RANK = 16
"""The rank of the adapters that are tried in place of training the whole model."""
SECONDS = 15.0
"""Seconds on the clock after which no further change is tried, where the job has no deadline."""
MOST = 5
"""Changes that are told."""
FRAMEWORKS = ("torchtitan", "megatron", "deepspeed")
"""The frameworks that are tried where the job names none: they gather less at a time than debubble's runtime."""
WITH_HOST = ("chronos", "pipeoffload")
"""Planners with optimizers or activations on the host that are asked where no quick plan fits."""
ASKED = 2
"""Choices of degrees that they are asked per change, those that promise most; next to them the one that needs least."""


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change with which the job fits, and what a plan of it takes: a quick one, or one that uses the host.

    Attributes:
        change: The options of `plan` that are others.
        degrees: All degrees.
        step_time: Seconds of a step.
        on_host: What is on the host, in words; None: nothing.
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

    These are a framework, other degrees, a CPU optimizer, LoRA, gradients and then all states in bf16, more devices,
    and moments in 8 bits.  LoRA is also tried with quantized weights and shorter sequences.  It and smaller states keep
    the job's fixed degrees, LoRA as long as something fits with them.  Where no quick plan of other degrees, of states
    in bf16 or of more devices fits, plans with optimizers or activations on the host are tried.  Plans that no
    framework runs are passed over.  No change is begun after the job's deadline, or that of `clock`, by which
    planners end that are asked.
    """
    return [_with_batch(remedy, job) for remedy in islice(_remedies(job, clock or _clock(job)), MOST)]


def _with_batch(remedy: Remedy, job: Job) -> Remedy:
    """The remedy with the micro-batches of each replica that keep the step's sequences, if those were given."""
    given, needed = job.fixed.get("micro_batches"), remedy.degrees.micro_batches
    if given is None or given == needed:
        return remedy
    return replace(remedy, change=f"{remedy.change} --micro-batches {needed}")


def _clock(job: Job) -> Deadline:
    """The time for changes."""
    return Deadline(SECONDS if job.deadline is None else job.deadline)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A job of which no choice of degrees fits, a sentence that says why, and changes that were tried, and fit.

    As text it is a line for what was asked, for the reason, for the model's states, and for each change.

    Attributes:
        job: The job.
        reason: Why nothing fits.
        remedies: What fits.
        planner: The planner that was asked, other than `auto`, which the changes do without.
        cut_off: Whether time ended before every change was tried.
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
        tried = f"What fits{self.elsewhere} (tried); add one of these{instead}:" if changes else self.without_remedy
        return "\n".join((f"Nothing fits {devices} with {asked} per step.", self.reason, self.states, tried, *changes))

    @property
    def elsewhere(self) -> str:
        """What is to be left out of the call for any change, in words."""
        return "" if self.planner is None else f" without --planner {self.planner}"

    @property
    def without_remedy(self) -> str:
        """What is said where nothing is known to help."""
        if self.cut_off and self.job.deadline is not None:
            return "The deadline passed before a change was found that fits."
        return "No change was found that fits."

    @property
    def states(self) -> str:
        """A sentence on the model's undivided states, and on the room on all devices unless the reason says it."""
        on_devices = replace(self.job, options=replace(self.job.options, host_optimizer=0.0))
        states, hosted = map(readable_bytes, _states(on_devices))
        words = f"One copy of the model's states is {states} ({hosted} with the optimizer on the host)"
        limit = f"a plan may use {readable_bytes(float(sum(self.job.cluster.memory_limits)))} on all"
        if limit in self.reason:
            return f"{words}."
        return f"{words}, and {limit} {self.job.cluster.count} devices together, activations included."


def misfit(job: Job, reason: str, *, planner: str | None = None) -> Misfit:
    """Try changes of a job that does not fit, for a reason that planners gave, or this one if it alone was asked."""
    clock = _clock(job)
    found = tuple(remedies(job, clock))
    return Misfit(job=job, reason=reason, remedies=found, planner=planner, cut_off=clock.exceeded)


def _states(job: Job) -> tuple[float, float]:
    """Bytes of one copy of the model's states on devices: all of them, and with the optimizer on the host."""
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
    told = [(name, values[name]) for name in names if values[name] != getattr(Degrees(), name)]
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in told) or "--pipeline 1"


def _states_in_bf16(options: RunOptions) -> Iterator[tuple[str, RunOptions]]:
    """The options that keep gradients, and then all states, in bf16, and a run with them."""
    if options.dtype != "bf16" or options.master_dtype != "fp32" or options.lora:
        return
    if options.gradient_dtype == "fp32":
        yield "--gradient-dtype bf16", replace(options, gradient_dtype="bf16")
    yield "--master-dtype bf16", replace(options, master_dtype="bf16")


def _remedies(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """Every change that fits."""
    yield from _frameworks(job, clock)
    if job.fixed:
        own = {name: degree for name, degree in job.fixed.items() if name != "zero"}
        divided, free = list(_quick_remedy("", replace(job, fixed=own))), replace(job, fixed={})
        others = list(_quick_remedy("", free)) or list(_host_remedy("", free, clock))
        yield from {remedy.change: remedy for remedy in (*divided, *others)}.values()
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
    """These degrees as a framework runs them, the fastest of those that fit."""
    if job.target is not None or not job.fixed or clock.passed:
        return
    found: list[Remedy] = []
    for name in FRAMEWORKS:
        with suppress(InputError):
            found += _quick_remedy(f"--for {name}", job.for_target(name))
    yield from sorted(found, key=lambda remedy: remedy.step_time)[:1]


def _cpu_optimizer(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """Optimizer states on hosts, in the first framework where that fits."""
    if clock.passed:
        return
    for change, there in with_cpu_optimizers(job):
        with suppress(InputError):  # not every framework has them
            if found := list(_quick_remedy(change, there)) or list(_quick_remedy(change, replace(there, fixed={}))):
                yield from found
                return


def _adapters(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """LoRA, else LoRA of quantized weights, else that of shorter sequences: the first that fits."""
    rank, length = job.options.lora or LORA_RANK, job.options.sequence_length
    lengths = [length // part for part in (1, 2, 4, 8) if length // part >= LEAST_TOKENS]
    for tokens, quantize in dict.fromkeys([(length, job.options.quantize), *((each, QUANTIZED) for each in lengths)]):
        adapted = replace(job.options, lora=rank, quantize=quantize, sequence_length=tokens)
        if adapted == job.options or clock.passed:
            continue
        changes = {"--lora": rank, "--quantize": quantize, "--sequence-length": tokens}
        now = (job.options.lora, job.options.quantize, length)
        words = [f"{name} {then}" for (name, then), before in zip(changes.items(), now, strict=True) if then != before]
        with suppress(InputError):  # not every model's weights can be quantized
            change, small = " ".join(words), replace(job, options=adapted)
            if found := list(_quick_remedy(change, small)) or list(_quick_remedy(change, replace(small, fixed={}))):
                yield from found
                return


def _more_devices(job: Job, clock: Deadline) -> Iterator[Remedy]:
    """The fewest times as many devices that fit; before them fewer that do with the host's memory."""
    with_host: list[Remedy] = []
    for multiple in MULTIPLES:
        larger = job.cluster.with_count(multiple * job.cluster.count)
        if larger is None or clock.passed:
            return
        entries = larger.to_dict()
        of_file = entries.keys() - OPTIONS_OF_CLUSTER
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
    """The remedy that a change is, with the best degrees for it, if a quick plan of it fits."""
    best = _best(job) if _has_capacity(job) else None
    if best is not None:
        target = "" if best.target is None else f"--for {best.target}"
        words = _words(" ".join(filter(None, [change, target])), best.degrees)
        yield Remedy(change=words, degrees=best.degrees, step_time=best.step)


def _host_remedy(change: str, job: Job, clock: Deadline) -> Iterator[Remedy]:
    """The remedy that a change is if the host holds what the devices cannot."""
    if clock.passed or not _has_capacity(job, with_host=True):
        return
    try:
        problems = {degrees: job.problem(degrees) for degrees in shortlist(job, on_hosts=True).choices}
    except DebubbleError:
        return
    possible = [d for d, problem in problems.items() if too_large(problem) is None and job.runs_as_planned(d)]
    if not possible:
        return
    hopeful = sorted(possible, key=lambda degrees: estimated_step(problems[degrees]))[:ASKED]
    leanest = min(possible, key=lambda degrees: _least_memory(degrees, problems[degrees]))
    found: list[tuple[float, Degrees, str]] = []
    for degrees in dict.fromkeys([*hopeful, leanest]):
        for name in WITH_HOST:
            if clock.passed:
                break
            try:
                answer = planners[name](replace(problems[degrees], effort=TRIAL_EFFORT, deadline=clock.remaining))
            except DebubbleError:
                continue
            answer.solution.raise_if_interrupted()
            on_host = "optimizers" if answer.solution.schedule.host_steps else "activations"
            found.append((float(answer.time), degrees, on_host))
    if found:
        step, degrees, on_host = min(found, key=lambda plan: plan[0])
        yield Remedy(change=_words(change, degrees), degrees=degrees, step_time=step, on_host=on_host)


def _has_capacity(job: Job, *, with_host: bool = False) -> bool:
    """Tell whether the states may fit on all devices together, before every choice of degrees is looked at."""
    try:
        states, hosted = _states(job)
    except DebubbleError:  # the change is none that the model can be run with
        return False
    return (hosted if with_host else states) <= sum(job.cluster.memory_limits)


def _least_memory(degrees: Degrees, problem: Problem) -> float:
    """Bytes on the fullest device that recomputes everything and leaves optimizers to the host."""
    parts = footprint(degrees, problem).recomputed
    return parts.total - parts.optimizer


def _words(change: str, degrees: Degrees) -> str:
    return " ".join(filter(None, [change, option_words(degrees)]))


@dataclass(frozen=True, kw_only=True)
class _QuickPlan:
    """Degrees, seconds of a step, and the framework to plan for, where debubble's runtime cannot run them."""

    degrees: Degrees
    step: float
    target: str | None


def _best(job: Job) -> _QuickPlan | None:
    """The fastest quick plan of the shortlist, with its best size of micro-batches; None if none fits and runs."""
    try:
        listed = shortlist(job)
    except DebubbleError:
        return None
    effort = Effort(TRIAL_EFFORT)
    found = _fastest(job, listed.choices, effort)
    if found is None:
        return None
    return _fastest(job, listed.sizes_of(found.degrees), effort) or found


def _fastest(job: Job, choices: Sequence[Degrees], effort: Effort) -> _QuickPlan | None:
    """The fastest quick plan of these choices that a framework runs; None if none fits."""
    problems = {degrees: job.problem(degrees) for degrees in choices}
    plans: dict[Degrees, _QuickPlan] = {}

    def step(degrees: Degrees) -> float:
        plans[degrees] = _runnable_plan(job, degrees, effort)
        return plans[degrees].step

    ranking: Ranking[Degrees] = Ranking()
    rank(
        [degrees for degrees, problem in problems.items() if too_large(problem) is None],
        bounds=[lambda degrees: step_bound(problems[degrees]), lambda degrees: quick_bound(problems[degrees])],
        step=step, count=1, ranking=ranking, over=lambda: effort.over,
    )  # fmt: skip
    return next((plans[degrees] for degrees in ranking.best(1)), None)


def _runnable_plan(job: Job, degrees: Degrees, effort: Effort) -> _QuickPlan:
    """The quick plan, else the fastest one for a framework; raises DebubbleError if none fits and runs.

    The bare torch, with which the user writes the rest of the script, comes last.
    """
    if job.runs_as_planned(degrees):
        return _QuickPlan(degrees=degrees, step=_quick_step(job, degrees, effort), target=None)
    found: list[tuple[bool, float, str]] = []
    for name, target in targets.items():
        with suppress(DebubbleError):
            target.check(job.run_options(degrees), job.model, pipeline=degrees.pipeline)
            if target.runs_on(job.cluster.slowest.name):
                found.append((not target.framework, _quick_step(job.for_target(name), degrees, effort), name))
    if not found:
        raise UnsupportedError("No framework runs it.")
    _, step, name = min(found)
    return _QuickPlan(degrees=degrees, step=step, target=name)


def _quick_step(job: Job, degrees: Degrees, effort: Effort) -> float:
    """Seconds of the quick plan's step; raises DebubbleError if it does not fit."""
    return quick_step(job.problem(degrees), spend=effort.spend)[0]
