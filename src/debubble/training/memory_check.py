"""Refuses to start if host memory cannot hold all ranks, and advises when a device runs out of its own."""

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
    """Refuse to start if this machine cannot hold all ranks, before the operating system kills what it chooses.

    Offloaded activations count, unless they go to disk; the optimizer states of the host do not.

    Returns:
        A remark if the ranks run on this machine's CPU although the plan was made for other devices.

    Raises:
        InputError: The ranks need more memory than the machine has.
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
"""Share of the failed plan's memory that a plan which is to fit may take."""
RETRY_EFFORT = 2.0
"""Seconds that such a plan is searched."""


class ShortageError(DebubbleError):
    """A device ran out of memory; the sentences say what was predicted there, and which plan would fit."""


def explain_shortage(error: DeviceMemoryError, plan: Plan, *, memory: float) -> ShortageError:
    """Explain the error and advise a plan that fits.

    Args:
        error: The shortage.
        plan: The plan that ran.
        memory: Bytes that the device held when it happened.
    """
    predicted = predicted_at(error, plan)
    return ShortageError(
        f"{error}  It held {readable(memory)} of parameters, states and activations; the plan has {readable(predicted)}"
        f" there.  {_advice(plan, beyond=max(0.0, memory - predicted))}"
    )


def predicted_at(error: DeviceMemoryError, plan: Plan) -> float:
    """Bytes that the plan has on the device when the operation starts, with what it allocates."""
    timeline = plan.simulate()
    start = timeline.by_name[error.operation].start
    return float([memory for at, memory in timeline.memory[error.device] if at <= start][-1])


def _advice(plan: Plan, *, beyond: float) -> str:
    """A plan that takes a tenth less, and as much less as this one took too much."""
    described = plan.model_on_cluster
    if described is None:
        return "Plan again with a lower memory limit."
    timeline = plan.simulate()
    planner = SLICED if plan.schedule.slices > 1 else "portfolio"
    limit = max(1, int(RETRY_MEMORY_SHARE * float(max(timeline.peak_memory)) - beyond))
    try:
        found = make_plan(
            *described, micro_batches=plan.micro_batches, planner=planner, pipeline=plan.devices,
            memory_limit=limit, effort=RETRY_EFFORT, profile=plan.profile, **asdict(plan.options),
        )  # fmt: skip
    except InfeasibleError:
        return (
            f"No plan on these devices takes less than {readable(limit)}: use more devices, smaller micro-batches, or"
            " shorter sequences."
        )
    slower = float(found.simulate().makespan / timeline.makespan)
    return (
        f"Plan again with --memory-limit {limit}: {found.schedule.name} with recomputation"
        f" {' | '.join(sorted(set(found.recompute)))} then fits, at {slower:.2f} times the predicted step."
    )
