"""The answer of `debubble plan` on one screen: fit, speed, settings, memory and time by part, and next steps.

Rows have a label and phrases; lines break only between phrases, which keeps figures with their words.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from rich.text import Text

from debubble.costs.devices.parallel_layout import Layout
from debubble.costs.devices.speed import PRODUCT_BYTES
from debubble.formatting import count_words, days_words, mfu_words, time_words
from debubble.ir import DEFAULT_EFFORT, Kind, Number
from debubble.ir.plan_entries import plain_words
from debubble.models.runtime_limits import beyond_runtime
from debubble.planners.analysis.explanation import ALL_TO_ALL, REMARK_SHARE, Explanation
from debubble.planners.analysis.likely_fit import may_not_fit
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.planners.analysis.what_if import gains, helpful, possible
from debubble.planners.auto import has_compared_planners
from debubble.plans import IMPORTED, Plan
from debubble.simulator import Cause
from debubble.targets.target import targets
from debubble.views.accuracy_row import accuracy_row, safer_row
from debubble.views.memory_table import PARTS, STEP_BUFFERS, UNITS, unit_of
from debubble.views.palette import KIND_COLORS, LIGHT
from debubble.views.plan_levers import Detail, host_is_full, is_assumed, offload_words, recomputation_words, unit_words
from debubble.views.rows import configuration_words, fastest_other, where_simpler_wins
from debubble.views.scene import Scene, planner_of, subject
from debubble.views.summary import bounded_plans

LABEL_WIDTH = 13
"""Width of the label column, in characters."""
SEPARATOR = " · "
UNBROKEN = "\N{NO-BREAK SPACE}"
"""A space at which lines are not broken."""
OTHER_TARGETS_SHOWN = 2
"""Number of frameworks whose nearest plans are named."""
CHANGES_SHOWN = 2
"""Number of helpful changes that are named."""
MAX_BARS = 4
"""Number of devices up to which all have memory bars; of more, or on a full screen, the fullest of each type and the
emptiest."""
DEFAULT_TARGET = "megatron"
"""The framework that `--for` suggests if it is about as fast as the fastest."""
COMPUTE_BOUND = 0.9
"""Compute share of the step from which the step counts as limited by compute."""
LONGER_SEARCH_GAP, LONGER_SEARCH_FACTOR = 0.15, 4
"""Gap above which a longer search is suggested, and its effort as a multiple of the default: on three settings with
such gaps it found plans that are 1 to 10% faster."""
MIN_GAP = 5e-4
"""Gap up to which 0.0% is shown and closing it is not suggested."""
MIN_SAVED_PERCENT = 0.5
"""Percent of the step that a faster plan must save to be mentioned."""
MAX_LINES = 24
"""Number of lines above which details are left out."""
BAR_COLUMNS = 2
"""Number of memory bars per line."""

STEP_PARTS = (
    ("compute", "█", KIND_COLORS[Kind.F], ("compute",)),
    ("recompute", "▓", KIND_COLORS[Kind.R], ("recomputation",)),
    ("bubble", "░", LIGHT.causes[Cause.COOL_DOWN], ("warm-up", "cool-down", "dependency", "imbalance", "overhead")),
    ("communication", "▒", KIND_COLORS[Kind.SEND_F], ("messages", "collectives", ALL_TO_ALL, "transfer", "gradients")),
    ("host transfers", "▚", KIND_COLORS[Kind.O], ("host transfers",)),
    ("optimizer", "▞", KIND_COLORS[Kind.S], ("optimizer", "optimizer on the host")),
)  # fmt: skip
"""Parts of the step's bar: words, cell, color and causes."""


def plan_screen(
    plan: Plan, scene: Scene, why: Explanation, *, width: int, tokens: float | None, details: bool = False
) -> list[Text]:
    """Write the answer as lines of text.

    Args:
        plan: A model's plan.
        scene: Its prediction.
        why: The explanation of its step.
        width: Characters of a line.
        tokens: Number of tokens to train on; None: days are not shown.
        details: Whether all phrases are shown, however many lines they take.

    Returns:
        The lines, at most 24 of 80 characters for an ordinary plan without details.
    """
    above = {
        "Parallelism": _parallelism(plan), "Recompute": recomputation_words(plan),
        "Offload": [*offload_words(plan, why), *_host_hints(why)], "Faster": _faster(plan), "Runs in": _runs_in(plan),
        "Predicted": [*accuracy_row(plan, scene, tokens), *safer_row(plan, scene)],
    }  # fmt: skip
    below = {
        "Limited by": _limits(plan, scene, why), "Bound": [_bound(plan, scene)], "Would help": _changes(plan, scene),
        "Not tried": _not_tried(plan), "Next": [] if scene.misfit else _next(plan, scene.file),
    }  # fmt: skip
    rows = [{label: [*phrases] for label, phrases in section.items()} for section in (above, below)]
    head = [Text(_title(plan, scene), style="bold"), *_speed(scene, why, tokens), Text()]
    bars = [*_memory(scene, why, width, bars=MAX_BARS), *_time(why, width)]
    lines = [*head, *_rows(rows[0], width), Text(), *bars, *_rows(rows[1], width)]
    if details or len(lines) <= MAX_LINES:
        return lines
    rows = [
        {label: [p for p in phrases if not isinstance(p, Detail)] for label, phrases in row.items()} for row in rows
    ]
    bars = [*_memory(scene, why, width, bars=BAR_COLUMNS), *_time(why, width)]
    lines = [*head, *_rows(rows[0], width), *bars, *_rows(rows[1], width)]
    return lines if len(lines) <= MAX_LINES else [line for line in lines if line.plain]


def _rows(phrases: Mapping[str, Sequence[str]], width: int) -> list[Text]:
    """The lines of the rows with these labels, without those that have no phrase."""
    return [line for label, said in phrases.items() if said for line in _row(label, said, width)]


def _row(label: str, phrases: Iterable[str], width: int) -> list[Text]:
    """Lay out a label and phrases, separated and broken into lines between phrases."""
    phrases, columns = [*phrases], width - LABEL_WIDTH
    parts = [f"{phrase}{SEPARATOR.rstrip()}" for phrase in phrases[:-1]] + phrases[-1:]
    lines = [""]
    for phrase in parts:
        longer = f"{lines[-1]} {phrase}" if lines[-1] else phrase
        if len(longer) <= columns:
            lines[-1] = longer
            continue
        # A line must not consist of a separator.
        words = phrase.replace(SEPARATOR.rstrip(), SEPARATOR.rstrip().replace(" ", UNBROKEN))
        broken = textwrap.wrap(words, columns, break_on_hyphens=False)
        lines += [line.replace(UNBROKEN, " ") for line in broken]
    said = [line for line in lines if line] or [""]
    return [
        Text.assemble((f"{label if n == 0 else '':{LABEL_WIDTH}}", "bold"), line, no_wrap=len(line) <= columns)
        for n, line in enumerate(said)
    ]


def _title(plan: Plan, scene: Scene) -> str:
    """The title: whether the plan fits, its schedule and its planner."""
    fits = "likely fits" if may_not_fit(plan, scene.peak_memory) else "fits"
    fits = "likely fits" if scene.why is not None and host_is_full(scene.why) else fits
    fits = "does not fit" if scene.misfit else fits
    target = "" if plan.target is None else f" for {targets[plan.target].title}"
    planner = planner_of(plan)
    named = plan.devices > 1 and plan.schedule.name != planner
    made_by = f"{plan.schedule.name} by {planner}" if named else f"planned by {planner}"
    if not plan.searched:
        made_by = f"{plan.schedule.name}{f', {IMPORTED}' * (planner == IMPORTED)}"
    return f"{subject(plan)} {fits}: {made_by}{target}"


def _speed(scene: Scene, why: Explanation, tokens: float | None) -> Iterator[Text]:
    """Lines with step time, throughput and utilization, and the days for these tokens."""
    step = time_words(scene.step_time, seconds=scene.seconds)
    per_device = f"{why.tokens_per_second_per_device:,.0f} per {why.cluster.device_word}"
    dtype = why.plan.options.dtype
    peak = f" of {dtype}'s peak" if dtype in PRODUCT_BYTES else ""
    utilization = "" if why.mfu is None else f"{SEPARATOR}MFU {mfu_words(why.mfu)}{peak}"
    yield Text.assemble(
        (f"{step} per step", "bold"),
        f"{SEPARATOR}{why.tokens_per_second:,.0f} tokens/s ({per_device})",
        utilization,
    )
    if tokens is not None:
        hours = f"{24 * why.days(tokens) * why.plan.ranks:,.0f} {why.cluster.device_word}-hours"
        yield Text(f"{days_words(why.days(tokens))} for {count_words(tokens)} tokens{SEPARATOR}{hours}")


def _parallelism(plan: Plan) -> Iterator[str]:
    """Phrases on degrees, stages and micro-batches, in Megatron's terms."""
    o = plan.options
    if plan.devices == 1:
        yield "no pipeline"
    else:
        lengths = sorted({sum(unit.layer is not None for unit in stage) for stage in plan.partition})
        units = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
        yield f"pipeline {plan.devices} ({len(plan.partition)} stages of {units} {unit_words(plan)})"
    for name, degree in (("tensor", o.tensor), ("context", o.context), ("data", o.data), ("expert", o.expert)):
        if degree > 1:
            yield f"{name} {degree}"
    if plan.cluster is not None:
        across = Layout.from_options(plan.cluster, o, plan.devices).degrees_across_nodes(o)
        if across:
            yield Detail(f"{' and '.join(across)} across nodes")
    if o.zero:
        alone = " over one rank, dividing nothing" if o.data * o.context == 1 else ""
        yield f"ZeRO-{o.zero}{alone or ' (FSDP)' * (o.zero == 3)}"
    if o.master_dtype != "fp32":
        yield f"weights, gradients and moments in {o.master_dtype}"
    slices = f" in {o.slices} slices{_slice_words(plan)}" if o.slices > 1 else ""
    count = f"{plan.micro_batches} micro-batch{'es' * (plan.micro_batches != 1)}"
    yield f"{count} of {o.micro_batch_size} x {o.sequence_length:,} tokens{slices}"


def _slice_words(plan: Plan) -> str:
    """Words for the tokens of the shortest and the longest slice, if they differ."""
    tokens = plan.slice_tokens(plan.options.sequence_length)
    return f" of {min(tokens):,} to {max(tokens):,} tokens" if plan.costs.micro_batch_scale else ""


def _host_hints(why: Explanation) -> Iterator[str]:
    """Phrases on what a cluster file should give as host memory."""
    if any(why.host_memory) and why.units.host_memory is not None and is_assumed(why):
        yield Detail("a cluster file's host_memory says how much there is")
    if host_is_full(why):
        yield "give less as host_memory if the system needs more than the rest"


def _faster(plan: Plan) -> Iterator[str]:
    """Phrases on faster plans, if this one was preferred because it is simpler."""
    if plan.degree_search is None:
        planner, ratio = fastest_other(plan)
        slower = plan.candidates[0].plain_excess if plan.candidates else None
        if slower is not None:
            yield f"this plan is {plain_words(slower)}"
            yield f"it wins {where_simpler_wins(plan, slower=slower)}"
            yield "--fastest takes the other"
        elif 100 * (1 - ratio) >= MIN_SAVED_PERCENT:
            yield f"{100 * (1 - ratio):.1f}% less time by {planner}"
            yield f"--planner {planner} asks it alone"
            yield f"a plan without recomputation or offload wins {where_simpler_wins(plan)}"
        return
    step = plan.degree_search.configurations[0].step_time
    for usual in plan.degree_search.usual:
        saved = 0.0 if usual.configuration is None else 100 * (1 - usual.configuration.step_time / step)
        if saved >= MIN_SAVED_PERCENT and usual.options:
            yield f"{saved:.1f}% less time as {usual.name}"
    if plan.degree_search.fastest is None:
        return
    faster = plan.degree_search.fastest
    gained = 100 * (1 - faster.configuration.step_time / step)
    if gained < MIN_SAVED_PERCENT:
        return
    yield f"{gained:.1f}% less time with {configuration_words(faster.configuration)}"
    yield "--fastest takes it"
    yield f"simpler plans win within {plan.degree_search.tolerance:.0%}"


def _runs_in(plan: Plan) -> Iterator[str]:
    """Phrases on the frameworks that run the plan, and on quick plans of its degrees for others."""
    if plan.target is not None:
        return
    yield ", ".join(plan_runs_in(plan)) or "no framework (see --for)"
    nearest = sorted(plan.other_targets.items(), key=lambda entry: entry[1])
    if nearest:
        named = [f"{name} {_pace_words(ratio)}" for name, ratio in nearest[:OTHER_TARGETS_SHOWN]]
        yield f"with these degrees: {', '.join(named)}"
    if plan.options.lora:
        yield "adapters are configured by hand elsewhere"


def _pace_words(ratio: float) -> str:
    """Words for the step of a quick plan, as a multiple of the plan's: better plans take less."""
    percent = round(100 * (ratio - 1))
    if not percent:
        return "as fast"
    return f"≤{percent}% slower" if percent > 0 else f"≥{-percent}% faster"


def _memory(scene: Scene, why: Explanation, width: int, *, bars: int) -> Iterator[Text]:
    """Lines with the fullest device's memory by part, and a memory bar per device or of some devices."""
    memory = why.memory[scene.fullest]
    peaks = [float(peak) for peak in scene.peak_memory]
    unit = unit_of(peaks)
    size = UNITS[unit]
    sizes = [f"{name} {getattr(memory, name) / size:.1f}" for name in PARTS if getattr(memory, name) >= size / 20]
    if memory.step_buffers >= size / 20:
        sizes[-1] += f", {memory.step_buffers / size:.1f} of it {STEP_BUFFERS}"
    word = why.cluster.device_word
    moment = scene.peak_times[scene.fullest]
    when = f"fullest at {time_words(moment, seconds=scene.seconds)}" if moment else "fullest from its first forward on"
    first = f"{word[0].upper()}{word[1:]} {scene.fullest}, {when}, in {unit}: {sizes[0]}"
    yield from _row("Memory", [first, *sizes[1:], f"reserve {why.reserve / size:.1f}"], width)
    devices: list[int] = [*range(scene.devices)]
    if scene.devices > bars:
        shares = [peak / float(limit or 1) for peak, limit in zip(peaks, scene.limits, strict=True)]
        layout = Layout.from_options(why.cluster, why.plan.options, why.plan.devices)
        types = [type_.name for type_ in layout.slowest_ranks]
        fullest = {max((d for d in devices if types[d] == name), key=shares.__getitem__) for name in types}
        devices = sorted({scene.fullest, *fullest, min(devices, key=shares.__getitem__)})
    cell = (width - LABEL_WIDTH) // BAR_COLUMNS
    texts = [_bar(d, peaks[d], scene.limits[d], size, cell) for d in devices]
    for n in range(0, len(texts), BAR_COLUMNS):
        yield Text.assemble(" " * LABEL_WIDTH, *texts[n : n + BAR_COLUMNS], no_wrap=True)


def _bar(device: int, peak: float, limit: Number | None, size: int, width: int) -> Text:
    """A bar of a device's peak memory relative to its limit."""
    name, share = f"{device:3} ", None if limit is None else peak / float(limit)
    said = f" {peak / size:.1f}" + ("" if share is None else f" ({100 * share:.0f}%)")
    cells = width - len(name) - 14
    filled = 0 if share is None else min(cells, round(cells * share))
    style = "" if share is None else "red" if share > 1 else "yellow" if share > 0.95 else "green"
    return Text.assemble(name, ("█" * filled, style), ("·" * (cells - filled), "dim"), f"{said:14}")


def _time(why: Explanation, width: int) -> Iterator[Text]:
    """Lines with the step as one bar, and the share of each part."""
    seconds = {cause.cause: cause.seconds for cause in why.causes}
    parts = [
        (words, cell, color, sum(seconds.get(cause, 0.0) for cause in causes))
        for words, cell, color, causes in STEP_PARTS
    ]
    parts = [entry for entry in parts if entry[3] >= 0.001 * why.step_time]
    cells, ends, total = width - LABEL_WIDTH, [0], 0.0
    for *_, took in parts:
        total += took
        ends.append(min(cells, round(cells * total / why.step_time)))
    spans = [
        (cell * (end - begin), color) for (_, cell, color, _), (begin, end) in zip(parts, pairwise(ends), strict=True)
    ]
    yield Text.assemble((f"{'Time':{LABEL_WIDTH}}", "bold"), *spans, no_wrap=True)
    yield from _row("", [f"{cell} {words} {100 * took / why.step_time:.1f}%" for words, cell, _, took in parts], width)


def _limits(plan: Plan, scene: Scene, why: Explanation) -> Iterator[str]:
    """Phrases on compute if it dominates, on the next largest cause, and on a remedy unless changes were planned."""
    if why.advice is None:
        yield "computing"
        return
    if why.compute_share >= COMPUTE_BOUND:
        yield f"computing ({why.compute_share:.1%} of the step)"
        yield f"then {why.largest_cause}"
    else:
        yield why.largest_cause
    changes = gains(plan, float(scene.step_time), plan.what_ifs)
    planned = bool(changes) and not changes[0].what_if.quick
    if not changes or (not planned and any(not gain.what_if.more_devices for gain in helpful(changes))):
        yield f"shorter with {why.advice}"


def _bound(plan: Plan, scene: Scene) -> str:
    """A phrase on the lower bound and the gap."""
    if not plan.lower_bound:
        return "none is known"
    gap = plan.gap_at(scene.step_time)
    bound = time_words(plan.lower_bound, seconds=scene.seconds)
    return f"{bounded_plans(plan)} takes less than {bound} (gap {100 * gap:.1f}%)"


def _changes(plan: Plan, scene: Scene) -> Iterator[str]:
    """Phrases on the planned changes that help most without more devices."""
    changes = gains(plan, float(scene.step_time), plan.what_ifs)
    if not plan.searched:
        return
    best = [gain for gain in helpful(changes) if not gain.what_if.more_devices][:CHANGES_SHOWN]
    if not changes:
        yield "nothing is tried with --lengths" if plan.has_lengths else "see --why"
        return
    for gain in best:
        yield f"{gain.what_if.change}: ≥{math.floor(-100 * (gain.share or 0.0) + 1e-9)}% faster"
    if not best and (perhaps := possible(plan.what_ifs)):
        yield f"perhaps {perhaps[0]} (--why plans it)"
    elif not best:
        tried = "only more devices, of what was tried," if helpful(changes) else "nothing that was tried"
        yield f"{tried} by {REMARK_SHARE:.0%} or more"
    elif changes[0].what_if.quick:
        yield "quick plans"


def _not_tried(plan: Plan) -> Iterator[str]:
    """Phrases on parts of the search that were left out, each with the option that includes it."""
    if not plan.searched:
        return
    if plan.interrupted:
        yield "the rest of the search (Ctrl-C)"
    if plan.degree_search is None:
        yield f"other degrees (--global-batch {plan.degrees.global_batch})"
    elif unplanned := plan.degree_search.unplanned:
        remedy = "more --deadline" if plan.degree_search.cut_off else _more_effort(plan)
        yield f"{unplanned} choices of degrees and CPU optimizers ({remedy})"
    elif plan.degree_search.cut_off:
        yield "more planners for the best degrees (more --deadline)"
    elif MIN_GAP < plan.gap <= plan.degree_search.tolerance:
        yield f"a longer search for at most {100 * plan.gap:.1f}% less time (--fastest)"
    batch, ranks = plan.degrees.global_batch, plan.ranks
    if plan.degree_search is not None and math.gcd(batch, ranks) == 1 < min(batch, ranks):
        more = ranks * math.ceil(batch / ranks)
        yield f"replicas: {batch} sequences do not divide among {ranks} devices (--global-batch {more} does)"
    if plan.planner == "auto" and plan.degree_search is None and plan.target is None:
        if not has_compared_planners([candidate.planner for candidate in plan.candidates]):
            yield "papers' planners (--compare)"
    elif plan.planner != "auto" and plan.degree_search is None:
        yield "other planners (--planner auto)"
    searched = plan.planner in ("auto", "joint") and not plan.interrupted
    left_out = plan.degree_search is not None and plan.degree_search.unplanned
    if searched and plan.gap > LONGER_SEARCH_GAP and not left_out and not _sets_effort(plan):
        yield f"a longer search ({_more_effort(plan)})"


def _runs_with_other_degrees(plan: Plan) -> bool:
    """Tell whether debubble's runtime can train the model with other degrees."""
    alone = replace(plan.options, tensor=1, data=1, context=1, expert=1, expert_tensor=None, zero=0)
    searched = plan.degree_search is not None
    return searched and plan.model is not None and beyond_runtime(alone, plan.model) is None


def framework_to_plan_for(plan: Plan) -> str:
    """The framework to suggest: the one with the fastest quick plan, or the default if it is about as fast.

    With adapters it is debubble's runtime, if only the degrees keep that from running the plan.
    """
    if plan.options.lora and "debubble" not in plan_runs_in(plan) and _runs_with_other_degrees(plan):
        return "debubble"
    elsewhere = plan.other_targets
    fastest = min(elsewhere, key=elsewhere.__getitem__, default="NAME")
    if (
        not plan.options.lora
        and DEFAULT_TARGET in elsewhere
        and 100 * (elsewhere[DEFAULT_TARGET] / elsewhere[fastest] - 1) < MIN_SAVED_PERCENT
    ):
        return DEFAULT_TARGET
    return fastest


def _call(plan: Plan) -> list[str]:
    """The words of the command that made the plan; empty if none did."""
    return [] if plan.origin is None else shlex.split(plan.origin.command)


def _more_effort(plan: Plan) -> str:
    """The option that suggests a longer search."""
    return "more --effort" if _sets_effort(plan) else f"--effort {LONGER_SEARCH_FACTOR * DEFAULT_EFFORT:.0f}"


def _sets_effort(plan: Plan) -> bool:
    """Tell whether the plan's command sets an effort."""
    return any(word.partition("=")[0] == "--effort" for word in _call(plan))


def _next(plan: Plan, file: str | None) -> Iterator[str]:
    """Phrases with the next command, for the plan's file, and with options that show more."""
    call = _call(plan)
    written = file or next((path for option, path in pairwise(call) if option in ("-o", "--output")), None)
    file = written or "plan.json"
    frameworks = [name for name in plan_runs_in(plan) if name != "debubble"]
    if plan.target not in (None, "debubble"):
        run = f"debubble export {file} --to {plan.target}"
    elif plan.model is None or ("debubble" in plan_runs_in(plan) and not plan.has_lengths):
        run = f"debubble train {file}{' --load FOLDER' if plan.options.lora else ''}"
    elif frameworks and not plan.has_lengths:
        run = f"debubble export {file} --to {frameworks[0]}"
    else:
        run = f"debubble show {file}"
    yield f"{'' if written else '-o plan.json, then '}{run}"
    if plan.target is None and not frameworks and not plan.has_lengths:
        named = framework_to_plan_for(plan)
        words = f"--for {named} plans what {'a framework' if named == 'NAME' else 'it'} runs"
        yield Detail(words) if plan_runs_in(plan) else words
    asked = "--why" in call
    yield f"plan --details{'' if plan.has_lengths or asked else ', --why'}"
