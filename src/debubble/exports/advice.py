"""Advice to the user of a plan that a target refuses."""

from __future__ import annotations

from debubble.ir import Plan

_EVEN = ("megatron-even", "merak", "dapple", "dapple+")
"""Planners that cut the model into equal runs of units."""


def again(plan: Plan) -> str:
    """Names the fastest planner that was asked for this plan and is certain to have given whole layers under 1F1B.

    A plan keeps neither partition nor order of the other planners' answers.  Certain are those that cut evenly, with
    one stage per device, where the devices divide the layers.
    """
    layers = {unit.layer for units in plan.partition for unit in units if unit.type in ("attention", "mlp", "layer")}
    answers = {
        candidate.makespan: candidate.planner
        for candidate in plan.candidates
        if candidate.planner in _EVEN and candidate.schedule == "1f1b" and candidate.makespan is not None
    }
    if not answers or not layers or len(layers) % plan.devices:
        divides = f" on pipeline devices that divide the {len(layers)} layers" if layers else ""
        return (
            "no planner that was asked for it is known to have found a 1F1B of whole layers that fits; plan again with"
            f" --planner dapple+{divides}, which keeps least, and more memory or a larger --tensor degree if that does"
            " not fit"
        )
    time = min(answers)
    return (
        f"plan again with --planner {answers[time]}, which was asked for it too: its 1F1B of whole layers is predicted"
        f" to take {time:.4g}{' s' if plan.model else ''}, where this plan takes {float(plan.simulate().makespan):.4g}"
    )
