"""The terminal's view of a plan: what every planner found, which stage holds what, and the predicted step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from debubble.formatting import size_words, time_words
from debubble.ir import CandidateSummary, Kind, Plan, PlannedUnit
from debubble.ir.degrees import DegreeSearch
from debubble.planners.explanation import explanation
from debubble.views.memory_table import memory_words
from debubble.views.scene import Scene
from debubble.views.summary import why_not_faster
from debubble.views.terminal import device_table, headline, remark_lines, stage_table, titled_table


def render(
    plan: Plan, scene: Scene, *, tokens: float | None = None, details: bool = True, advice: Sequence[str] = ()
) -> RenderableType:
    """The answer in a dozen lines: the step, the pace, the plan, its memory, what binds, and what others found.

    Args:
        plan: The plan.
        scene: What it was predicted to do.
        tokens: How many tokens are to be trained on; None: the days are not told.
        details: Whether stages, devices and every planner's answer follow.
        advice: Lines on what would help.
    """
    seconds = scene.seconds
    gap = max(0.0, float((scene.step_time - plan.lower_bound) / scene.step_time))
    which = "No plan with these degrees" if plan.degree_search is not None else "No plan"
    bound = f"{which} takes less than {time_words(plan.lower_bound, seconds=seconds)}: the gap is {100 * gap:.1f}%."
    parts: list[RenderableType] = [
        Text(f"{plan.schedule.name}, planned by {plan.planner}", style="bold"),
        *([Text(_cut_off(plan), style="bold red")] if plan.cut_off else []),
        Text("\n".join([headline(scene), *_of_a_model(plan, scene, tokens), bound, *advice])),
        *remark_lines(scene),
    ]
    if plan.degree_search is not None:
        parts.append(_configurations(plan.degree_search))
    if details:
        parts += _details(plan, scene)
    else:
        folds = plan.candidates and plan.degree_search is None
        parts += [_folded(plan.candidates, seconds=seconds)] if folds else []
        parts.append(
            Text(
                "--details shows stages, devices and every planner's answer; --why plans what would help.", style="dim"
            )
        )
    return Group(*parts)


def _details(plan: Plan, scene: Scene) -> list[RenderableType]:
    """Stages, devices and every planner's answer or reason."""
    parts: list[RenderableType] = [
        Text(why_not_faster(scene) + "\n"),
        _partition(plan),
        device_table(scene),
        *([stage_table(scene)] if plan.schedule.placement.chunks > 1 else []),
    ]
    if plan.candidates:
        parts += [
            _candidates(plan.candidates, seconds=scene.seconds, post_validation=plan.options.post_validation),
            _lines("Remarks", {c.planner: c.remark for c in plan.candidates if c.remark}),
            _lines("Rejected", {c.planner: c.rejected for c in plan.candidates if c.rejected}),
        ]
    return parts


def _of_a_model(plan: Plan, scene: Scene, tokens: float | None) -> Iterator[str]:
    """The lines that only a model's plan has."""
    why = explanation(plan, scene.timeline, float(scene.step_time))
    if why is None:
        yield _partition_words(plan)
        return
    days = "" if tokens is None else f"; {why.days(tokens):,.1f} days for {tokens:.3g} tokens"
    yield (
        f"{why.tokens_per_second:,.0f} tokens/s, {why.tokens_per_second_per_device:,.0f} per GPU,"
        f" {100 * why.mfu:.1f}% MFU{days}"
    )
    yield f"{plan.degrees}; {_partition_words(plan)}"
    parts = memory_words(why.memory[why.fullest], reserve=why.reserve)
    yield f"Device {why.fullest} is fullest: {parts}"
    yield why.binding


def _partition_words(plan: Plan) -> str:
    """The partition in a few words: stages, units of each, and how they recompute."""
    lengths = sorted({len(stage) for stage in plan.partition})
    units = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    strategies = Counter(unit.strategy for stage in plan.partition for unit in stage)
    total = sum(strategies.values())
    again = [f"{name} in {count} of {total}" for name, count in strategies.most_common() if name != "none"]
    recompute = f"recomputing {', '.join(again)}" if again else "no recomputation"
    offloaded = sum(op.kind is Kind.O for op in plan.schedule.operations)
    offload = f", {offloaded} activations offloaded" if offloaded else ""
    stages = len(plan.partition)
    return f"{stages} stage{'s' * (stages != 1)} of {units} unit{'s' * (units != '1')}, {recompute}{offload}"


def _folded(candidates: Sequence[CandidateSummary], *, seconds: bool) -> Table:
    """The planners' answers, equal ones in one row, fastest first."""
    table = titled_table("Planners")
    for column in ("step", "schedule", "planners"):
        table.add_column(column, justify="right" if column == "step" else "left")
    rows: dict[tuple[str, str], list[str]] = {}
    for c in sorted((c for c in candidates if c.makespan is not None), key=lambda c: c.step_time or c.makespan or 0):
        time = c.makespan if c.step_time is None else c.step_time
        assert time is not None
        rows.setdefault((time_words(time, seconds=seconds), c.schedule or ""), []).append(c.planner)
    for (step, schedule), planners in rows.items():
        table.add_row(step, schedule, ", ".join(planners))
    rejected = [c.planner for c in candidates if c.rejected]
    if rejected:
        table.caption = f"These have no answer: {', '.join(rejected)}."
        table.caption_justify = "left"
    return table


def _cut_off(plan: Plan) -> str:
    who = ", ".join(plan.cut_off)
    return f"The deadline cut off {who}, so that the plan depends on the machine: raise --deadline or lower --effort."


def _configurations(search: DegreeSearch) -> Table:
    """The best choices of degrees, fastest first."""
    table = titled_table(f"Degrees: the best {len(search.configurations)} of {search.legal}")
    for column in ("degrees", "step", "tokens/s/GPU", "MFU", "memory"):
        table.add_column(column, justify="left" if column == "degrees" else "right")
    for c in search.configurations:
        table.add_row(
            str(c.degrees),
            time_words(c.step_time, seconds=True),
            f"{c.tokens_per_second_per_device:,.0f}",
            f"{100 * c.mfu:.1f}%",
            size_words(c.peak_memory),
        )
    left = f"; {search.unplanned} were not looked at within the effort" if search.unplanned else ""
    table.caption = f"{search.too_large} do not fit, {search.slower} cannot be faster{left}."
    table.caption_justify = "left"
    return table


def _partition(plan: Plan) -> Table:
    table = titled_table("Stages")
    table.add_column("stage", justify="right")
    table.add_column("device", justify="right")
    table.add_column("units")
    table.add_column("recompute")
    for stage, (units, recompute) in enumerate(zip(plan.partition, plan.recompute, strict=True)):
        device = plan.schedule.placement.device_of[stage]
        table.add_row(str(stage), str(device), ", ".join(_runs(units)), recompute)
    return table


def _runs(units: Sequence[PlannedUnit]) -> Iterator[str]:
    """`embedding`, `27 vision`, `layers 0-3`; a layer of which one half is here is named by it: `attention 4`."""
    beside = Counter(unit.type for unit in units if unit.layer is None)
    layers: dict[int, list[str]] = {}
    for unit in units:
        if unit.layer is not None:
            layers.setdefault(unit.layer, []).append(unit.type)
    whole = [layer for layer, types in layers.items() if len(types) > 1]
    done: set[int] = set()
    for unit in units:
        if unit.layer is None:
            if count := beside.pop(unit.type, 0):
                yield unit.type if count == 1 else f"{count} {unit.type}"
        elif unit.layer not in whole:
            yield f"{unit.type} {unit.layer}"
        elif unit.layer not in done:
            last = unit.layer
            while last + 1 in whole:
                last += 1
            done.update(range(unit.layer, last + 1))
            yield f"layer {last}" if last == unit.layer else f"layers {unit.layer}-{last}"


def _candidates(candidates: Sequence[CandidateSummary], *, seconds: bool, post_validation: bool) -> Table:
    def pipeline(candidate: CandidateSummary) -> float:
        return (candidate.span if post_validation else candidate.makespan) or 0

    def step(candidate: CandidateSummary) -> float:
        return pipeline(candidate) if candidate.step_time is None else candidate.step_time

    table = titled_table("Planners")
    for column in ("planner", "schedule", "step", "pipeline", "gap", "peak memory"):
        table.add_column(column, justify="left" if column in ("planner", "schedule") else "right")
    for c in sorted((c for c in candidates if c.makespan is not None), key=step):
        table.add_row(
            c.planner,
            c.schedule or "",
            time_words(step(c), seconds=seconds),
            time_words(pipeline(c), seconds=seconds),
            "" if c.gap is None else f"{100 * c.gap:.1f}%",
            size_words(max(c.peak_memory)) if c.peak_memory else "",
        )
    return table


def _lines(title: str, words: Mapping[str, str]) -> Text:
    """A line for every planner that has something to say."""
    lines = [f"  {planner}: {said}" for planner, said in words.items()]
    return Text("\n".join([title, *lines, ""]) if lines else "")
