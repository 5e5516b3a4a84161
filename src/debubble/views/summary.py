"""The figures of a scene, per device, stage and kind of operation, and sentences on its critical path and bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from debubble.formatting import listed, mfu_words, percent, time_words
from debubble.ir import Kind, Lane, Number
from debubble.planners.analysis.explanation import Explanation
from debubble.plans import Plan
from debubble.simulator import Cause, by_cause
from debubble.simulator.timeline import BUSY_KINDS
from debubble.targets import targets
from debubble.targets.orders import OwnOrders
from debubble.views.palette import KIND_WORDS
from debubble.views.scene import Scene

Seconds = Annotated[float, Meta(description="Seconds, or the unit of an abstract costs file.")]
Bytes = Annotated[float, Meta(description="Bytes, or the unit of an abstract costs file.")]
PeakTimes = Annotated[list[Seconds], Meta(description="When each device's memory first reaches its peak.")]
Fullest = Annotated[int, Meta(description="The device with the least memory left below its limit.")]


class DeviceFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The compute lane and the memory of a device."""

    device: int
    busy: Seconds
    recompute: Annotated[float, Meta(description="Of the busy time, what recomputation takes.")]
    bubbles: Annotated[dict[str, float], Meta(description="Idle seconds by cause.")]
    forward_bubbles: Annotated[Seconds, Meta(description="Idle from first forward to first backward.")]
    backward_bubbles: Annotated[Seconds, Meta(description="Idle from first to last backward.")]
    peak_memory: Bytes
    memory_limit: Annotated[float | None, Meta(description="Bytes; null: it has none.")]


class StageFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A stage's part of the pipeline's time on its device."""

    stage: int
    device: int
    chunk: Annotated[int, Meta(description="The stage's index among its device's stages.")]
    compute: Seconds
    recompute: Seconds
    sending: Annotated[float, Meta(description="Time of the messages that it sends, which may overlap with all else.")]
    bubbles: Annotated[dict[str, float], Meta(description="Idle seconds by cause.")]


class KindFigures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All operations of a kind."""

    count: int
    mean: Seconds
    total: Seconds


def device_figures(scene: Scene) -> list[DeviceFigures]:
    """One entry per device."""
    timeline = scene.timeline
    return [
        DeviceFigures(
            device=device,
            busy=float(timeline.busy[device]),
            recompute=float(timeline.recompute[device]),
            bubbles=_by_word(by_cause(scene.bubbles[device])),
            forward_bubbles=float(timeline.forward_bubbles[device]),
            backward_bubbles=float(timeline.backward_bubbles[device]),
            peak_memory=float(scene.peak_memory[device]),
            memory_limit=None if (limit := scene.limits[device]) is None else float(limit),
        )
        for device in range(scene.devices)
    ]


def kind_figures(scene: Scene) -> dict[Kind, KindFigures]:
    """One entry per kind of operation that takes time."""
    times: dict[Kind, list[Number]] = {}
    for operation in scene.timeline.operations:
        times.setdefault(operation.op.kind, []).append(operation.duration)
    totals = {kind: sum(times.get(kind, ())) for kind in Kind}
    return {
        kind: KindFigures(count=len(times[kind]), mean=float(total) / len(times[kind]), total=float(total))
        for kind, total in totals.items()
        if total
    }


def stage_figures(scene: Scene) -> list[StageFigures]:
    """One entry per stage.

    Idle time counts to the stage whose operation ends it, idle time at the end to the stage that ran last: the stages
    of a device sum to the makespan.
    """
    schedule, costs = scene.timeline.program.schedule, scene.timeline.program.costs
    work: list[Number] = [0] * schedule.stages
    recompute: list[Number] = [0] * schedule.stages
    sending: list[Number] = [0] * schedule.stages
    for o in scene.timeline.operations:
        kind, stage, j = o.op
        if kind in (Kind.SEND_F, Kind.SEND_B):
            sending[stage] += o.duration
        elif o.lane is Lane.COMPUTE and kind in BUSY_KINDS:
            time = schedule.recompute_time(costs, stage, j) if scene.recomputes(o) else 0
            recompute[stage] += time
            work[stage] += o.duration - time
    idle = _idle_by_stage(scene)
    return [
        StageFigures(
            stage=stage,
            device=schedule.placement.device_of[stage],
            chunk=scene.chunk_of(stage),
            compute=float(work[stage]),
            recompute=float(recompute[stage]),
            sending=float(sending[stage]),
            bubbles=_by_word(idle[stage]),
        )
        for stage in range(schedule.stages)
    ]


def _by_word(idle: Mapping[Cause, Number]) -> dict[str, float]:
    return {cause.value: float(time) for cause, time in idle.items()}


def _idle_by_stage(scene: Scene) -> list[dict[Cause, Number]]:
    idle: list[dict[Cause, Number]] = [dict.fromkeys(Cause, 0) for _ in range(scene.timeline.program.schedule.stages)]
    for device, bubbles in enumerate(scene.bubbles):
        work = [o for o in scene.timeline.compute[device] if o.op.kind in BUSY_KINDS]
        index = 0
        for bubble in bubbles:
            while index < len(work) - 1 and work[index].start < bubble.end:
                index += 1
            idle[work[index].op.stage][bubble.cause] += bubble.duration
    return idle


def notable_causes(parts: Sequence[DeviceFigures | StageFigures], makespan: Number) -> list[str]:
    """Words for the causes that take more than 0.05% of the step on some device or stage."""
    words = (cause.value for cause in Cause)
    return [cause for cause in words if any(figures.bubbles[cause] > makespan / 2000 for figures in parts)]


def present_kinds(scenes: Sequence[Scene]) -> list[Kind]:
    """The kinds that take time in some scene; recomputation counts also inside backwards."""
    present = {o.op.kind for scene in scenes for o in scene.timeline.operations if o.duration}
    if any(any(scene.timeline.recompute) for scene in scenes):
        present.add(Kind.R)
    return [kind for kind in Kind if kind in present]


def present_causes(scenes: Sequence[Scene]) -> list[Cause]:
    """The causes of idle time that are notable in some scene."""
    present = {c for scene in scenes for c in notable_causes(device_figures(scene), scene.timeline.makespan)}
    return [cause for cause in Cause if cause.value in present]


def why_not_faster(scene: Scene) -> str:
    """A sentence on the critical path: the device with most of its compute, other devices, and the rest."""
    compute: dict[int, Number] = {}
    other: dict[str, Number] = {}
    ends = [*(o.start for o in scene.critical_path[1:]), None]
    for o, following in zip(scene.critical_path, ends, strict=True):
        # A streaming transfer overlaps with its successor.
        time = o.duration if following is None else min(o.end, following) - o.start
        if o.lane is Lane.COMPUTE and o.op.kind in BUSY_KINDS:
            compute[o.device] = compute.get(o.device, 0) + time
        else:
            activity = Cause.HOST_OPTIMIZER.value if o.lane is Lane.HOST else KIND_WORDS[o.op.kind]
            other[activity] = other.get(activity, 0) + time
    first = max(compute, key=compute.__getitem__)
    parts = {f"computing on device {first}": compute.pop(first), "computing on other devices": sum(compute.values())}
    makespan = scene.timeline.makespan
    parts |= {activity: other[activity] for activity in sorted(other, key=lambda activity: -other[activity])}
    parts["between operations"] = makespan - sum(parts.values())
    words = [f"{percent(time, makespan)} {activity}" for activity, time in parts.items() if time > makespan / 2000]
    return f"The critical path spends {', '.join(words)}."


def bounded_plans(plan: Plan) -> str:
    """The subject of a sentence on the plans that the lower bound holds for."""
    if plan.target is not None:
        return f"no such plan for {targets[plan.target].title}"
    return "no plan" if plan.model is None else "no plan with these degrees"


def bound_words(plan: Plan, scene: Scene, *, argument: bool = True) -> str:
    """Sentences on the lower bound and the gap, and with the argument on what the bound counts.

    For devices that share cores, both are of devices with a core each.
    """
    if not plan.lower_bound:
        return "No lower bound of the step is known."
    gap = plan.gap_at(scene.step_time if scene.cores is None else plan.step_time)
    alone = "" if scene.cores is None else "With a core for each device: "
    plans = bounded_plans(plan)
    which = f"{alone}{plans[0].upper()}{plans[1:]}"
    bound = time_words(plan.lower_bound, seconds=scene.seconds)
    counted = "" if plan.bound_argument is None or not argument else f"  The bound counts {plan.bound_argument}."
    wide = (
        f"  {_wide_gap_words(plan, scene)}"
        if gap >= MIN_WIDE_GAP and scene.why is not None and scene.why.losses
        else ""
    )
    return f"{which} takes less than {bound}: the gap is {100 * gap:.1f}%.{counted}{wide}"


MIN_WIDE_GAP = 0.1
"""Smallest gap that is explained."""


def _wide_gap_words(plan: Plan, scene: Scene) -> str:
    """A sentence on the sources of a gap that may be due to a weak bound."""
    assert scene.why is not None
    words = f"Besides computing, the step has {listed(scene.why.losses)}"
    levers = None if plan.target is None else targets[plan.target].levers_of(plan.options, pipeline=plan.devices)
    if plan.target is None or levers is None or not isinstance(levers.orders, OwnOrders):
        return f"{words}."
    target_orders = f"{targets[plan.target].title} runs {listed(levers.orders.names)} alone"
    return f"{words}; the bound holds for every order of operations, and {target_orders}."


def pace_words(why: Explanation) -> str:
    """Tokens per second, total and per device, and model FLOPs utilization if peak FLOPs are known."""
    pace = f"{why.tokens_per_second:,.0f} tokens/s, {why.tokens_per_second_per_device:,.0f} per"
    utilization = "" if why.mfu is None else f", {mfu_words(why.mfu)} MFU"
    return f"{pace} {why.cluster.device_word}{utilization}"


def as_dict(scene: Scene) -> dict[str, Any]:
    """The summary for `--json`; times and sizes are in the costs' units."""
    timeline = scene.timeline
    summary = {
        "step_time": float(scene.step_time),
        "makespan": float(timeline.makespan),
        "span": float(timeline.span),
        "ideal_fraction": timeline.ideal_fraction,
        "bubble_fraction": timeline.bubble_fraction,
        "peak_memory": [float(peak) for peak in scene.peak_memory],
        "peak_times": [float(time) for time in scene.peak_times],
        "fullest": scene.fullest,
        "devices": scene.devices,
        "operations": len(timeline.operations),
        "per_device": device_figures(scene),
        "per_stage": stage_figures(scene),
        "per_kind": kind_figures(scene),
        "critical_path": why_not_faster(scene),
        "remarks": list(scene.remarks),
    }
    return msgspec.to_builtins(summary)  # type: ignore[no-any-return]
