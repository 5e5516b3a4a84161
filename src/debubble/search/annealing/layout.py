"""The kernel's memory layout.

An operation is a number: `(kind * stages + stage) * micro_batches + micro_batch`, with the kinds in the order of KINDS.
All tables are in two blocks, one of floats and one of integers, and a KernelLayout holds the offset of each: compiled
functions pass three arguments instead of thirty arrays whose references have to be counted.

The kernel stores four numbers per operation, its facts:

| fact | meaning |
| --- | --- |
| NEEDED | index into the floats: arrival of its input |
| RELOADED | index into the floats: end of its activation's reload |
| SENT | index into the floats: where to write the arrival of its message |
| ROW | row in the cost tables |
"""

from __future__ import annotations

from typing import NamedTuple

from debubble.ir import Kind

KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.R, Kind.O, Kind.L)
F, I, W, B, R, DEEPER, O, L = range(8)  # noqa: E741 - the order of KINDS
"""The kernel's kinds; an R by the deeper level of its stage is a separate kind."""
KIND_INDEX = {kind: KINDS.index(kind) for kind in KINDS}
COUNT = len(KINDS)
MARKS = 25
"""Maximum number of marks, snapshots of all devices, per evaluation; the first one is of its start."""
SNAPSHOT_INTERVAL = 32
"""With link groups, distance in a list between two positions at which the state of memory is stored."""
NEEDED, RELOADED, SENT, ROW = range(4)
"""Indices of an operation's facts, as in the table above."""

Shares = tuple[int, int, int, int, int, int]
"""Cumulative percentages of moves that toggle offloads, hand one to the next micro-batch, toggle recomputations, or
shift one operation, a run of micro-batches or those of neighboring stages; the remaining moves exchange two operations.
If a move is not allowed, the next kind takes its share."""
FROM_SCRATCH: Shares = (22, 28, 38, 60, 80, 100)
FROM_A_PLAN: Shares = (8, 10, 35, 60, 85, 100)
"""Shares for a start with well-chosen offloads: on a plan of `joint` all other moves gained ten times as much."""


class KernelLayout(NamedTuple):
    """Sizes, flags, and the offset of each table; `op` stands for an operation's number, `d` for a device."""

    stages: int
    micro_batches: int
    devices: int
    exclusive: int
    half_duplex: int
    span: int
    grain: int
    """Operations per row of the cost tables: all micro-batches of a stage if they are equal, else one."""
    max_offloads: int
    """Maximum number of offloads of a device."""
    time_count: int
    """Number of ends and arrivals, including the three placeholders."""
    cause_count: int
    """Number of causes and queue entries."""
    device_floats: int
    """Number of floats in the state of all devices."""
    device_ints: int
    """Number of integers in that state."""
    by_arrival: int
    """1 if devices share host links, which serve transfers in the order in which they become ready."""
    has_host_steps: int
    """1 if the optimizers of some stages step on the host."""
    levels: int
    """Number of levels by which an R may recompute."""
    # In the block of floats.
    time: int
    """[R in list, row]"""
    allocated: int
    """[R in list, row]"""
    freed: int
    """[R in list, row]"""
    lead: int
    """[R in list, row]: how long before the end of its F an O may start, and before the end of its L a B, I or R."""
    message: int
    """[R in list, row]: time of the message after F, I, B; negative if the consumer is on the same device."""
    tail: int
    """[R in list, row]: lower bound on the time from its end to the end of the step."""
    after_weights: int
    """[stage]: time from the last weight gradient to the end of the step on the host, on a free link; 0 without one."""
    gradients: int
    """[stage]: time to send the gradients to the host."""
    host_step: int
    """[stage]: time of the optimizer step on the host."""
    parameters_loaded: int
    """[stage]: when its parameters have been loaded from the host, before its first forward."""
    static: int
    """[d]"""
    limit: int
    """[d], infinite without a limit."""
    end: int
    """[op]: negative until known."""
    arrival: int
    """[direction, pair]: arrival of its message; negative until known."""
    zero: int
    """Holds 0: the arrival for operations that need no message."""
    never: int
    """Holds -1: the end of the reload for operations that need none."""
    discarded: int
    """Receives the arrivals of operations that send no message; never read."""
    reserved: int
    """[d]: reserved bytes by static admission."""
    last_freed: int
    """[d]: bytes that the last compute operation frees at its end."""
    spent: int
    """[d]: compute time so far."""
    first_start: int
    """[d]: start of the first compute operation."""
    compute_start: int
    """[d]: start of the last compute operation."""
    compute_end: int
    """[d]: end of the last compute operation."""
    counted_bytes: int
    """[d]: bytes freed by the queued offloads from `oldest` to `unclaimed`."""
    link: int
    """[d, d]: end of the last message, if messages are exclusive."""
    last_ready: int
    """[direction, lane], with link groups: when the last served transfer became ready."""
    work: int
    """[d]: compute time of the full list."""
    ready: int
    """[d, lane], with link groups: when the lane's next transfer requests the link; infinite if not known."""
    device_sent: int
    """[d]: end of its last transfer to the host."""
    link_free: int
    """[lane]: end of the link's last transfer to the host."""
    host_free: int
    """[d]: end of the last optimizer step on its host."""
    step_end: int
    """[stage]: end of its optimizer step on the host; negative without one."""
    snapshot_floats: int
    """[d, position / SNAPSHOT_INTERVAL], with link groups: admission's reserved and freed bytes before the position."""
    # In the block of integers.
    device_of: int
    """[stage]"""
    lane: int
    """[d]: its host link's lane, which a link group shares."""
    peer: int
    """[d]: the next device that shares its host link, -1 after the last."""
    cause: int
    """[op]: the operation whose start or end determined its start, -1 for none."""
    facts: int
    """[op, NEEDED to ROW]"""
    cursor: int
    """[d]: number of operations passed."""
    last_compute: int
    """[d]: last compute operation, -1 before the first."""
    last_transfer: int
    """[direction, lane]: last transfer, -1 before the first."""
    queue: int
    """[d, index]: offloads, oldest first."""
    oldest: int
    """[d]: first queue entry that may still be in flight."""
    unclaimed: int
    """[d]: first queue entry that no reload has waited for."""
    queue_end: int
    """[d]: end of the queue."""
    reverse: int
    """1 if the next round over the devices begins with the last one."""
    next_op: int
    """[d, lane], with link groups: the lane's next operation, -1 for none."""
    previous_op: int
    """[d, lane], with link groups: the lane's last operation, -1 before the first."""
    # What the next evaluation continues from (incremental.py).
    mark_floats: int
    """[2, MARKS, device_floats]: states of the devices during the accepted evaluation, and during this one."""
    mark_ints: int
    """[2, MARKS, device_ints]: the integers of these states."""
    mark_remaining: int
    """[2, MARKS]: number of remaining operations."""
    mark_counts: int
    """[3]: numbers of marks of both, and the accepted mark at which this evaluation rejoined, or -1."""
    suffix_start: int
    """[d]: start of the suffix that the list shares with the accepted one."""
    first_difference: int
    """[d]: first position at which the list differs from the accepted one, -1 if none."""
    comparable: int
    """1 if the lists have the lengths and the costs of the accepted ones."""
    accepted_end_floats: int
    """State of the devices at the end of the accepted evaluation."""
    accepted_end_ints: int
    """The integers of that state."""
    accepted_times: int
    """Ends and arrivals of the accepted evaluation."""
    accepted_causes: int
    """Causes and queues of the accepted evaluation."""
    device_sent_cause: int
    """[d]: the operation that determined `device_sent`, -1 for none."""
    link_cause: int
    """[lane]: the one that determined `link_free`."""
    host_cause: int
    """[d]: the one that determined `host_free`."""
    step_cause: int
    """[stage]: the one that determined `step_end`."""
    # For evaluation with shared links (shared_links.py); without link groups all but `stale` are empty.
    stale: int
    """[d]: 1 if the tables below are of another list than the accepted one."""
    analyzed_from: int
    """[d]: first position of the last analysis."""
    analyzed_to: int
    """[d]: end of the last analysis."""
    snapshot_ints: int
    """[d, position / SNAPSHOT_INTERVAL]: last operation of each lane before the position, and the queue's pointers."""
    ready_cause: int
    """[d, lane]: the operation that determined `ready`."""
    head: int
    """[d, lane]: the lane's first operation, -1 for none."""
    successor: int
    """[op]: the operation after it on its lane."""
    position: int
    """[op]: its position in the list."""
    awaited_offload: int
    """[op]: the offload whose memory it waits for, -1 if none."""
    preceding_compute: int
    """[op]: for a reload, the compute operation before it in the list, -1 if none."""
    waits_for_end: int
    """[op]: for a reload, 1 if it waits for the end of that operation, whose memory it needs."""
