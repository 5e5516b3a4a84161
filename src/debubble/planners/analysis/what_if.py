"""Gains of a plan's levers, and changes that would help: every change is planned, none is guessed.

A change is planned by the quick plan, AdaPipe, the portfolio and the planner that made the plan, with a third of the
effort each, in parallel.  A plan stays feasible with more memory or faster links, so a search that finds nothing
better there answers with the plan itself, priced again; with twice the micro-batches, with the plan twice.

Where nobody asks for that, quick plans say in a moment what would help: a quick plan of every change next to one of the
plan's own problem.  Quick plans leave all on the device: of a plan that does not, they do not say what memory is worth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from debubble.costs import Cluster
from debubble.costs.frameworks import framework_name, framework_of_options
from debubble.costs.partition import partition_named
from debubble.ir import DebubbleError, InputError, WhatIf
from debubble.models import Model
from debubble.planners.analysis.explanation import MUCH
from debubble.planners.analysis.likely_fit import safe_limit
from debubble.planners.bounds.proven import proven_step_bound
from debubble.planners.degrees.choice_plans import ALSO_LARGE, LARGE, thorough
from debubble.planners.degrees.estimate import quick_step
from debubble.planners.degrees.space import slice_choices
from debubble.planners.model_problem import problem_of
from debubble.planners.plan_step import seconds_per_step
from debubble.planners.problem import ModelUnits, Problem, Solution
from debubble.planners.process_pool import Task, by_completion, side_by_side
from debubble.planners.progress import Progress
from debubble.planners.registry import planners, verify
from debubble.plans import Plan

AGAIN = "the same job again"
"""The plan's own problem, planned again as the changes are."""
REPRESENTATIVE = 1.2
"""Times the plan's step up to which the quick plan of its own problem stands for it."""
EFFORT_SHARE = 1 / 3
"""The part of the plan's effort with which every change is planned."""
MORE_MEMORY = 1.1
FASTER_LINKS = 2
"""Factors of the memory limit, and of the bandwidth of all links, in two of the changes."""


def what_ifs(
    plan: Plan,
    step_time: float,
    *,
    effort: float,
    deadline: float | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> tuple[WhatIf, ...]:
    """Plan every change of a model's plan, whose step takes so many seconds.

    `effort` is what planning it was given, in seconds of the reference machine.  The deadline, by default the effort's,
    is one on the clock for every change.  `progress` is told of every change that is planned.  Raises InputError for a
    plan of abstract costs, or with a profile.
    """
    described = plan.model_on_cluster
    if described is None or plan.profile is not None:
        raise InputError("What would help is planned for a MODEL on a --cluster, without a profile.")
    found = _changes(plan, *described, effort=EFFORT_SHARE * effort, deadline=deadline)
    changes = {change.words: change for change in found}
    tasks: dict[str, Task] = {words: (change.find, change.problem) for words, change in changes.items()}
    planned = {}
    with side_by_side(tasks) as answers:
        for words in by_completion(answers):
            change = changes[words]
            try:
                solution, seconds = answers[words].result()
                time = float(verify(words, change.problem, solution, seconds).time)
            except DebubbleError:
                time = float("inf")
            if change.repeats:
                time = min(time, change.repeats * step_time, _priced_again(plan, change.problem))
            planned[words] = change.with_step(time)
            done, total = len(planned), len(changes)
            progress(Progress(stage=words, done=done, total=total, counted="changes", best=None, step_time=None))
    return tuple(planned[words] for words in changes)


def _priced_again(plan: Plan, problem: Problem) -> float:
    """Seconds of a step of the plan itself in a changed problem with as many micro-batches; infinite if it is none."""
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


def quick_what_ifs(plan: Plan) -> tuple[WhatIf, ...]:
    """Changes that would help, by quick plans of the changes and of the plan's own problem alike, which comes first.

    None where there is no quick plan: for abstract costs, with a profile, for large pipelines, or where none fits or
    comes near the plan.
    """
    large = plan.devices * plan.micro_batches >= LARGE
    described = plan.model_on_cluster
    if described is None or plan.profile is not None or large:
        return ()
    found: list[WhatIf] = []
    planned = seconds_per_step(plan) / plan.degrees.global_batch
    for change in _changes(plan, *described, effort=0.0, deadline=None):
        if not change.lever and not (change.of_memory and _uses_hosts(plan)):
            try:
                seconds = quick_step(change.problem)[0]
            except DebubbleError:
                seconds = float("inf")
            if found:
                # No plan gains more than the bound of the changed problem leaves below the plan itself.
                bound = float(proven_step_bound(change.problem).time) / change.batch
                seconds = max(seconds, (found[0].seconds_per_sequence or 0.0) * bound / planned * change.batch)
            found.append(replace(change.with_step(seconds), quick=True))
            # Quick plans that are far from the plan itself say nothing about its changes, unless they are faster.
            if (found[0].seconds_per_sequence or float("inf")) > REPRESENTATIVE * planned:
                return _quick_options(plan)
    return tuple(found)


def _quick_options(plan: Plan) -> tuple[WhatIf, ...]:
    """The other options of the same run of which a quick plan is faster than the plan itself."""
    assert plan.model_on_cluster is not None
    found = []
    for change in _changes(plan, *plan.model_on_cluster, effort=0.0, deadline=None):
        if change.option:
            with suppress(DebubbleError):
                seconds = quick_step(change.problem)[0]
                if seconds < seconds_per_step(plan):
                    found.append(replace(change.with_step(seconds), quick=True))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The gain of a change, in words.

    `share` is how much longer a sequence takes than in the unchanged problem, as a share; None: nothing fits.
    `effect` says it, after the step's time where a plan was searched.
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
        """True if a sequence takes much less time."""
        return self.share is not None and self.share < -MUCH


NOTICED = 0.0005
"""Share of a sequence's time below which a change is none."""


def gains(plan: Plan, step_time: float, changes: tuple[WhatIf, ...]) -> list[Gain]:
    """Say what each change brings.

    They are compared with the unchanged problem, planned again in the same way, so that a better planner is not taken
    for a better setting.
    """
    again = (c.seconds_per_sequence for c in changes if c.change == AGAIN)
    planned = step_time / plan.degrees.global_batch
    now = next(again, None) or planned

    def gain(change: WhatIf) -> Gain:
        if change.step_time is None or change.seconds_per_sequence is None:
            return Gain(what_if=change, share=None, effect="no quick plan fits" if change.quick else "nothing fits")
        # A faster plan of the unchanged problem says that another planner helps.
        share = change.seconds_per_sequence / (planned if change.change == AGAIN and not change.quick else now) - 1
        direction = "slower" if share > 0 else "faster"
        much = f"{100 * abs(share):.1f}% {direction} per sequence"
        if change.more_devices:
            much = _pace(share)
        how = much if abs(share) >= NOTICED else "nothing faster was found"
        step = "" if change.quick else f"{change.step_time:.4g} s, "
        return Gain(what_if=change, share=share, effect=f"{step}{how}")

    return list(map(gain, changes))


def what_if_lines(plan: Plan, step_time: float) -> list[str]:
    """Say in lines for people what each lever brings, and what would help; nothing where no change was planned."""
    titles = {True: "Without a lever", False: "What would help"}
    told = gains(plan, step_time, plan.what_ifs)
    if told and told[0].what_if.quick:
        return [quick_words(told)]
    groups = ((title, [gain.words for gain in told if gain.what_if.lever is lever]) for lever, title in titles.items())
    return [f"{title} (planned): {'; '.join(words)}." for title, words in groups if words]


MOST = 3
"""Changes that quick plans tell."""


def helpful(told: Sequence[Gain]) -> list[Gain]:
    """The changes that help, the best first, and more devices last; those that take a lever away are none."""
    helpful = (gain for gain in told if gain.helps and not gain.what_if.lever)
    return sorted(helpful, key=lambda gain: (gain.what_if.more_devices, gain.share or 0.0))


def _pace(share: float) -> str:
    """The pace of more devices, where a sequence takes longer by a share of its time."""
    return f"{1 / (1 + share):.2f} times the tokens/s"


def quick_words(told: Sequence[Gain]) -> str:
    """Say in a sentence which of the changes help most by quick plans."""

    def words(gain: Gain) -> str:
        share = gain.share or 0.0
        much = _pace(share) if gain.what_if.more_devices else f"{-100 * share:.1f}% faster"
        return f"{gain.what_if.change}: {much}"

    best = "; ".join(map(words, helpful(told)[:MOST]))
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
    """How often the plan itself, step after step, is an answer to the changed problem; 0: it is none."""
    of_memory: bool = False
    """True if it changes how much memory there is."""
    option: bool = False
    """True if it is an option of the same run on the same devices."""
    more_devices: bool = False

    def with_step(self, seconds: float) -> WhatIf:
        """The change with a step of so many seconds; infinite: nothing fits."""
        fits = seconds < float("inf")
        return WhatIf(
            change=self.words,
            lever=self.lever,
            more_devices=self.more_devices,
            step_time=seconds if fits else None,
            seconds_per_sequence=seconds / self.batch if fits else None,
        )


def _changes(plan: Plan, model: Model, cluster: Cluster, *, effort: float, deadline: float | None) -> Iterator[_Change]:
    def problem(cluster: Cluster, micro_batches: int, **options: Any) -> Problem:
        return problem_of(
            model, cluster, replace(plan.options, **options), micro_batches=micro_batches,
            pipeline=plan.devices, effort=effort, deadline=deadline, target=plan.target,
        )  # fmt: skip

    batch, m = plan.degrees.global_batch, plan.micro_batches
    same, find = problem(cluster, m), partial(thorough, names=_planners(plan))
    yield _Change(words=AGAIN, problem=same, find=find, batch=batch, repeats=1)
    units = same.units
    if any(unit.strategy != "none" for stage in plan.partition for unit in stage):
        kept = units.map_units(lambda unit: replace(unit, strategies={"none": unit.strategies["none"]}))
        whole = replace(same, workload=ModelUnits(kept))
        yield _Change(words="no recomputation", problem=whole, find=find, batch=batch, lever=True)
    if _uses_hosts(plan):
        bare = replace(same, workload=ModelUnits(replace(units, offload_bandwidth=None, module_bandwidth=None)))
        yield _Change(words="no offload", problem=bare, find=find, batch=batch, lever=True)
    if plan.schedule.name != "1f1b" and plan.schedule.slices == 1:
        plain = partial(thorough, names=("adapipe",))
        yield _Change(words="plain 1F1B", problem=replace(same, chunks=1), find=plain, batch=batch, lever=True)
    if units.memory_limit is not None:
        limits = tuple(float(limit) * MORE_MEMORY for limit in units.memory_limit)
        roomy = replace(same, workload=ModelUnits(replace(units, memory_limit=limits)))
        yield _Change(
            words="10% more memory", problem=roomy, find=find, batch=batch, repeats=1, of_memory=True
        )  # fmt: skip
    if (limit := safe_limit(plan, plan.simulate().peak_memory)) is not None:
        safe = problem(cluster.with_limit(limit), m)
        yield _Change(words=f"--memory-limit {limit}", problem=safe, find=find, batch=batch, of_memory=True)
    if plan.degrees.devices > 1:
        names = ("link_bandwidth", "network_bandwidth")
        links = {name: FASTER_LINKS * getattr(cluster.slowest, name) for name in names}
        faster = problem(Cluster.from_dict({**cluster.to_dict(), **links}), plan.micro_batches)
        yield _Change(words="links twice as fast", problem=faster, find=find, batch=batch, repeats=1)
    if plan.devices > 1 and (other_way := cluster.in_reverse()) is not None:
        turned = problem(other_way, m)
        words = f"devices the other way round ({other_way.file['devices']})"
        yield _Change(words=words, problem=turned, find=find, batch=batch, option=True)
    choices = slice_choices(plan.degrees, length=plan.options.sequence_length, target=plan.target)
    if plan.options.slices == 1 and len(choices) > 1:
        with suppress(InputError):  # not every model's sequences can be cut
            cut = problem(cluster, m, slices=choices[-1])
            yield _Change(words=f"--slices {cut.slices}", problem=cut, find=find, batch=batch, option=True)
    if plan.options.data * plan.options.context > 1:
        for zero in (level for level in DIVIDING if level > plan.options.zero):
            with suppress(InputError):  # not every framework has it
                divided = problem(cluster, m, zero=zero)
                yield _Change(words=f"--zero {zero}", problem=divided, find=find, batch=batch, option=True)
    o = plan.options
    if (o.dtype, o.master_dtype, o.lora) == ("bf16", "fp32", 0):
        with suppress(InputError):  # not every framework steps them
            small = problem(cluster, m, master_dtype="bf16")
            yield _Change(words="--master-dtype bf16", problem=small, find=find, batch=batch, option=True)
            if o.micro_batch_size > 1 and _uses_hosts(plan):
                # Large micro-batches hide what hosts take; without hosts their activations may not fit.
                words, count = "--master-dtype bf16 --micro-batch-size 1", m * o.micro_batch_size
                small = problem(cluster, count, master_dtype="bf16", micro_batch_size=1)
                yield _Change(words=words, problem=small, find=find, batch=batch, option=True)
    overlapping = _overlapping(plan)
    if overlapping is not None:
        faster = problem(cluster, m, framework=overlapping)
        yield _Change(words=f"--framework {overlapping}", problem=faster, find=find, batch=batch, option=True)
    node = cluster.slowest.devices_per_node
    for count in dict.fromkeys((cluster.count + min(node, cluster.count), 2 * cluster.count)):
        larger = cluster.with_count(count)
        if larger is None or count % (plan.degrees.devices // plan.options.data):
            continue
        data = plan.options.data * count // cluster.count
        try:
            more, grown = problem(larger, m, data=data), batch * data // plan.options.data
        except InputError:  # as many replicas are not divided by the ranks of experts
            continue
        added = "one more node" if cluster.count >= node and count == cluster.count + node else "twice the devices"
        words = f"{added} ({count} devices, a batch of {grown})"
        yield _Change(words=words, problem=more, find=find, batch=grown, more_devices=True)
        break
    words = f"twice the micro-batches (a batch of {2 * batch})"
    yield _Change(words=words, problem=problem(cluster, 2 * m), find=find, batch=2 * batch, repeats=2)
    if m % 2 == 0:
        words = f"half the micro-batches (a batch of {batch // 2})"
        yield _Change(words=words, problem=problem(cluster, m // 2), find=find, batch=batch // 2)


def _overlapping(plan: Plan) -> str | None:
    """Megatron-LM as the plan has it, with its collectives next to computing; None: it has them there, or no such."""
    o = plan.options
    if plan.target not in OVERLAPPING or not framework_name(o.framework):
        return None
    traits = framework_of_options(o.framework)
    possible = {"tensor_overlap": o.tensor > 1, "gradient_overlap": o.data * o.context > 1}
    off = [name for name, has in possible.items() if has and not getattr(traits, name)]
    return ",".join([o.framework, *(f"{name}=true" for name in off)]) if off else None


OVERLAPPING = ("megatron", "primus")
"""Targets that overlap collectives where they are told to."""
DIVIDING = (1, 3)
"""ZeRO levels that are tried: what divides optimizer states, and what divides everything."""


def _uses_hosts(plan: Plan) -> bool:
    """Tell whether hosts step optimizers or hold activations."""
    return bool(plan.schedule.host_steps or plan.schedule.offloaded)


def _planners(plan: Plan) -> tuple[str, ...]:
    """The planners of a change: the quick ones, and the one that made the plan, if it is not too slow for it."""
    timed = [c for c in plan.candidates if c.step_time is not None]
    maker = min(timed, key=lambda c: c.step_time or 0.0).planner if timed else plan.planner
    quick = ("adapipe", "portfolio")
    small = plan.devices * plan.micro_batches < LARGE
    known = maker in planners and maker not in (*quick, "auto")
    return (*quick, maker) if known and (small or maker in ALSO_LARGE) else quick
