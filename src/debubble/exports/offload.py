"""A plan's offload as a target's setting: modules of all layers alike."""

from __future__ import annotations

from debubble.exports.prices import partition_of, units_of
from debubble.ir import Plan
from debubble.models import Model
from debubble.targets import Target
from debubble.targets.offload import ModuleOffload
from debubble.targets.target import sparse_layers


def module_offload(plan: Plan, target: Target) -> ModuleOffload | None:
    """The target's setting that moves what a plan moves; None: it moves nothing, or the target cannot move that."""
    units, levers = units_of(plan), target.levers_of(plan.options)
    if units is None or levers is None or plan.model is None or not plan.schedule.offloaded:
        return None
    model = Model.from_hf(plan.model)
    if not levers.expresses(plan.partition, sparse_layers(model)):
        return None
    return levers.offload_of(plan.schedule, levers.kept(units, model, plan.options), partition_of(plan, units))
