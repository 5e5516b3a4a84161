"""Check of host memory before a run starts, and advice if a device runs out of memory."""

from __future__ import annotations

import os
from dataclasses import asdict

import torch

from debubble.costs.host_memory import offloaded_peaks
from debubble.errors import readable
from debubble.ir import DebubbleError, InfeasibleError, InputError
from debubble.planners.plan_model import plan as make_plan
from debubble.planners.registry import SLICED
from debubble.plans import Plan
from debubble.runtime.launch.failures import DeviceMemoryError


def check_host_memory(plan: Plan, *, offload_to_disk: bool = False) -> str | None:
    """Check that this machine's memory suffices for all ranks, before the OOM killer ends some of them.

    Offloaded activations are included, unless they go to disk; optimizer states on the host are not.

    Returns:
        A remark if the ranks run on this machine's CPU although the plan was made for other devices.

    Raises:
        InputError: If the ranks need more memory than the machine has.
    """
    gpus = torch.cuda.device_count()
    timeline, copies = plan.simulate(), plan.ranks // plan.devices
    offloaded = 0.0 if offload_to_disk else float(sum(offloaded_peaks(timeline))) * copies
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if gpus >= plan.ranks:
        if offloaded > memory:
            raise InputError(
                f"The plan offloads {readable(offloaded)} to the host, but this machine has {readable(memory)} of"
                " memory: offload to a fast disk with --offload-to, or train on a host that has more."
            )
        return None
    needed = float(sum(timeline.peak_memory)) * copies + offloaded
    if needed > memory:
        raise InputError(
            f"The plan's {plan.ranks} ranks need {readable(needed)} in all, but this machine has {gpus} GPUs and"
            f" {readable(memory)} of memory: train it where its devices are, or try its messages here with"
            " `debubble rehearse`."
        )
    meant = "CPU" if plan.cluster is None else str(plan.cluster.file["devices"])
    if "CPU" in meant:
        return None
    return f"The {plan.ranks} ranks were planned for {meant}, but run on this machine's CPU: it has {gpus} GPUs."


RETRY_MEMORY_SHARE = 0.9
"""Memory limit of the advised plan, as a fraction of the failed plan's peak."""
RETRY_EFFORT = 2.0
"""Search effort of the advised plan."""


class ShortageError(DebubbleError):
    """A device ran out of memory; the message has the predicted memory, and a plan that would fit."""


def explain_shortage(error: DeviceMemoryError, plan: Plan, *, memory: float) -> ShortageError:
    """Explain the error and advise a plan that fits.

    Args:
        error: The shortage.
        plan: The plan that ran.
        memory: Bytes in use on the device at the failure.
    """
    predicted = predicted_at(error, plan)
    return ShortageError(
        f"{error}  It held {readable(memory)} of parameters, states and activations; the plan has {readable(predicted)}"
        f" there.  {_advice(plan, beyond=max(0.0, memory - predicted))}"
    )


def predicted_at(error: DeviceMemoryError, plan: Plan) -> float:
    """Planned bytes on the device at the operation's start, including its allocation."""
    timeline = plan.simulate()
    start = timeline.by_name[error.operation].start
    return float([memory for time, memory in timeline.memory[error.device] if time <= start][-1])


def _advice(plan: Plan, *, beyond: float) -> str:
    """Advise a plan with a tenth less memory, and `beyond` bytes less still, the excess over the prediction."""
    described = plan.model_on_cluster
    if described is None:
        return "Plan again with a lower memory limit."
    timeline = plan.simulate()
    planner = SLICED if plan.schedule.slices > 1 else "portfolio"
    limit = max(1, int(RETRY_MEMORY_SHARE * float(max(timeline.peak_memory)) - beyond))
    try:
        alternative = make_plan(
            *described, micro_batches=plan.micro_batches, planner=planner, pipeline=plan.devices,
            memory_limit=limit, effort=RETRY_EFFORT, profile=plan.profile, **asdict(plan.options),
        )  # fmt: skip
    except InfeasibleError:
        return (
            f"No plan on these devices takes less than {readable(limit)}: use more devices, smaller micro-batches, or"
            " shorter sequences."
        )
    slower = float(alternative.simulate().makespan / timeline.makespan)
    return (
        f"Plan again with --memory-limit {limit}: {alternative.schedule.name} with recomputation"
        f" {' | '.join(sorted(set(alternative.recompute)))} then fits, at {slower:.2f} times the predicted step."
    )
