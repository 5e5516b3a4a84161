"""Plans of other targets for a plan's job: what running the model in each framework costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from debubble.costs.calibration import corrections
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
    """Seconds of a step; None: the target has no plan."""
    schedule: str | None = None
    reason: str | None = None
    """Why the target has no plan."""


def plan_runs_in(plan: Plan) -> tuple[str, ...]:
    """Names of the targets that run a plan unchanged; empty for abstract costs."""
    described = plan.model_on_cluster
    if described is None:
        return ()
    units = None
    if plan.schedule.offloaded:
        units = half_layers(*described, plan.options, pipeline=plan.devices, profile=plan.profile)
    device = described.cluster.slowest.name
    able = runs_in(plan.schedule, plan.partition, plan.options, described.model, units=units)
    names = tuple(name for name in able if name == plan.target or targets[name].runs_on(device))
    o = plan.options
    # The plan's framework gathers parameters per unit, debubble's runtime per stage.
    unit_by_unit = o.zero > 2 and o.data * o.context > 1 and not plan.costs.gathers
    if unit_by_unit or plan.schedule.host_steps & sharing_stages(described.model, plan.schedule.placement):
        return tuple(name for name in names if name != "debubble")
    return names


def quick_nearest(plan: Plan) -> Mapping[str, float]:
    """Ratios of quick plans' steps to the plan's, by target that does not run the plan; `--for` may find better plans.

    Quick plans are priced with the target's kernels, unless the plan names a framework; targets without kernels, such
    as torch, and without a quick plan are left out.  Empty for abstract costs, with a profile, and for large pipelines.
    """
    large = plan.devices * plan.micro_batches > MAX_QUICK_PAIRS
    described = plan.model_on_cluster
    if described is None or plan.profile is not None or large:
        return {}

    def step(target: str) -> float | None:
        options = replace(plan.options, framework=plan.options.framework or targets[target].framework)
        try:
            problem = problem_of(
                *described, options, micro_batches=plan.micro_batches, pipeline=plan.devices, target=target
            )
            return quick_step(problem)[0] / corrections(*described, options)[0].factor
        except DebubbleError:
            return None

    as_it_is = plan_runs_in(plan)
    able = [name for name in targets if targets[name].runs_on(described.cluster.slowest.name)]
    able = [name for name in able if targets[name].framework or targets[name].levers is None]
    quick = {name: step(name) for name in able if name not in as_it_is}
    # Runs of one framework that a cluster file has correct the plan of that framework alone.
    planned = seconds_per_step(plan) / corrections(*described, plan.options)[0].factor
    return {name: taken / planned for name, taken in quick.items() if taken is not None}


def nearest_plans(plan: Plan, plan_for: Callable[[str], Plan]) -> tuple[NearestPlan, ...]:
    """The fastest plan of every target, fastest first; it is the plan itself if the target runs it at the same cost.

    `plan_for` plans the same job for a target by name.
    """
    as_it_is = plan_runs_in(plan)
    unchanged = [name for name in as_it_is if targets[name].framework == plan.options.framework]
    plans = [_nearest(name, plan if name in unchanged else None, plan_for) for name in targets]
    return tuple(sorted(plans, key=lambda nearest: (nearest.step_time is None, nearest.step_time)))


def _nearest(name: str, plan: Plan | None, plan_for: Callable[[str], Plan]) -> NearestPlan:
    try:
        plan = plan_for(name) if plan is None else plan
    except DebubbleError as error:
        return NearestPlan(target=name, step_time=None, reason=str(error))
    return NearestPlan(target=name, step_time=seconds_per_step(plan), schedule=plan.schedule.name)
