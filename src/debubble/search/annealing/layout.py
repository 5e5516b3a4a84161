"""The kernel's memory layout.

An operation is a number: `(kind * stages + stage) * micro_batches + micro_batch`, with the kinds in the order of KINDS.
All tables lie in two blocks, one of floats and one of whole numbers, and a KernelLayout says where each begins:
compiled code passes three things from function to function this way, instead of counting references to thirty arrays.

Of every operation the kernel knows four numbers, its facts:

| fact | meaning |
| --- | --- |
| NEEDED | index into the floats: when its data are there |
| RELOADED | index into the floats: when its activation is back |
| SENT | index into the floats: where it writes the time at which its message arrives |
| ROW | row in the tables of costs |
"""

from __future__ import annotations

from typing import NamedTuple

from debubble.ir import Kind

KINDS = (Kind.F, Kind.I, Kind.W, Kind.B, Kind.R, Kind.R, Kind.O, Kind.L)
F, I, W, B, R, DEEPER, O, L = range(8)  # noqa: E741 - the order of KINDS
"""The kernel's kinds: an R by the deeper level of its stage is a kind of its own."""
KIND_INDEX = {kind: KINDS.index(kind) for kind in KINDS}
COUNT = len(KINDS)
MARKS = 25
"""States of the devices that an evaluation leaves after, at most; the first is that of its beginning."""
NOTED = 32
"""With link groups, how many places of a list are between two of which the state of memory is noted."""
NEEDED, RELOADED, SENT, ROW = range(4)
"""The facts of an operation, as the table above has them."""

Shares = tuple[int, int, int, int, int, int]
"""Shares of the moves: the upper ends of the ranges of a number from 0 to 99 in which one toggles offloads,
hands one to the next micro-batch, toggles recomputations, or shifts one operation, a run of micro-batches or those of
neighbouring stages; else two operations change places.  Where a move is not allowed, the next range takes its share."""
FROM_SCRATCH: Shares = (22, 28, 38, 60, 80, 100)
FROM_A_PLAN: Shares = (8, 10, 35, 60, 85, 100)
"""Shares for a start whose offloads are chosen well: on a plan of `joint` all other moves gained ten times as much."""


class KernelLayout(NamedTuple):
    """Sizes, flags, and where each table begins; `op` stands for an operation's number, `d` for a device."""

    stages: int
    micro_batches: int
    devices: int
    exclusive: int
    half_duplex: int
    span: int
    grain: int
    """Operations to a row of the tables of costs: all of a stage's micro-batches where they are alike, else one."""
    queued: int
    """Largest number of offloads of a device."""
    times: int
    """Numbers of ends and arrivals, with the three that stand for none."""
    causes: int
    """Numbers of causes and queues."""
    device_floats: int
    """Count of the floats that are the state of all devices."""
    device_ints: int
    """Count of the whole numbers that are."""
    by_arrival: int
    """1 if devices share links to the host, which they take in the order in which their transfers are ready."""
    hosted: int
    """1 if optimizers of some stages step on the host."""
    levels: int
    """By how many levels an R may recompute."""
    # In the block of floats.
    time: int
    """[R in list, row]"""
    allocated: int
    """[R in list, row]"""
    freed: int
    """[R in list, row]"""
    lead: int
    """[R in list, row]: how long before the end of its F an O may start, and before that of its L a B, I or R."""
    message: int
    """[R in list, row]: time of the message after F, I, B; negative where the consumer is on the same device."""
    tail: int
    """[R in list, row]: least time from its end to the end of everything."""
    after_weights: int
    """[stage]: time from the last weight gradient to the end of a step on the host, on a free link; 0 if it is not
    there."""
    gradients: int
    """[stage]: the part of it in which gradients go to the host."""
    host_step: int
    """[stage]: the part in which the host steps."""
    loaded: int
    """[stage]: when its parameters have come from the host, before its first forward."""
    static: int
    """[d]"""
    limit: int
    """[d], infinite where there is none."""
    end: int
    """[op], negative until it is known."""
    arrival: int
    """[direction, stage and micro-batch]: when its message is there, negative until it is known."""
    at_once: int
    """Holds 0: the arrival for what waits for no message."""
    never: int
    """Holds -1: the end of a reload for what waits for none."""
    unread: int
    """Takes the arrival of what sends no message; nobody reads it."""
    reserved: int
    """[d]: bytes, as static admission counts them."""
    last_freed: int
    """[d]: what the last compute operation frees at its end."""
    spent: int
    """[d]: compute time so far."""
    first: int
    """[d]: start of the first compute operation."""
    begun: int
    """[d]: start of the last compute operation."""
    free: int
    """[d]: its end."""
    accounted: int
    """[d]: what the offloads from `oldest` to `known` free."""
    link: int
    """[d, d]: when the last message has gone, if messages are exclusive."""
    turn: int
    """[direction, lane], with link groups: when the last transfer was ready that has taken its turn."""
    work: int
    """[d]: compute time of the whole list."""
    ready: int
    """[d, lane], with link groups: when the lane's next transfer can start but for the link; infinite if not known."""
    gone: int
    """[d]: when what it last gave to its link has left."""
    link_gone: int
    """[lane]: when what a link last took has left."""
    host_free: int
    """[d]: when the host has stepped for it."""
    stepped: int
    """[stage]: when its step on the host is done; negative if it is not there."""
    noted_floats: int
    """[d, place / NOTED], with link groups: what admission counts as reserved and as freed before that place."""
    # In the block of whole numbers.
    device_of: int
    """[stage]"""
    lane: int
    """[d]: the host link's lane, which a link group shares."""
    peer: int
    """[d]: the next device that shares its link to the host, -1 after the last."""
    cause: int
    """[op]: the one whose start or end it waited for, -1 for none."""
    facts: int
    """[op, NEEDED to ROW]"""
    cursor: int
    """[d]: operations passed."""
    compute: int
    """[d]: last compute operation, -1 before the first."""
    transfer: int
    """[direction, lane]: last transfer, -1 before the first."""
    queue: int
    """[d, n]: offloads, oldest first."""
    oldest: int
    """[d]: first in the queue that may still be in flight."""
    known: int
    """[d]: first in the queue that no reload has waited for."""
    newest: int
    """[d]: end of the queue."""
    downward: int
    """1 if the next round over the devices begins with the last."""
    next: int
    """[d, lane], with link groups: the lane's next operation, -1 for none."""
    previous: int
    """[d, lane], with link groups: the lane's last operation, -1 before the first."""
    # What the next evaluation continues from (incremental.py).
    mark_floats: int
    """[2, MARKS, numbers of all devices]: state of the devices during the last evaluation kept, and during this one."""
    mark_ints: int
    """[2, MARKS, whole numbers of all devices]: the other half of that state."""
    mark_left: int
    """[2, MARKS]: operations that were still to come."""
    marked: int
    """[2]: how many marks there are of each; then that of those kept at which this evaluation met it, or -1."""
    shared: int
    """[d]: from where on the list is that of the last evaluation kept."""
    differs: int
    """[d]: the first place of the list that differs from that of the last evaluation kept, -1 if none does."""
    alike: int
    """1 if the lists are as long as those of the last evaluation kept, and their operations cost the same."""
    last_floats: int
    """State of the devices at the end of the last evaluation kept."""
    last_ints: int
    """The whole numbers of that state."""
    kept_times: int
    """Ends and arrivals of the last evaluation kept."""
    kept_causes: int
    """Causes and queues of the last evaluation kept."""
    gone_why: int
    """[d]: the operation that this hangs on, -1 for none."""
    link_why: int
    """[lane]: likewise."""
    host_why: int
    """[d]: likewise."""
    stepped_why: int
    """[stage]: likewise."""
    # For evaluation by arrival (shared_links.py); without link groups all but `stale` are empty.
    stale: int
    """[d]: 1 if the tables below are those of another list than the accepted one."""
    noted_from: int
    """[d]: the first place of what was noted last."""
    noted_to: int
    """[d]: where that ends."""
    noted_ints: int
    """[d, place / NOTED]: last operation of each lane before that place, and the offloads of which admission knows."""
    ready_why: int
    """[d, lane]: the operation that its being ready hangs on."""
    head: int
    """[d, lane]: the lane's first operation, -1 for none."""
    follow: int
    """[op]: the operation after it on its lane."""
    place: int
    """[op]: its place in the list."""
    offload: int
    """[op]: the offload whose memory it waits for, -1 for none."""
    behind: int
    """[op]: of a reload, the compute operation before it in the list, -1 for none."""
    freeing: int
    """[op]: of a reload, 1 if it waits for the end of that operation, whose memory it needs."""
