"""Whether this machine can hold the ranks of a plan, and what they offload: it was made for other devices, perhaps."""

from __future__ import annotations

import itertools
import os

import torch

from debubble.errors import readable
from debubble.ir import InputError, Kind, Number, Plan
from debubble.simulator import Timeline


def check_room(plan: Plan, *, offload_to_disk: bool = False) -> str | None:
    """What to know of where the ranks run: on this machine's CPU, although the plan was made for other devices.

    Raises InputError if they need more of this machine's memory than it has, before the operating system kills what it
    chooses.  Offloaded activations count, unless they go to disk; the optimizer states of the host do not.
    """
    gpus = torch.cuda.device_count()
    timeline, copies = plan.simulate(), plan.options.tensor * plan.options.data
    offloaded = 0.0 if offload_to_disk else float(sum(peak_offloaded(timeline))) * copies
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
    meant = str((plan.cluster or {}).get("devices", "CPU"))
    if "CPU" in meant:
        return None
    return f"The {plan.ranks} ranks were planned for {meant}, but run on this machine's CPU: it has {gpus} GPUs."


def peak_offloaded(timeline: Timeline) -> list[Number]:
    """Most bytes of activations that each device has in the host's memory at a time."""
    schedule, costs = timeline.program.schedule, timeline.program.costs
    changes: list[list[tuple[Number, Number]]] = [[] for _ in range(schedule.devices)]
    for operation in timeline.operations:
        kind, stage, j = operation.op
        if kind in (Kind.O, Kind.L) and operation.device not in schedule.peers:
            moved = schedule.moved(costs, stage, j) * costs.scale_of(j)
            # A buffer is there from the start of O to the end of L.
            changes[operation.device].append((operation.start, moved) if kind is Kind.O else (operation.end, -moved))
    return [max(itertools.accumulate((size for _, size in sorted(of)), initial=0)) for of in changes]
