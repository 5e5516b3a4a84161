"""The report's texts and tables of a scene: the answer, the plan, its memory by part, and shares of time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from debubble.errors import readable_bytes
from debubble.formatting import percent, size_words, time_words
from debubble.ir import Kind
from debubble.planners.analysis.explanation import ADVICE, ALL_TO_ALL, FILLING, REMARK_SHARE, Explanation
from debubble.planners.analysis.likely_fit import may_not_fit, memory_excess, plan_accuracy
from debubble.planners.analysis.what_if import effects, gains, helpful, possible
from debubble.plans import Plan
from debubble.simulator import Cause
from debubble.views.html.strips import memory_bars, partition_strip
from debubble.views.palette import KIND_COLORS
from debubble.views.plan_levers import offload_words
from debubble.views.rows import Rows, configuration_rows, partition_rows, planner_rows, training_words
from debubble.views.scene import Scene, planned_words, subject
from debubble.views.summary import (
    bound_words,
    device_figures,
    notable_causes,
    pace_words,
    stage_figures,
    why_not_faster,
)
from debubble.views.terminal import headline, headline_parts

CAUSE_COLORS = {
    "compute": KIND_COLORS[Kind.F], "recomputation": KIND_COLORS[Kind.R], "collectives": KIND_COLORS[Kind.I],
    ALL_TO_ALL: KIND_COLORS[Kind.SEND_B],
    "messages": KIND_COLORS[Kind.SEND_F], "host transfers": KIND_COLORS[Kind.O], "gradients": KIND_COLORS[Kind.G],
    "optimizer": KIND_COLORS[Kind.S],
} | {cause.value: f"var(--cause-{i})" for i, cause in enumerate(Cause)}  # fmt: skip
"""Colors of the step's parts, the same as in the timeline."""


def section(scene: Scene, letter: str) -> dict[str, Any]:
    """The content around a scene's canvas; the letter is put before its titles."""
    plan = scene.plan
    why = scene.why
    return {
        "title": letter + scene.title,
        "subject": None if plan is None else letter + subject(plan),
        "headline": headline(scene),
        "remarks": scene.remarks,
        "answers": [] if plan is None else list(_answers(plan, scene, why)),
        "causes": [] if why is None else _causes(why),
        "facts": [] if plan is None else list(_facts(plan)),
        "strip": None if plan is None else partition_strip(plan),
        "rows": "" if plan is None else _rows_words(plan),
        "memory": None if plan is None else memory_bars(scene),
        "tables": [] if plan is None else list(_plan_tables(plan, scene)),
        "shares": [_device_rows(scene), _stage_rows(scene)],
        "rejected": [] if plan is None else [(c.planner, c.rejected) for c in plan.candidates if c.rejected],
        "said": [] if plan is None else [(c.planner, "; ".join(c.remarks)) for c in plan.candidates if c.remarks],
    }


def _answers(plan: Plan, scene: Scene, why: Explanation | None) -> Iterator[dict[str, Any]]:
    """The report's four questions, with the answer and further sentences for each."""
    yield {"question": "Does it fit?"} | _fit(plan, scene, why)
    pace = [] if why is None else [pace_words(why) + "."]
    if (likely := plan_accuracy("step", plan)) is not None:
        low, high = (time_words(end * scene.step_time, seconds=True) for end in (likely.low, likely.high))
        pace.append(f"By {likely.runs} published runs ({likely.group}), {low} to {high} a step.")
    step = f"{time_words(scene.step_time, seconds=scene.seconds)} per step"
    yield {"question": "How fast?", "answer": step, "more": [*pace, f"{_sentence(headline_parts(scene))}"]}
    path = why_not_faster(scene)
    answer, more = (path, []) if why is None else (f"{why.shares}; {why.memory_words}.", [path])
    yield {"question": "Why not faster?", "answer": answer, "more": [*more, bound_words(plan, scene)]}
    yield {"question": "What would help?"} | _help(plan, scene, why)


def _fit(plan: Plan, scene: Scene, why: Explanation | None) -> dict[str, Any]:
    peaks, fullest = list(map(float, scene.peak_memory)), scene.fullest
    peak, limit = peaks[fullest], scene.limits[fullest]
    if limit is None:
        more = f"Device {fullest} holds most; no memory limit was given."
        return {"answer": f"{size_words(peak)}, and no limit", "more": [more]}
    more = f"Device {fullest} is fullest, at {100 * peak / limit:.1f}% of its limit."
    likely, excess = may_not_fit(plan, scene.peak_memory), memory_excess(plan)
    published = [f"By published runs like it, up to {size_words(max(peaks) * excess)} on a device."] if excess else []
    return {
        "answer": f"{'Likely' if likely else 'Yes'}: {size_words(peak)} of {size_words(limit)}",
        "more": [more, *published, *_beyond_the_peak(why)],
    }


def _beyond_the_peak(why: Explanation | None) -> Iterator[str]:
    """Sentences on the memory that is not in the peak: fragmentation, reserve and hosts."""
    if why is not None:
        if why.fragmentation:
            yield f"One arena for its tensors takes {readable_bytes(why.fragmentation)} more (fragmentation)."
        if why.reserve:
            yield f"The limit leaves {size_words(why.reserve)} of the device as a reserve."
        if offloaded := ", ".join(offload_words(why.plan, why)):
            yield f"Offload: {offloaded}."


def _help(plan: Plan, scene: Scene, why: Explanation | None) -> dict[str, Any]:
    changes = gains(plan, float(scene.step_time), plan.what_ifs)
    best = helpful(changes)
    if changes and not changes[0].what_if.quick:
        answer = _sentence(best[0].words) if best else "None of the changes that were planned."
        further = effects(gain for gain in changes if gain not in best[:1])
        return {"answer": answer, "more": ["Planned too:", *map(_sentence, further)]}
    if best:
        further = [gain.words for gain in best[1:]]
        rest = "By quick plans; with --why the call below plans every change."
        perhaps = [f"perhaps {name}" for name in possible(plan.what_ifs)[:1] if best[0].what_if.more_devices]
        return {"answer": _sentence(best[0].words), "more": [*map(_sentence, [*further, *perhaps]), rest]}
    if why is None:
        return _help_by_idle_time(scene)
    answer = "more devices, faster ones, or a narrower dtype" if why.advice is None else why.advice
    rest = "This follows from where the step goes; with --why the call below plans every such change."
    return {"answer": _sentence(answer), "more": [*map(_sentence, why.at_stake), rest]}


def _help_by_idle_time(scene: Scene) -> dict[str, Any]:
    """The change that shortens the largest idle time, for plans without a model."""
    devices = device_figures(scene)
    idle = {cause: sum(d.bubbles[cause] for d in devices) for cause in devices[0].bubbles}
    idle[FILLING] = idle.pop(Cause.WARM_UP.value) + idle.pop(Cause.COOL_DOWN.value)
    largest = max(idle.keys() & ADVICE.keys(), key=lambda cause: (idle[cause], cause))
    share = idle[largest] / (float(scene.timeline.makespan) * scene.devices)
    if share < REMARK_SHARE:
        return {"answer": "Less work: the devices are hardly ever idle.", "more": []}
    stake = f"At stake is what {largest} takes: {100 * share:.1f}% of the devices' time."
    return {"answer": _sentence(ADVICE[largest].removesuffix(",")), "more": [stake]}


def _sentence(words: str) -> str:
    return f"{words[0].upper()}{words[1:].removesuffix('.')}."


def _causes(why: Explanation) -> list[dict[str, str]]:
    """The step by cause, averaged over the devices."""
    return [
        {
            "words": cause.cause,
            "seconds": time_words(cause.seconds, seconds=True),
            "share": f"{100 * max(cause.seconds, 0) / why.step_time:.2f}",
            "color": CAUSE_COLORS.get(cause.cause, "var(--muted)"),
        }
        for cause in why.causes
    ]


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Origin and settings of the plan, as (name, words)."""
    if plan.origin is not None:
        yield "command", plan.origin.command
        yield "made", f"{plan.origin.date}, by debubble {plan.origin.version}"
    yield "schedule", f"{planned_words(plan)} in {plan.solve_seconds:.1f} s"
    if plan.model is not None:
        o = plan.options
        yield "degrees", str(plan.degrees)
        yield "batch", f"{plan.degrees.global_batch} sequences of {o.sequence_length} tokens per step"
        yield "training", f"{training_words(o)}{', post-validation' if o.post_validation else ''}"
        yield "costs", "measured by debubble profile" if plan.profile is not None else "computed by formulas"
    else:
        yield "pipeline", f"{plan.devices} devices, {plan.micro_batches} micro-batches"


def _rows_words(plan: Plan) -> str:
    """A sentence on the number of devices that a row stands for; empty if one."""
    replicas = plan.degrees.devices // plan.devices
    return "" if plan.model is None or replicas == 1 else f"A row stands for {replicas} devices that do the same work."


def _plan_tables(plan: Plan, scene: Scene) -> Iterator[Rows]:
    if plan.degree_search is not None:
        yield configuration_rows(plan.degree_search, plan.cluster)
    if plan.candidates:
        yield planner_rows(plan, seconds=scene.seconds)
    yield partition_rows(plan)


def _device_rows(scene: Scene) -> Rows:
    devices = device_figures(scene)
    makespan = scene.timeline.makespan
    causes = notable_causes(devices, makespan)
    rows = [
        [
            str(d.device),
            percent(d.busy, makespan),
            percent(d.recompute, makespan),
            *(percent(d.bubbles[c], makespan) for c in causes),
            percent(d.forward_bubbles, makespan),
            percent(d.backward_bubbles, makespan),
            size_words(d.peak_memory),
            size_words(d.memory_limit),
        ]
        for d in devices
    ]
    bubbles = ("forward bubbles", "backward bubbles", "peak memory", "limit")
    columns = ("device", "busy", "recompute", *causes, *bubbles)
    return Rows(title="Share of the pipeline's time, per device", columns=columns, rows=rows)


def _stage_rows(scene: Scene) -> Rows:
    makespan = scene.timeline.makespan
    stages = stage_figures(scene)
    causes = notable_causes(stages, makespan)
    rows = [
        [
            str(s.stage),
            str(s.device),
            str(s.chunk),
            *(percent(t, makespan) for t in (s.compute, s.recompute, *(s.bubbles[c] for c in causes), s.sending)),
        ]
        for s in stages
    ]
    columns = ("stage", "device", "chunk", "compute", "recompute", *causes, "sending")
    return Rows(title="Share of the pipeline's time, per stage", columns=columns, rows=rows)
