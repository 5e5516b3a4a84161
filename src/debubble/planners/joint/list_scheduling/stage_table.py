"""The input of the list scheduler: the cost table of the stages, their devices and links, and the policy entries."""

from __future__ import annotations

from typing import NamedTuple

from debubble.ir.arrays import Floats, Ints

F, I, W, O, L, R, D, P = range(8)  # noqa: E741 - the field's letters

COLUMNS = 20
(
    FORWARD, INPUT, WEIGHT, SEND, RETAINED, WORKSPACE, FREED_BY_I, FREED_BY_W, OFFLOADED, TRANSFER, LOAD, DRAIN, STEP,
    RECOMPUTE, DROPPED, HOSTED, OFFLOAD_LEAD, RELOAD_LEAD, RECOMPUTE_LEAD, GATHER,
) = range(COLUMNS)  # fmt: skip
"""Columns of the table of stages: times of F, I and W without recomputation; time of a message to the next stage; bytes
that F retains, that I allocates, that I frees and that W frees; bytes and time of an offload O; times of the parameter
load, the gradient drain and the optimizer step on the host, 0 if the optimizer is on the device; time of the
recomputation, and bytes allocated by a separate R; 1 if the optimizer is on the host; how long before the end of F the
offload may start, and before the end of the reload an I without recomputation, or an R; time to gather the sharded
parameters (ZeRO-3)."""

BACKLOG, WAIT_LIMIT, HORIZON, PREFETCH, AGE, AHEAD, BACKWARDS = range(7)
"""Entries of a policy: limit on delayed weight gradients per device; fraction of a W's time by which it may delay an
operation known to become ready; number of operations before a micro-batch's backward at which its reload may start;
limit on reloads in flight per device; weight, in periods, of a micro-batch's age against its depth among forwards;
limit on micro-batches per device recomputed ahead of their gradients; priority among backwards (default BY_AGE)."""
BY_AGE, HOSTS_FIRST, BY_STAGE, BY_DEEP_STAGE = range(4)
"""Priorities among backwards: the oldest micro-batch first; stages with host steps first, so that hosts begin early,
and the others after forwards; the deepest stage first for all micro-batches, after forwards; the same, but the deepest
two stages of every device come before forwards."""
DEEP_STAGES = 2
"""Stages per device whose backwards BY_DEEP_STAGE runs before forwards."""


class StageTable(NamedTuple):
    """The scheduler's view of a partition.

    Attributes:
        stages: A row per stage, with the columns above; times in the units' time unit, sizes in bytes.
        device_of: Device of each stage.
        capacity: Bytes for activations per device.
        down: Per device, the index of its link lane to the host, less than twice the number of devices.
        up: Per device, the index of its lane from the host; equal to `down` if the link is half-duplex.
        host: Bytes of host memory for activations per device.
    """

    stages: Floats
    device_of: Ints
    capacity: Floats
    down: Ints
    up: Ints
    host: Floats
