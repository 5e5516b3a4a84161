"""The JSON output of `debubble plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.costs.accuracy import Accuracy
from debubble.ir import WhatIf
from debubble.ir.degrees import ConfigurationSummary, DegreeSearch
from debubble.planners.analysis.explanation import Explanation
from debubble.planners.analysis.likely_fit import plan_accuracy
from debubble.planners.analysis.nearest_plans import NearestPlan, plan_runs_in
from debubble.plans import Plan
from debubble.views import Scene


def plan_dict(
    plan: Plan,
    scene: Scene,
    *,
    tokens: float | None = None,
    nearest: Sequence[NearestPlan] = (),
    front: Sequence[ConfigurationSummary] = (),
) -> dict[str, Any]:
    """The keys of `answers.PlanFigures`.

    Args:
        plan: The plan.
        scene: Its prediction.
        tokens: Number of tokens to train on; None: days are left out.
        nearest: The plans of all targets, if requested.
        front: The Pareto front of time and memory, if requested.
    """
    timeline, step_time = scene.timeline, scene.step_time
    why = scene.why
    return {
        "planner": plan.planner,
        "schedule": plan.schedule.name,
        "devices": plan.devices,
        "chunks": plan.schedule.placement.chunks,
        "micro_batches": plan.micro_batches,
        "step_time": step_time,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "lower_bound": plan.lower_bound,
        "bound_argument": plan.bound_argument,
        "gap": plan.gap_at(step_time),
        "peak_memory": timeline.peak_memory,
        "peak_times": scene.peak_times,
        "fullest": scene.fullest,
        "partition": plan.partition,
        "recompute": plan.recompute,
        "solve_seconds": plan.solve_seconds,
        "cut_off": plan.cut_off,
        "interrupted": plan.interrupted,
        "target": plan.target,
        "runs_in": plan_runs_in(plan),
        **({} if plan.robustness is None else {"robustness": plan.robustness}),
        "candidates": plan.candidates,
        "remarks": scene.remarks,
        **({} if why is None else _accuracy_dict(plan, scene)),
        **explanation_dict(scene),
        **({} if why is None or tokens is None else {"days": why.days(tokens)}),
        **_what_if_dict(plan.what_ifs),
        **({} if why is None else {"advice": [_change(what_if) for what_if in plan.what_ifs if not what_if.lever]}),
        **_configurations_dict(plan.degree_search, why),
        **({"pareto": front} if front else {}),
        **({"targets": nearest} if nearest else {}),
    }


def _accuracy_dict(plan: Plan, scene: Scene) -> dict[str, dict[str, Accuracy]]:
    """The accuracy and intervals of step and memory; empty for measured costs."""
    step, memory = plan_accuracy("step", plan), plan_accuracy("memory", plan)
    if step is None or memory is None:
        return {}
    peak = max(map(float, scene.peak_memory))
    return {"accuracy": {"step": step.scaled_to(float(scene.step_time)), "memory": memory.scaled_to(peak)}}


def _what_if_dict(changes: Sequence[WhatIf]) -> dict[str, Any]:
    """The quick changes, or the changes that remove a lever."""
    if not changes:
        return {}
    if changes[0].quick:
        return {"quick_advice": [_change(change) for change in changes]}
    return {"levers": [_change(change) for change in changes if change.lever]}


def _change(change: WhatIf) -> dict[str, Any]:
    figures = {key: getattr(change, key) for key in ("change", "step_time", "seconds_per_sequence")}
    return {**figures, "fits": change.step_time is not None}


def explanation_dict(scene: Scene) -> dict[str, Any]:
    """The entries of a model's plan; empty for other scenes."""
    why = scene.why
    if why is None:
        return {}
    return {
        "degrees": why.plan.degrees,
        "tokens_per_second": why.tokens_per_second,
        "tokens_per_second_per_device": why.tokens_per_second_per_device,
        "mfu": why.mfu,
        "memory": why.memory,
        "fragmentation": why.fragmentation,
        "reserve": why.reserve,
        "host_memory": why.host_memory,
        "why": why.causes,
        "binds": why.binding,
    }


def _configurations_dict(search: DegreeSearch | None, why: Explanation | None) -> dict[str, Any]:
    """The best choices of degrees, the plan's first, and counts of the search if there was one."""
    if search is not None:
        reported = ("configurations", "fastest", "usual", "tolerance", "other_values")
        counts = {key: value for key, value in vars(search).items() if key not in reported}
        faster = {} if search.fastest is None else {"fastest": search.fastest}
        return {
            "configurations": search.configurations, **faster, "usual": search.usual,
            "other_values": search.other_values, "search": counts,
        }  # fmt: skip
    return {} if why is None else {"configurations": [why.configuration]}
