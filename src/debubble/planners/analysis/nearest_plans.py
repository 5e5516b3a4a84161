"""The plan for every target that is nearest to a plan: what running the model there costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from debubble.ir import DebubbleError
from debubble.models.runtime_limits import sharing_stages
from debubble.planners.degrees.estimate import MAX_QUICK_PAIRS, quick_step
from debubble.planners.model_problem import half_layers, problem_of
from debubble.planners.plan_step import seconds_per_step
from debubble.plans import Plan
from debubble.targets.target import runs_in, targets


@dataclass(frozen=True, kw_only=True)
class NearestPlan:
    """The nearest plan that a target runs, for the same input."""

    target: str
    step_time: float | None
    """Seconds of a step; None: it has no plan."""
    schedule: str | None = None
    reason: str | None = None
    """The reason why it has no plan."""


def plan_runs_in(plan: Plan) -> tuple[str, ...]:
    """Names of the targets that run a plan as it is; none for a plan of abstract costs."""
    described = plan.model_on_cluster
    if described is None:
        return ()
    units = None
    if plan.schedule.offloaded:
        units = half_layers(*described, plan.options, pipeline=plan.devices, profile=plan.profile)
    device = described.cluster.slowest.name
    able = runs_in(plan.schedule, plan.partition, plan.options, described.model, units=units)
    found = tuple(name for name in able if name == plan.target or targets[name].runs_on(device))
    o = plan.options
    # Its framework gathers parameters unit by unit; debubble's runtime does so stage by stage.
    unit_by_unit = o.zero > 2 and o.data * o.context > 1 and not plan.costs.gathers
    if unit_by_unit or plan.schedule.host_steps & sharing_stages(described.model, plan.schedule.placement):
        return tuple(name for name in found if name != "debubble")
    return found


def quick_nearest(plan: Plan) -> Mapping[str, float]:
    """Ratio of a quick plan's step to the plan's, for every target that does not run the plan; `--for` may find better.

    Each has its own kernels, unless the plan names a framework: those without any, as torch, are left out.  Only of
    targets that have a quick plan; nothing for abstract costs, with a profile, or for large pipelines.
    """
    large = plan.devices * plan.micro_batches > MAX_QUICK_PAIRS
    described = plan.model_on_cluster
    if described is None or plan.profile is not None or large:
        return {}

    def step(target: str) -> float | None:
        named = plan.options.framework or targets[target].framework
        try:
            problem = problem_of(
                *described,
                replace(plan.options, framework=named),
                micro_batches=plan.micro_batches,
                pipeline=plan.devices,
                target=target,
            )
            return quick_step(problem)[0]
        except DebubbleError:
            return None

    as_it_is = plan_runs_in(plan)
    able = [name for name in targets if targets[name].runs_on(described.cluster.slowest.name)]
    able = [name for name in able if targets[name].framework or targets[name].levers is None]
    quick = {name: step(name) for name in able if name not in as_it_is}
    planned = seconds_per_step(plan)
    return {name: taken / planned for name, taken in quick.items() if taken is not None}


def nearest_plans(plan: Plan, again: Callable[[str], Plan]) -> tuple[NearestPlan, ...]:
    """The fastest plan of every target, fastest first: the plan itself where the target runs it at the same price.

    `again` makes the plan of the same input for a target, by its name.
    """
    as_it_is = plan_runs_in(plan)
    own = [name for name in as_it_is if targets[name].framework == plan.options.framework]
    found = [_nearest(name, plan if name in own else None, again) for name in targets]
    return tuple(sorted(found, key=lambda each: (each.step_time is None, each.step_time)))


def _nearest(name: str, plan: Plan | None, again: Callable[[str], Plan]) -> NearestPlan:
    try:
        plan = again(name) if plan is None else plan
    except DebubbleError as error:
        return NearestPlan(target=name, step_time=None, reason=str(error))
    return NearestPlan(target=name, step_time=seconds_per_step(plan), schedule=plan.schedule.name)
