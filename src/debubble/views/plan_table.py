"""The terminal's view of a plan: its screen, and tables of degrees, stages, planners and the predicted step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from debubble.costs.devices.cluster import Cluster
from debubble.formatting import time_words
from debubble.ir import Kind
from debubble.ir.degrees import ConfigurationSummary
from debubble.ir.plan_entries import robust_words
from debubble.planners.analysis.nearest_plans import NearestPlan
from debubble.planners.analysis.remarks import OTHER_COSTS
from debubble.planners.analysis.what_if import what_if_lines
from debubble.planners.robustness import JITTER, LINKS, STRAGGLER
from debubble.plans import Plan
from debubble.views.memory_table import memory_table
from debubble.views.plan_screen import plan_screen
from debubble.views.rows import (
    cause_rows,
    configuration_rows,
    other_values_words,
    pareto_rows,
    partition_rows,
    planner_rows,
    target_rows,
)
from debubble.views.scene import Scene
from debubble.views.summary import bound_words, why_not_faster
from debubble.views.terminal import (
    bubble_table,
    device_table,
    headline,
    kind_table,
    remark_lines,
    rich_table,
    stage_table,
)

CHOICES_SHOWN = 3
"""Number of choices of degrees that are shown without details."""


def render(
    plan: Plan,
    scene: Scene,
    *,
    tokens: float | None = None,
    letter: str = "",
    details: bool = True,
    width: int = 80,
    nearest: Sequence[NearestPlan] = (),
    front: Sequence[ConfigurationSummary] = (),
) -> RenderableType:
    """Render a plan for the terminal: the answer on one screen, and tables.

    Args:
        plan: The plan.
        scene: Its prediction.
        letter: The label of one of two compared plans.
        tokens: Number of tokens to train on; None: days are not shown.
        details: Whether tables of stages, devices and planners follow.
        width: Characters of a line.
        nearest: The plans of all targets, if they were asked for.
        front: The Pareto front of time and memory, if it was asked for.
    """
    parts: list[RenderableType]
    if scene.why is None:
        parts = [Text(f"{letter}{scene.title}", style="bold"), Text(f"{headline(scene)}\n{_partition_words(plan)}")]
        parts += [Text("\n".join([bound_words(plan, scene, argument=details), *_judgement(plan, scene)]))]
    else:
        parts = [*plan_screen(plan, scene, scene.why, width=width, tokens=tokens, details=details)]
        parts[0] = Text(f"{letter}{parts[0]}", style="bold")
        parts += [Text(line) for line in _judgement(plan, scene)]
        if plan.what_ifs and not plan.what_ifs[0].quick:
            parts += [Text(line) for line in what_if_lines(plan, float(scene.step_time))]
    if OTHER_COSTS in scene.remarks:
        parts.insert(0, Text(OTHER_COSTS, style="bold red"))
    if plan.cut_off:
        parts.insert(1, Text(_cut_off(plan), style="bold red"))
    parts += remark_lines(replace(scene, remarks=tuple(said for said in scene.remarks if said != OTHER_COSTS)))
    if plan.degree_search is not None:
        parts.append(
            rich_table(configuration_rows(plan.degree_search, plan.cluster, limit=None if details else CHOICES_SHOWN))
        )
        if details and (words := other_values_words(plan.degree_search)):
            parts.append(Text(words + "\n"))
    if front:
        parts.append(rich_table(pareto_rows(front, plan.cluster)))
    if nearest:
        parts.append(rich_table(target_rows(nearest, float(scene.step_time))))
    if details:
        parts += _details(plan, scene)
    return Group(*parts)


def _details(plan: Plan, scene: Scene) -> list[RenderableType]:
    """Tables of step, memory, devices, stages and planners."""
    links = [] if plan.cluster is None or plan.profile is not None else [Text(_link_words(plan.cluster) + "\n")]
    return [
        Text(why_not_faster(scene) + "\n"),
        *links,
        *([] if scene.why is None else [rich_table(cause_rows(scene.why)), memory_table(scene)]),
        device_table(scene),
        bubble_table(scene),
        kind_table(scene),
        *_stages_and_planners(plan, scene),
    ]


def _link_words(cluster: Cluster) -> str:
    """A sentence on the bandwidths of the costs, and whether they are assumed."""
    slowest = cluster.slowest
    rates = {"link": slowest.link_bandwidth, "network": slowest.network_bandwidth, "host": slowest.host_bandwidth}
    among = f"within a node of {slowest.devices_per_node}", "between nodes", "to and from the host"
    known = {name: cluster.gives(f"{name}_bandwidth") for name in rates}
    mixed = any(known.values()) and not all(known.values())
    words = ", ".join(
        f"{rate / 1e9:.4g} GB/s {where}{' (assumed)' * (mixed and not known[name])}"
        for (name, rate), where in zip(rates.items(), among, strict=True)
    )
    whose = "from the cluster file" if all(known.values()) else "assumed: a cluster file says yours"
    return f"Bandwidth of each {cluster.device_word} and direction: {words}{'' if mixed else f' ({whose})'}."


def _stages_and_planners(plan: Plan, scene: Scene) -> list[RenderableType]:
    """Tables of the stages and of every planner's answer, with remarks and reasons of rejection."""
    parts: list[RenderableType] = [
        rich_table(partition_rows(plan)),
        *([stage_table(scene)] if plan.schedule.placement.chunks > 1 else []),
    ]
    if plan.candidates:
        parts += [
            rich_table(planner_rows(plan, seconds=scene.seconds)),
            _lines("Remarks", {c.planner: "; ".join(c.remarks) for c in plan.candidates if c.remarks}),
            _lines("Rejected", {c.planner: c.rejected for c in plan.candidates if c.rejected}),
        ]
    return parts


def _judgement(plan: Plan, scene: Scene) -> Iterator[str]:
    """Lines on the step under disturbances, if the plan was chosen by it."""
    judged, step = plan.robustness, float(scene.step_time)
    if judged is None:
        return
    expected, worst = (time_words(time, seconds=scene.seconds) for time in (judged.expected, judged.worst))
    shares = ", ".join(
        f"{100 * (time / step - 1):+.1f}% by {cause}"
        for cause, time in (
            (f"{100 * JITTER:.0f}% noise", judged.jitter),
            (f"one device {100 * STRAGGLER:.0f}% slower", judged.straggler),
            (f"links up to {1 + LINKS:g} times as slow", judged.links),
        )
    )
    yield (
        f"Disturbed: {expected} on average ({100 * (judged.expected / step - 1):+.1f}%), above {worst} one time in"
        f" twenty; {shares} ({judged.draws} draws)."
    )
    excess = plan.candidates[0].robust_excess
    if excess is not None:
        yield f"It is {robust_words(excess)}."


def _partition_words(plan: Plan) -> str:
    """A phrase on stages, units per stage, recomputation and offload."""
    lengths = sorted({len(stage) for stage in plan.partition})
    units = f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}"
    strategies = Counter(unit.strategy for stage in plan.partition for unit in stage)
    total = sum(strategies.values())
    recomputed = [f"{name} in {count} of {total}" for name, count in strategies.most_common() if name != "none"]
    recompute = f"recomputing {', '.join(recomputed)}" if recomputed else "no recomputation"
    if deeper := len(plan.schedule.deeper & plan.schedule.explicit_recompute):
        pairs = plan.schedule.stages * plan.schedule.micro_batches
        recompute += f", and deeper for {deeper} of {pairs} pairs of a stage and a micro-batch"
    offloaded = sum(op.kind is Kind.O for op in plan.schedule.operations)
    offload = f", {offloaded} activations offloaded" if offloaded else ""
    stages, stepped = len(plan.partition), len(plan.schedule.host_steps)
    if stepped:
        offload += (
            ", all optimizers on the host" if stepped == stages else f", {stepped} stages' optimizers on the host"
        )
    return f"{stages} stage{'s' * (stages != 1)} of {units} unit{'s' * (units != '1')}, {recompute}{offload}"


def _cut_off(plan: Plan) -> str:
    who = ", ".join(plan.cut_off)
    if plan.interrupted:
        return f"Interrupted: this is the best of what {who} had found."
    return f"The deadline cut off {who}, so that the plan depends on the machine: raise --deadline or lower --effort."


def _lines(title: str, words: Mapping[str, str]) -> Text:
    """A title and a line per planner; empty without planners."""
    lines = [f"  {planner}: {said}" for planner, said in words.items()]
    return Text("\n".join([title, *lines, ""]) if lines else "")
