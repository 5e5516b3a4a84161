"""Whether this machine can hold the ranks of a plan, which was made for other devices, perhaps."""

from __future__ import annotations

import os

import torch

from debubble.ir import InputError, Plan
from debubble.ir.errors import readable


def check_room(plan: Plan) -> str | None:
    """What to know of where the ranks run: on this machine's CPU, although the plan was made for other devices.

    Raises InputError if they need more memory there than it has, before the operating system kills what it chooses.
    """
    gpus = torch.cuda.device_count()
    if gpus >= plan.ranks:
        return None
    needed = float(sum(plan.simulate().peak_memory)) * plan.options.tensor * plan.options.data
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
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
