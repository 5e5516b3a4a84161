"""Reduction of a plan to the operations and the ZeRO level of a target, and the price of it."""

from __future__ import annotations

from dataclasses import replace

from debubble.exports.layers import again
from debubble.exports.prices import slowdown, with_options
from debubble.ir import ExportError, Kind, OutOfMemoryError, Plan
from debubble.targets import Target
from debubble.targets.orders import own_order, without_transfers


def compute_only(plan: Plan, *, target: Target, offloads: bool) -> tuple[Plan, tuple[str, ...]]:
    """The plan without offload, with recomputation in the backward, and one optimizer step at the end; what is lost.

    Where the target `offloads` as the plan does, the plan keeps that.

    All optimizer states stay on the devices, divided as the target's nearest ZeRO level does it.  Raises ExportError if
    the plan then no longer fits in memory, or if its costs cannot say whether it does.
    """
    if offloads:
        return plan, ()
    reduced = replace(plan, schedule=without_transfers(plan.schedule))
    losses = _schedule_losses(plan)
    needed = ["offload"] if plan.schedule.offloaded else []
    zero = target.nearest_zero(plan.options.zero, pipeline=plan.devices)
    if plan.schedule.host_steps or plan.options.zero != zero:
        sentence, need = _states(plan, target=target.title, zero=zero)
        losses.append(sentence)
        needed.append(need)
        on_devices = with_options(plan, replace(plan.options, zero=zero))
        if on_devices is None:
            raise ExportError(
                f"{target.title} cannot run this plan, whose memory depends on {need}; its costs do not say what it"
                f" needs without: {again(plan, target.title)}."
            )
        reduced = replace(reduced, costs=on_devices.costs, options=on_devices.options)
    if not losses:
        return reduced, ()
    try:
        losses.append(f"With that {slowdown(reduced, plan)}.")
    except OutOfMemoryError as error:
        needs = " and ".join(needed) or "when it recomputes"
        raise ExportError(
            f"{target.title} cannot run this plan, whose memory depends on {needs}: {error}  To avoid that,"
            f" {again(plan, target.title)}."
        ) from error
    return reduced, tuple(losses)


def _schedule_losses(plan: Plan) -> list[str]:
    s = plan.schedule
    losses: list[str] = []
    if s.offloaded:
        where = " to other devices" if s.peers else ""
        losses.append(
            f"Offload: all activations stay on their devices, also the {len(s.offloaded)} to be moved{where}."
        )
    if s.explicit_recompute:
        losses.append("Recomputation that the plan places in bubbles happens right before the backward.")
    if any(share != 1 for share in s.recompute_fraction.values()):
        losses.append("Stages of which the plan recomputes a share recompute all that they can.")
    if any(op.kind in (Kind.S, Kind.G) and op.stage not in s.host_steps for op in s.operations):
        losses.append("Optimizer steps and gradient reductions among the micro-batches move to the end of the step.")
    if s.asynchronous and plan.costs.communication_model == "blocking":
        losses.append("Messages that the plan lets overlap compute are as the target's own: counted as blocking.")
    return losses


def _states(plan: Plan, *, target: str, zero: int) -> tuple[str, str]:
    """A sentence on the states that cannot be kept as planned, and the name of what is missing."""
    if plan.schedule.host_steps:
        stages = ", ".join(map(str, sorted(plan.schedule.host_steps)))
        return (
            f"The optimizer states of stages {stages} stay on the devices: debubble writes no optimizer offload by"
            f" stages for {target}.",
            "optimizer states on the host",
        )
    where = "over" if plan.devices > 1 else "without"
    memory = "more memory than planned, but fits" if zero < plan.options.zero else "less memory than planned"
    return (
        f"{target} divides model states as ZeRO-{zero} {where} a pipeline, not as ZeRO-{plan.options.zero}, which takes"
        f" {memory}.",
        f"ZeRO-{plan.options.zero}",
    )


def require_order(plan: Plan, *, target: str, names: tuple[str, ...]) -> str:
    """Find which of the library's schedules this order is.  Raises ExportError if it is none of `names`."""
    name = own_order(without_transfers(plan.schedule), names)
    if name is not None:
        return name
    raise ExportError(
        f"{target} runs its own {' or '.join(names)} order, and this plan's '{plan.schedule.name}' is another; export"
        f" it to torch, which takes any order, or {again(plan, target)}."
    )
