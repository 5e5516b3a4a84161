"""What-if changes of a plan: gains of its levers, and changes that would help, all of which are planned.

A change is planned by a quick plan, AdaPipe, the portfolio and the planner that made the plan, each with a third of the
effort, in parallel.  With more memory, smaller states or faster links the plan stays feasible, so its own step with the
changed costs is an upper bound; with twice the micro-batches, twice its step is.

By default, changes are estimated by quick plans, which are compared with a quick plan of the unchanged problem.  Quick
plans do not offload, so changes of memory are skipped for plans that do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from debubble.costs import Cluster
from debubble.costs.frameworks import framework_name, framework_of_options
from debubble.costs.partition import partition_named
from debubble.costs.units import Units
from debubble.ir import DebubbleError, InputError, WhatIf
from debubble.models import Model
from debubble.planners.analysis.explanation import REMARK_SHARE
from debubble.planners.analysis.likely_fit import safe_limit
from debubble.planners.bounds.proven import proven_step_bound
from debubble.planners.degrees.choice_plans import LARGE_JOB_PAIRS, PLANNERS_OF_LARGE_JOBS, thorough
from debubble.planners.degrees.estimate import MAX_QUICK_PAIRS, quick_step
from debubble.planners.degrees.space import slice_choices, with_cpu_optimizer
from debubble.planners.model_problem import problem_of
from debubble.planners.plan_step import seconds_per_step
from debubble.planners.problem import ModelUnits, Problem, Solution, Swap
from debubble.planners.process_pool import Task, ask_concurrently, by_completion
from debubble.planners.progress import Progress
from debubble.planners.registry import planners, verify
from debubble.plans import Plan
from debubble.targets.target import targets

BASELINE = "the same job again"
"""The unchanged problem, planned in the same way as the changes."""
MAX_ESTIMATE_RATIO = 1.2
"""Largest ratio of the baseline's quick plan to the plan's step at which quick plans are used for all changes."""
EFFORT_SHARE = 1 / 3
"""Effort of planning a change, as a fraction of the plan's effort."""
MEMORY_FACTOR = 1.1
BANDWIDTH_FACTOR = 2
"""Factors of the memory limit and of the bandwidth of all links in the changes `more memory` and `links`."""


def what_ifs(
    plan: Plan,
    step_time: float,
    *,
    effort: float,
    deadline: float | None = None,
    swap: Swap = "host",
    progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[WhatIf, ...]:
    """Plan every change of a model's plan, whose step takes `step_time` seconds.

    `effort` is the plan's, in seconds of the reference machine.  `deadline` is in seconds per change, by default the
    effort's.  `swap` says where activations may be offloaded.  `progress` is called after every change.  Raises
    InputError for a plan of abstract costs or with a profile.
    """
    described = plan.model_on_cluster
    if described is None or plan.profile is not None:
        raise InputError("What would help is planned for a MODEL on a --cluster, without a profile.")
    model, cluster = described
    generated = _Changes(
        plan=plan, model=model, cluster=cluster, effort=EFFORT_SHARE * effort, deadline=deadline, swap=swap
    )
    changes = {change.words: change for change in generated}
    tasks: dict[str, Task] = {words: (change.find, change.problem) for words, change in changes.items()}
    searched: dict[str, float] = {}
    with ask_concurrently(tasks) as answers:
        for words in by_completion(answers):
            change = changes[words]
            try:
                solution, seconds = answers[words].result()
                time = float(verify(words, change.problem, solution, seconds).time)
            except DebubbleError:
                time = float("inf")
            if change.repeats:
                time = min(time, change.repeats * step_time, _step_of_plan(plan, change.problem))
            searched[words] = time
            done, total = len(searched), len(changes)
            progress(Progress(stage=words, done=done, total=total, counted="changes", best=None, step_time=None))
    return tuple(change.with_step(searched[words]) for words, change in changes.items())


def _step_of_plan(plan: Plan, problem: Problem) -> float:
    """Step of the plan itself, in seconds, with a changed problem's costs; infinite if it is infeasible there."""
    placement, schedule, units = plan.schedule.placement, plan.schedule, problem.units
    if problem.micro_batches != plan.micro_batches:
        return math.inf
    try:
        partition = partition_named(plan.partition, units)
        costs = units.stage_costs(partition, placement, on_host=schedule.host_steps)
        if schedule.deeper:
            deep = [[replace(unit, strategy=unit.strategies[1]) for unit in stage] for stage in plan.partition]
            costs = units.with_deeper_level(costs, partition_named(deep, units), placement)
        return float(verify("", problem, Solution(schedule=schedule, costs=costs, partition=partition), 0.0).time)
    except DebubbleError:
        return math.inf


def quick_what_ifs(plan: Plan, *, swap: Swap = "host") -> tuple[WhatIf, ...]:
    """Estimate changes by quick plans; the first is the baseline, a quick plan of the unchanged problem.

    Empty without quick plans: for abstract costs, with a profile, and for large pipelines.  If the baseline is far from
    the plan, only options whose quick plan is faster than the plan are returned.
    """
    large = plan.devices * plan.micro_batches > MAX_QUICK_PAIRS
    described = plan.model_on_cluster
    if described is None or plan.profile is not None or large:
        return ()
    estimates: list[WhatIf] = []
    planned = seconds_per_step(plan) / plan.degrees.global_batch
    model, cluster = described
    for change in _Changes(plan=plan, model=model, cluster=cluster, swap=swap):
        if not change.lever and not (change.of_memory and _uses_hosts(plan)):
            try:
                seconds = quick_step(change.problem)[0]
            except DebubbleError:
                seconds = float("inf")
            if estimates:
                # No change gains more than the distance of the plan to the changed problem's lower bound.
                bound = float(proven_step_bound(change.problem).time) / change.batch
                seconds = max(seconds, (estimates[0].seconds_per_sequence or 0.0) * bound / planned * change.batch)
            estimates.append(replace(change.with_step(seconds), quick=True))
            # If the baseline is far from the plan, only quick plans that are faster than the plan are meaningful.
            if (estimates[0].seconds_per_sequence or float("inf")) > MAX_ESTIMATE_RATIO * planned:
                return _quick_options(plan, swap)
    return tuple(estimates)


def _quick_options(plan: Plan, swap: Swap) -> tuple[WhatIf, ...]:
    """Options of the same run whose quick plan is faster than the plan."""
    assert plan.model_on_cluster is not None
    model, cluster = plan.model_on_cluster
    faster = []
    for change in _Changes(plan=plan, model=model, cluster=cluster, swap=swap):
        if change.option:
            with suppress(DebubbleError):
                seconds = quick_step(change.problem)[0]
                if seconds < seconds_per_step(plan):
                    faster.append(replace(change.with_step(seconds), quick=True))
    return tuple(faster)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of a change.

    `share` is the relative change of the time per sequence; None: nothing fits.  `effect` is its description.
    """

    what_if: WhatIf
    share: float | None
    effect: str

    @property
    def words(self) -> str:
        """The change and its effect."""
        return f"{self.what_if.change}: {self.effect}"

    @property
    def helps(self) -> bool:
        """True if a sequence takes noticeably less time."""
        return self.share is not None and self.share < -REMARK_SHARE


MIN_SHOWN_GAIN = 0.0005
"""Smallest relative change of the time per sequence that quick plans show."""
NO_DIFFERENCE = f"no difference beyond the search's own {REMARK_SHARE:.0%}"
"""The effect of a change within the differences of searches with different seeds."""


def gains(plan: Plan, step_time: float, changes: tuple[WhatIf, ...]) -> list[Gain]:
    """The gain of each change, relative to the plan or to the baseline if that is faster.

    The baseline is planned in the same way, so that a better planner is not taken for a better setting.
    """
    replanned = (c.seconds_per_sequence for c in changes if c.change == BASELINE)
    planned = step_time / plan.degrees.global_batch
    now = min(next(replanned, None) or planned, planned)

    def gain(change: WhatIf) -> Gain:
        if change.step_time is None or change.seconds_per_sequence is None:
            return Gain(what_if=change, share=None, effect="no quick plan fits" if change.quick else "nothing fits")
        share = change.seconds_per_sequence / (planned if change.change == BASELINE and not change.quick else now) - 1
        # More effort may find faster plans, so a gain is a lower bound and a loss an upper bound.
        direction = "at most {}% slower" if share > 0 else "at least {}% faster"
        effect = f"{direction.format(f'{100 * abs(share):.1f}')} per sequence"
        if change.more_devices:
            effect = _speedup_words(share)
        is_significant = change.quick or change.more_devices or abs(share) >= REMARK_SHARE
        return Gain(what_if=change, share=share, effect=effect if is_significant else NO_DIFFERENCE)

    return list(map(gain, changes))


def what_if_lines(plan: Plan, step_time: float) -> list[str]:
    """Lines on the levers' gains and on changes that would help; empty without planned changes."""
    titles = {True: "Without a lever", False: "What would help"}
    results = gains(plan, step_time, plan.what_ifs)
    if results and results[0].what_if.quick:
        return [quick_words(results)]
    groups = ((title, effects(g for g in results if g.what_if.lever is lever)) for lever, title in titles.items())
    return [f"{title} (planned with a third of the effort): {'; '.join(words)}." for title, words in groups if words]


def effects(gains: Iterable[Gain]) -> list[str]:
    """The changes with their effects, then in one item those that make no difference."""
    gains = list(gains)
    unchanged = ", ".join(gain.what_if.change for gain in gains if gain.effect == NO_DIFFERENCE)
    different = [gain.words for gain in gains if gain.effect != NO_DIFFERENCE]
    return [*different, *([f"{NO_DIFFERENCE}: {unchanged}"] if unchanged else [])]


MAX_SHOWN = 3
"""Number of changes that are shown for quick plans."""


def helpful(gains: Sequence[Gain]) -> list[Gain]:
    """The changes that help, best first, those with more devices last; without those that remove a lever."""
    helpful = (gain for gain in gains if gain.helps and not gain.what_if.lever)
    return sorted(helpful, key=lambda gain: (gain.what_if.more_devices, gain.share or 0.0))


def possible(changes: Sequence[WhatIf]) -> list[str]:
    """Changes whose quick plan is faster than that of the unchanged job, the best first; a full plan may not be."""
    if not changes or not changes[0].quick or changes[0].change != BASELINE:
        return []
    baseline = changes[0].seconds_per_sequence or math.inf
    seconds = {
        change.change: change.seconds_per_sequence
        for change in changes[1:]
        if change.seconds_per_sequence is not None and not change.lever and not change.more_devices
    }
    faster = (name for name, time in seconds.items() if time < (1 - REMARK_SHARE) * baseline)
    return sorted(faster, key=seconds.__getitem__)


def _speedup_words(share: float) -> str:
    """Words for the throughput ratio, from the relative change of the time per sequence."""
    return f"{1 / (1 + share):.2f} times the tokens/s"


def quick_words(gains: Sequence[Gain]) -> str:
    """A sentence on the changes that help most, by quick plans."""

    def words(gain: Gain) -> str:
        share = gain.share or 0.0
        much = _speedup_words(share) if gain.what_if.more_devices else f"at least {-100 * share:.1f}% faster"
        return f"{gain.what_if.change}: {much}"

    best = "; ".join(map(words, helpful(gains)[:MAX_SHOWN]))
    return f"What would help, per sequence, by quick plans: {best or 'nothing that was tried'}."


@dataclass(frozen=True, kw_only=True)
class _Change:
    words: str
    problem: Problem
    find: Callable[[Problem], Solution]
    batch: int
    """Sequences per step."""
    lever: bool = False
    repeats: int = 0
    """Number of the plan's steps that make a feasible step of the changed problem; 0: none."""
    of_memory: bool = False
    """True if the change is of the memory limit."""
    option: bool = False
    """True if the change is an option of the same run on the same devices."""
    more_devices: bool = False

    def with_step(self, seconds: float) -> WhatIf:
        """The change with the seconds of its step; infinite: nothing fits."""
        fits = seconds < float("inf")
        return WhatIf(
            change=self.words,
            lever=self.lever,
            more_devices=self.more_devices,
            step_time=seconds if fits else None,
            seconds_per_sequence=seconds / self.batch if fits else None,
        )


@dataclass(frozen=True, kw_only=True)
class _Changes:
    """The changes of a plan's job, with their problems."""

    plan: Plan
    model: Model
    cluster: Cluster
    effort: float = 0.0
    deadline: float | None = None
    swap: Swap = "host"

    def __iter__(self) -> Iterator[_Change]:
        yield self._change(BASELINE, self._same, repeats=1)
        yield from self._without_levers()
        yield from self._memory_and_links()
        yield from self._options()
        yield from self._more_devices()
        yield from self._batches()

    def _problem(self, cluster: Cluster | None = None, micro_batches: int | None = None, **options: Any) -> Problem:
        return problem_of(
            self.model, self.cluster if cluster is None else cluster, replace(self.plan.options, **options),
            micro_batches=micro_batches or self.plan.micro_batches, pipeline=self.plan.devices, effort=self.effort,
            deadline=self.deadline, target=self.plan.target,
        ).swapping(self.swap)  # fmt: skip

    def _change(self, words: str, problem: Problem, **entries: Any) -> _Change:
        find, batch = partial(thorough, names=_planners(self.plan)), self.plan.degrees.global_batch
        return _Change(**{"words": words, "problem": problem, "find": find, "batch": batch, **entries})

    @cached_property
    def _same(self) -> Problem:
        """The unchanged problem."""
        return self._problem()

    def _with_units(self, units: Units) -> Problem:
        return replace(self._same, workload=ModelUnits(units))

    def _without_levers(self) -> Iterator[_Change]:
        plan, units = self.plan, self._same.units
        if any(unit.strategy != "none" for stage in plan.partition for unit in stage):
            no_recompute = units.map_units(lambda unit: replace(unit, strategies={"none": unit.strategies["none"]}))
            yield self._change("no recomputation", self._with_units(no_recompute), lever=True)
        if _uses_hosts(plan):
            bare = replace(units, offload_bandwidth=None, module_bandwidth=None)
            yield self._change("no offload", self._with_units(bare), lever=True)
        if plan.schedule.name != "1f1b" and plan.schedule.slices == 1:
            plain = partial(thorough, names=("adapipe",))
            yield self._change("plain 1F1B", replace(self._same, chunks=1), find=plain, lever=True)

    def _memory_and_links(self) -> Iterator[_Change]:
        plan, cluster, units = self.plan, self.cluster, self._same.units
        if units.memory_limit is not None:
            limits = tuple(float(limit) * MEMORY_FACTOR for limit in units.memory_limit)
            roomy = self._with_units(replace(units, memory_limit=limits))
            yield self._change("10% more memory", roomy, repeats=1, of_memory=True)
        if (limit := safe_limit(plan, plan.simulate().peak_memory)) is not None:
            yield self._change(f"--memory-limit {limit}", self._problem(cluster.with_limit(limit)), of_memory=True)
        if plan.degrees.devices > 1:
            names = ("link_bandwidth", "network_bandwidth")
            links = {name: BANDWIDTH_FACTOR * getattr(cluster.slowest, name) for name in names}
            faster = self._problem(Cluster.from_dict({**cluster.to_dict(), **links}))
            yield self._change("links twice as fast", faster, repeats=1)

    def _options(self) -> Iterator[_Change]:
        """Changes of options on the same devices, as far as model and framework support them."""
        plan, o = self.plan, self.plan.options
        if plan.devices > 1 and (other_way := self.cluster.in_reverse()) is not None:
            words = f"devices the other way round ({other_way.file['devices']})"
            yield self._change(words, self._problem(other_way), option=True)
        choices = slice_choices(plan.degrees, length=o.sequence_length, target=plan.target)
        if o.slices == 1 and len(choices) > 1:
            with suppress(InputError):
                cut = self._problem(slices=choices[-1])
                yield self._change(f"--slices {cut.slices}", cut, option=True)
        if o.data * o.context > 1:
            for zero in (level for level in TRIED_ZERO_LEVELS if level > o.zero):
                with suppress(InputError):
                    yield self._change(f"--zero {zero}", self._problem(zero=zero), option=True)
        if (o.dtype, o.master_dtype, o.lora) == ("bf16", "fp32", 0):
            with suppress(InputError):
                yield self._change("--master-dtype bf16", self._problem(master_dtype="bf16"), option=True, repeats=1)
                if o.micro_batch_size > 1 and _uses_hosts(plan):
                    # Large micro-batches hide CPU optimizers; without those their activations may not fit.
                    count = plan.micro_batches * o.micro_batch_size
                    small = self._problem(micro_batches=count, master_dtype="bf16", micro_batch_size=1)
                    yield self._change("--master-dtype bf16 --micro-batch-size 1", small, option=True)
        if plan.target is not None and (hosted := with_cpu_optimizer(o)) is not None:
            with suppress(DebubbleError):
                targets[plan.target].check(hosted, self.model, pipeline=plan.devices)
                yield self._change("--host-optimizer 1", self._problem(host_optimizer=1.0), option=True)
        overlapping = _overlapping_framework(plan)
        if overlapping is not None:
            yield self._change(f"--framework {overlapping}", self._problem(framework=overlapping), option=True)

    def _more_devices(self) -> Iterator[_Change]:
        cluster, data, batch = self.cluster, self.plan.options.data, self.plan.degrees.global_batch
        node = cluster.slowest.devices_per_node
        for count in dict.fromkeys((cluster.count + min(node, cluster.count), 2 * cluster.count)):
            larger = cluster.with_count(count)
            if larger is None or count % (self.plan.degrees.devices // data):
                continue
            replicas = data * count // cluster.count
            try:
                more, grown = self._problem(larger, data=replicas), batch * replicas // data
            except InputError:  # replicas that the expert-parallel degree does not divide
                continue
            added = "one more node" if cluster.count >= node and count == cluster.count + node else "twice the devices"
            words = f"{added} ({count} devices, a batch of {grown})"
            yield self._change(words, more, batch=grown, more_devices=True)
            return

    def _batches(self) -> Iterator[_Change]:
        m, batch = self.plan.micro_batches, self.plan.degrees.global_batch
        words = f"twice the micro-batches (a batch of {2 * batch})"
        yield self._change(words, self._problem(micro_batches=2 * m), batch=2 * batch, repeats=2)
        if m % 2 == 0:
            words = f"half the micro-batches (a batch of {batch // 2})"
            yield self._change(words, self._problem(micro_batches=m // 2), batch=batch // 2)


def _overlapping_framework(plan: Plan) -> str | None:
    """The plan's framework with all its collectives overlapped; None if they are already, or cannot be."""
    o = plan.options
    if plan.target not in OVERLAPPING_TARGETS or not framework_name(o.framework):
        return None
    traits = framework_of_options(o.framework)
    replicas = o.data * o.context
    possible = {
        "tensor_overlap": o.tensor > 1,
        "gradient_overlap": replicas > 1,
        "gather_overlap": replicas > 1 and o.zero > 0,
    }
    off = [name for name, has in possible.items() if has and not getattr(traits, name)]
    return ",".join([o.framework, *(f"{name}=true" for name in off)]) if off else None


OVERLAPPING_TARGETS = ("megatron", "primus")
"""Targets whose overlap of collectives is optional."""
TRIED_ZERO_LEVELS = (1, 3)
"""ZeRO levels that are tried: sharded optimizer states, and sharded parameters."""


def _uses_hosts(plan: Plan) -> bool:
    """Tell whether a plan has CPU optimizers or offloaded activations."""
    return bool(plan.schedule.host_steps or plan.schedule.offloaded)


def _planners(plan: Plan) -> tuple[str, ...]:
    """The planners of a change: fast ones, and the plan's planner unless it is too slow for the job's size."""
    timed = [c for c in plan.candidates if c.step_time is not None]
    maker = min(timed, key=lambda c: c.step_time or 0.0).planner if timed else plan.planner
    quick = ("adapipe", "portfolio")
    small = plan.devices * plan.micro_batches < LARGE_JOB_PAIRS
    known = maker in planners and maker not in (*quick, "auto")
    return (*quick, maker) if known and (small or maker in PLANNERS_OF_LARGE_JOBS) else quick
