"""Tables of a plan as rows of words, for the terminal and the report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from debubble.costs import Cluster
from debubble.formatting import listed, mfu_words, percent, size_words, time_words
from debubble.ir import CandidateSummary, PlannedUnit, RunOptions
from debubble.ir.degrees import (
    CPU_OPTIMIZER,
    OFFLOAD,
    QUICK_PLAN,
    RECOMPUTATION,
    UNEVEN_STAGES,
    ConfigurationSummary,
    DegreeSearch,
    UsualChoice,
)
from debubble.planners.analysis.explanation import Explanation
from debubble.planners.analysis.nearest_plans import NearestPlan
from debubble.planners.answers import ONE_STAGE_TOLERANCE, PLAIN_TOLERANCE
from debubble.plans import Plan


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A table of words.

    Attributes:
        title: The table's title.
        columns: The columns' names.
        rows: The rows, each with a text per column.
        texts: The columns with words; the others have numbers.
        no_wrap: The columns that are not wrapped.
        caption: The text below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    texts: frozenset[str] = frozenset()
    no_wrap: frozenset[str] = frozenset()
    caption: str = ""


def planner_rows(plan: Plan, *, seconds: bool) -> Rows:
    """The table of planners' answers: the plan's first, the others by step."""
    disturbed = () if plan.robustness is None else ("disturbed", "worst 5%")

    def pipeline(candidate: CandidateSummary) -> float:
        return (candidate.span if plan.options.post_validation else candidate.makespan) or 0

    return Rows(
        title="Planners",
        columns=("planner", "schedule", "step", *disturbed, "pipeline", "gap", "peak memory"),
        rows=[
            (
                c.planner,
                c.schedule or "",
                time_words(_step(c), seconds=seconds),
                *_robustness_entries(plan, c, seconds=seconds),
                time_words(pipeline(c), seconds=seconds),
                "" if c.gap is None else f"{100 * c.gap:.1f}%",
                size_words(max(c.peak_memory)) if c.peak_memory else "",
            )
            for c in _answers(plan)
        ],
        texts=frozenset({"planner", "schedule"}),
        no_wrap=frozenset({"planner"}),
        caption="  ".join(filter(None, [chosen_words(plan), _runs_in_words(plan)])),
    )


def chosen_words(plan: Plan) -> str | None:
    """A sentence on why the plan's planner was preferred to others that are about as fast; None: there are none."""
    answers = _answers(plan)
    if len(answers) < 2:
        return None
    first = answers[0]
    equal = [c.planner for c in answers[1:] if abs(_score(c) / _score(first) - 1) < STEP_TOLERANCE]
    fastest, ratio = fastest_other(plan)
    if ratio < 1 - STEP_TOLERANCE:
        kind = " of one stage" if plan.schedule.stages == 1 else ""
        return (
            f"{first.planner} is taken, {100 * (1 / ratio - 1):.2f}% slower than {fastest}: a plan{kind} that neither"
            f" recomputes, offloads nor steps on hosts wins {where_simpler_wins(plan)}."
        )
    if equal:
        return (
            f"{first.planner} is taken: {listed(equal)} {'is' if len(equal) == 1 else 'are'} as fast, and asked later."
        )
    if ratio <= 1 + PLAIN_TOLERANCE:
        return f"{first.planner} is taken: {fastest} is {100 * (ratio - 1):.2f}% slower."
    return None


STEP_TOLERANCE = 1e-9
"""Relative difference up to which steps count as equal."""


def where_simpler_wins(plan: Plan, *, slower: float | None = None) -> str:
    """Words for the tolerance within which a plan without recomputation, offload and CPU optimizer is preferred.

    Args:
        plan: The plan.
        slower: Its relative slowdown; None: against the fastest other planner's plan.
    """
    share = ONE_STAGE_TOLERANCE if plan.schedule.stages == 1 else PLAIN_TOLERANCE
    slower = 1 / fastest_other(plan)[1] - 1 if slower is None else slower
    return f"within {share:.0%}" if slower <= share else "on CPUs, whose hosts are the same cores"


def fastest_other(plan: Plan) -> tuple[str, float]:
    """The fastest planner that was not taken, and the ratio of its step to the plan's; infinite if there is none."""
    answers = _answers(plan)
    ratios = {c.planner: _score(c) / _score(answers[0]) for c in answers[1:]}
    return min(ratios.items(), key=lambda entry: entry[1], default=("", math.inf))


def _score(candidate: CandidateSummary) -> float:
    """The time by which candidates are compared."""
    return _step(candidate) if candidate.robustness is None else candidate.robustness.expected


def _robustness_entries(plan: Plan, candidate: CandidateSummary, *, seconds: bool) -> tuple[str, ...]:
    """A candidate's entries of the columns on disturbed steps."""
    if plan.robustness is None:
        return ()
    if candidate.robustness is None:
        return "", ""
    return tuple(
        time_words(time, seconds=seconds) for time in (candidate.robustness.expected, candidate.robustness.worst)
    )


def _runs_in_words(plan: Plan) -> str:
    """A sentence on the frameworks that run the answers as they are; empty if none does or they are unknown."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for answer in _answers(plan):
        groups.setdefault(answer.runs_in, []).append(answer.planner)
    said = [f"{listed(names)} in {listed(where)}" for where, names in groups.items() if where]
    return f"Plans run in these frameworks: {'; '.join(said)}." if said else ""


def target_rows(plans: Sequence[NearestPlan], step_time: float) -> Rows:
    """The table of targets' fastest plans, compared with a step time in seconds."""

    def row(plan: NearestPlan) -> tuple[str, ...]:
        if plan.step_time is None:
            return plan.target, "", "", f"none: {plan.reason}"
        ratio = f"{100 * (plan.step_time / step_time - 1):+.1f}%"
        return plan.target, time_words(plan.step_time, seconds=True), ratio, plan.schedule or ""

    return Rows(
        title="Targets: the nearest plan of each, as it runs",
        columns=("runs in", "step", "against this plan", "schedule"),
        rows=list(map(row, plans)),
        texts=frozenset({"runs in", "schedule"}),
    )


def _answers(plan: Plan) -> list[CandidateSummary]:
    """The candidates with an answer: the plan's first, the others by time."""
    answers = [c for c in plan.candidates if c.makespan is not None]
    return [*answers[:1], *sorted(answers[1:], key=_score)]


def _step(candidate: CandidateSummary) -> float:
    """The step time; the pipeline's time for older plan files, which lack it."""
    return (candidate.makespan if candidate.step_time is None else candidate.step_time) or 0


def training_words(options: RunOptions) -> str:
    """Words for a run's optimizer, dtypes and adapters."""
    quantized = f" next to {options.quantize}" if options.quantize else ""
    lora = f", LoRA of rank {options.lora}{quantized}" if options.lora else ""
    masters = "" if options.master_dtype == "fp32" else f", weights stepped in {options.master_dtype}"
    return f"{options.optimizer}, {options.dtype}{masters}{lora}"


def _configuration_columns(cluster: Cluster | None) -> tuple[str, ...]:
    """The columns of a table of choices of degrees."""
    return "degrees", "step", f"tokens/s/{'GPU' if cluster is None else cluster.device_word}", "MFU", "memory"


def configuration_rows(search: DegreeSearch, cluster: Cluster | None, *, limit: int | None = None) -> Rows:
    """The table of the best and the usual choices of degrees: the plan's first, others by step, misfits last.

    Choices with equal steps share a row, which shows the one of least memory.
    """
    best = search.configurations[:limit]
    usual = [choice for choice in search.usual if choice.configuration not in best]
    first, *rest = _equal_steps(best)
    timed = [(equal[0].step_time, _configuration_row(equal)) for equal in rest]
    timed += [(math.inf if u.configuration is None else u.configuration.step_time, _usual_row(u)) for u in usual]
    unplanned = f"; {search.unplanned} were not looked at" if search.unplanned else ""
    misfits = "".join(f"  {words}" for words in map(_misfit_words, usual) if words)
    drafts = "  Most others are drafts: planned alone they may be some percent faster." if rest else ""
    counts = f"By quick plans {search.too_large} do not fit, and {search.slower} cannot be faster{unplanned}."
    return Rows(
        title=f"Degrees: the best {len(best)} of {search.legal}{', and usual ones' * bool(usual)}",
        columns=_configuration_columns(cluster),
        rows=[_configuration_row(first), *(row for _, row in sorted(timed, key=lambda entry: entry[0]))],
        texts=frozenset({"degrees"}),
        caption=f"{counts}{chosen_degrees_words(search)}{drafts}{misfits}",
    )


def chosen_degrees_words(search: DegreeSearch) -> str:
    """A sentence, after two spaces, on why the first choice was preferred; empty if no other is about as fast."""
    first, *rest = search.configurations
    fastest = first if search.fastest is None else search.fastest.configuration
    limit = fastest.step_time * (1 + (search.tolerance or PLAIN_TOLERANCE))
    near = sum(configuration.step_time <= limit for configuration in rest)
    if not near and search.fastest is None:
        return ""
    if not search.tolerance:
        return "  The first is the fastest that was found."
    if search.fastest is not None and not rest:
        less = 100 * (1 - fastest.step_time / first.step_time)
        return (
            f"  The plan has fewer levers than the fastest of these degrees, which takes {less:.1f}% less (--fastest)."
        )
    within = f"within {100 * search.tolerance:.0f}% of the fastest"
    slower = "" if search.fastest is None else f" ({100 * (first.step_time / fastest.step_time - 1):.1f}% slower)"
    return (
        f"  The first{slower} is taken: {within} the plan with the fewest levers (kinds of parallelism beyond data,"
        " chunks, uneven stages, recomputation, offload) wins, then that with the least context parallelism, then the"
        " fastest."
    )


DEGREE_WORDS = {"zero": "ZeRO", "micro_batch_size": "micro-batches of"}
"""Words for degrees before a value, if different from their names."""


def other_values_words(search: DegreeSearch) -> str:
    """A sentence on the best choice for each other value of the degrees; empty if none is known."""
    groups: dict[str, list[str]] = {}
    for choice in search.other_values:
        told = "nothing fits" if choice.too_large else "no quick plan fits"
        if choice.step_time is not None:
            told = time_words(choice.step_time, seconds=True)
        elif choice.lower_bound is not None:
            told = f"no quick plan below {time_words(choice.lower_bound, seconds=True)}"
        groups.setdefault(DEGREE_WORDS.get(choice.degree, choice.degree), []).append(f"{choice.value}: {told}")
    if not groups:
        return ""
    told_of = "; ".join(f"{degree} {', '.join(values)}" for degree, values in groups.items())
    return f"The best with other degrees, most by quick plans: {told_of}."


def pareto_rows(front: Sequence[ConfigurationSummary], cluster: Cluster | None) -> Rows:
    """The table of the Pareto front of time and memory, fastest first."""
    return Rows(
        title="Time and memory",
        columns=_configuration_columns(cluster),
        rows=[_configuration_row([point]) for point in front],
        texts=frozenset({"degrees"}),
        caption="No choice that was planned is both faster and smaller than one of these; the first is the plan.",
    )


def _equal_steps(configurations: Sequence[ConfigurationSummary]) -> Iterator[list[ConfigurationSummary]]:
    """Group consecutive configurations whose steps differ by at most a millionth."""
    run: list[ConfigurationSummary] = []
    for configuration in configurations:
        if run and abs(configuration.step_time / run[0].step_time - 1) > 1e-6:
            yield run
            run = []
        run.append(configuration)
    if run:
        yield run


def _misfit_words(usual: UsualChoice) -> str:
    """A sentence on why a usual choice does not fit as it is; empty if it fits."""
    name = usual.name.removesuffix(f", {usual.options}")
    if usual.configuration is None:
        return f"{name} does not fit: {(usual.reason or '').partition(';')[0].removesuffix('.')}."
    return f"{name} fits with {usual.options} alone." if usual.options else ""


def _usual_row(usual: UsualChoice) -> tuple[str, ...]:
    """The row of a usual choice."""
    if usual.configuration is None:
        return usual.name, "does not fit", "", "", ""
    words, *figures = _configuration_row([usual.configuration])
    return f"{usual.name}: {words}", *figures


def _configuration_row(equal: Sequence[ConfigurationSummary]) -> tuple[str, ...]:
    """The row of choices with equal steps."""
    c = min(equal, key=lambda choice: choice.peak_memory)
    equals = (
        f" (as fast: {'; '.join(str(choice.degrees) for choice in equal if choice is not c)})" if len(equal) > 1 else ""
    )
    quick = f" ({QUICK_PLAN})" if c.planner == QUICK_PLAN else ""
    return (
        f"{configuration_words(c)}{quick}{equals}",
        time_words(c.step_time, seconds=True),
        f"{c.tokens_per_second_per_device:,.0f}",
        mfu_words(c.mfu),
        size_words(c.peak_memory),
    )


def configuration_words(configuration: ConfigurationSummary) -> str:
    """Words for a choice's degrees and its plan's levers."""
    other = (UNEVEN_STAGES, RECOMPUTATION, OFFLOAD, CPU_OPTIMIZER)
    return ", ".join([str(configuration.degrees), *(lever for lever in configuration.levers if lever in other)])


def cause_rows(why: Explanation) -> Rows:
    """The table of the step by cause, averaged over the devices, largest first."""
    return Rows(
        title="Where the step goes, on average over the devices",
        columns=("cause", "time", "share"),
        rows=[
            (cause.cause, time_words(cause.seconds, seconds=True), percent(cause.seconds, why.step_time))
            for cause in why.causes
        ],
        texts=frozenset({"cause"}),
    )


def partition_rows(plan: Plan) -> Rows:
    """The table of stages: their units and recomputation."""
    device_of = plan.schedule.placement.device_of
    stages = enumerate(zip(plan.partition, plan.recompute, strict=True))
    return Rows(
        title="Stages",
        columns=("stage", "device", "units", "recompute"),
        rows=[(str(s), str(device_of[s]), ", ".join(unit_runs(units)), recompute) for s, (units, recompute) in stages],
        texts=frozenset({"units", "recompute"}),
    )


def unit_runs(units: Sequence[PlannedUnit]) -> Iterator[str]:
    """Words for runs of units: `embedding`, `27 vision`, `layers 0-3`; `attention 4` for a single half-layer."""
    alongside = Counter(unit.type for unit in units if unit.layer is None)
    layers: dict[int, list[str]] = {}
    for unit in units:
        if unit.layer is not None:
            layers.setdefault(unit.layer, []).append(unit.type)
    complete = [layer for layer, types in layers.items() if len(types) > 1]
    named: set[int] = set()
    for unit in units:
        if unit.layer is None:
            if count := alongside.pop(unit.type, 0):
                yield unit.type if count == 1 else f"{count} {unit.type}"
        elif unit.layer not in complete:
            yield f"{unit.type} {unit.layer}"
        elif unit.layer not in named:
            last = unit.layer
            while last + 1 in complete:
                last += 1
            named.update(range(unit.layer, last + 1))
            yield f"layer {last}" if last == unit.layer else f"layers {unit.layer}-{last}"
