"""The input of the list scheduler: stages as rows of numbers, their devices and links, and a policy's entries."""

from __future__ import annotations

from typing import NamedTuple

from debubble.ir.arrays import Floats, Ints

F, I, W, O, L, R, D, P = range(8)  # noqa: E741 - the field's letters

COLUMNS = 19
(
    FORWARD, INPUT, WEIGHT, SEND, KEPT, WORKSPACE, FREED, AFTER, MOVED, TRANSFER, LOAD, DRAIN, STEP, AGAIN, DROPPED,
    HOSTED, OUT_LEAD, BACK_LEAD, AGAIN_LEAD,
) = range(COLUMNS)  # fmt: skip
"""Columns of the table of stages: times of F, I and W, without recomputation; time of a message to the next stage;
bytes that F leaves, that I allocates, that I frees and that W frees; bytes that O moves, and the time it takes; times
in which parameters come from the host, gradients go there, and the optimizer steps there, 0 where the optimizer's
states are on the device; time of the recomputation, and the bytes that R brings back where it is an operation of its
own; 1 where the optimizer's states are on the host; how long before the end of F its offload may start, and before that
of the reload the I that recomputes nothing before, or an R."""

BACKLOG, WAIT_LIMIT, HORIZON, PREFETCH, AGE, AHEAD, BACKWARDS = range(7)
"""Entries of a policy: weight gradients that a device lets wait at most; the part of a weight gradient's time by which
it may delay what is known to come; operations of a micro-batch before a backward at which its reload may start; reloads
that a device may have under way; the periods that a micro-batch's age counts for against its depth among forwards;
micro-batches that a device may have recomputed before their gradients come; which backwards come first (BY_AGE if it
is missing)."""
BY_AGE, HOSTS_FIRST, BY_STAGE, BY_DEEP_STAGE = range(4)
"""Which backwards come first: those of the oldest micro-batch; those of stages whose hosts step, as hosts begin sooner
then, while the others wait for forwards; those of the deepest stage, of all its micro-batches, after forwards; the
same, but those of the deepest two stages of every device come before forwards."""
DEEP = 2
"""Stages of every device that BY_DEEP_STAGE takes before forwards."""


class StageTable(NamedTuple):
    """A partition as the scheduler sees it.

    Attributes:
        stages: A row per stage, with the columns above; times in the units' unit, sizes in bytes.
        device_of: Per stage, its device.
        capacity: Per device, bytes for activations.
        down: Per device, the number of the link's lane to the host, less than twice the number of devices.
        up: Per device, that of its lane from the host; the same as `down` where the link is half-duplex.
        host: Per device, bytes of its host for activations.
    """

    stages: Floats
    device_of: Ints
    capacity: Floats
    down: Ints
    up: Ints
    host: Floats
