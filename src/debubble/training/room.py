"""Whether this machine can hold the ranks of a plan, which was made for other devices, perhaps."""

from __future__ import annotations

import os

import torch

from debubble.ir import InputError, Plan
from debubble.ir.errors import readable


def check_room(plan: Plan) -> None:
    """Raise InputError if the ranks would share this machine's memory, for want of GPUs, and need more than it has.

    Else the operating system would kill whatever it chooses.
    """
    gpus = torch.cuda.device_count()
    if gpus >= plan.ranks:
        return
    needed = float(sum(plan.simulate().peak_memory)) * plan.options.tensor * plan.options.data
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        raise InputError(
            f"The plan's {plan.ranks} ranks need {readable(needed)} in all, but this machine has {gpus} GPUs and"
            f" {readable(memory)} of memory: train it where its devices are, or try its messages here with"
            " `debubble rehearse`."
        )
