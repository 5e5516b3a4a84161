"""The compiled annealing chain of the joint search: points as arrays, their neighbors, simulated annealing.

A point is an integer array [choice, stage], with choices `COUNT` to `ON_HOST`, plus the entries of a policy.  The costs
of a stage at a level come from a table whose rows Python fills on demand.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.ir.lowering.op_costs import recompute_lead, streaming_lead
from debubble.kernels import inlined, jit
from debubble.planners.joint.list_scheduling.scheduler import place
from debubble.planners.joint.list_scheduling.stage_table import (
    BACKWARDS,
    BY_STAGE,
    COLUMNS,
    DRAIN,
    DROPPED,
    FORWARD,
    FREED_BY_I,
    FREED_BY_W,
    GATHER,
    HORIZON,
    HOSTED,
    INPUT,
    LOAD,
    OFFLOAD_LEAD,
    OFFLOADED,
    PREFETCH,
    RECOMPUTE,
    RECOMPUTE_LEAD,
    RELOAD_LEAD,
    RETAINED,
    SEND,
    STEP,
    TRANSFER,
    WEIGHT,
    WORKSPACE,
)
from debubble.search.annealing.moves import draw

CHOICES = 5
COUNT, LEVEL, SHARE, IN_FLIGHT, ON_HOST = range(CHOICES)
"""Per stage: number of units, recomputation level, offloaded quarters of its activations, limit on micro-batches in
flight, and 1 if its optimizer is on the host."""

ENTRIES = 23
(
    T_FORWARD, T_INPUT, T_WEIGHT, B_RETAINED, B_RECOMPUTED, B_AFTER_INPUT, B_STATES, B_WORKSPACE, B_STATES_HOSTED,
    T_LOAD, T_DRAIN, T_STEP, T_RECOMPUTE, B_DROPPED, T_DEVICE_STEP, B_FULL, T_TRANSFER,
    S_OFFLOAD, S_RELOAD, S_RECOMPUTE, B_HOST, B_GATHERED, T_GATHER,
) = range(ENTRIES)  # fmt: skip
"""Columns of the cost table: times of F, I and W without recomputation; bytes that F retains, that recomputation adds
before I, and that remain after it; bytes of states, of workspace, and of states if the optimizer is on the host; times
of parameter load, gradient drain and optimizer step on the host; time of the recomputation, and bytes allocated by a
separate R; time of the optimizer step on the device; activation bytes without recomputation, and the time to offload
them; overlaps of offloads, reloads and recomputations as in StageCosts; bytes on the host if the optimizer is there;
bytes of gathered parameters, and the time to gather them."""

ROW_INDICES = 4
"""Number of indices that address a row of the table."""

QUARTERS = 4
"""Unit of offloaded shares: quarters of a stage's activations."""
UNLIMITED = 10**6
"""In-flight limit of stages restricted by memory alone."""
REJECTED = 1e300
"""Score of rejected points."""

BELOW_SHIFT, BELOW_LEVEL, BELOW_SHARE, BELOW_IN_FLIGHT, BELOW_HOST = 30, 52, 74, 82, 88
"""Cumulative percentages of moves that shift units between stages, change a level, an offloaded share, an in-flight
limit, and, if possible, where the optimizer steps; the remaining moves change the policy."""
STAGE_ORDER_ODDS = 2
"""One in this many random points runs backwards stage by stage, if devices are crowded."""
MIN_HOSTED_ODDS = 2
"""One of this many random points offloads the optimizer of as few stages per device as free the drawn share of its
memory."""
MAX_FREE_SHARE = 24
"""The largest such share, in 64ths."""
DRAWN_HORIZONS, DRAWN_PREFETCHES = 16, 3
"""Number of choices of the horizon and the prefetch, from the smallest, drawn for points that run backwards stage by
stage if devices are short of memory."""
MIN_RETAINED_ODDS = 3
"""One in this many random points retains as few activations on devices as possible, if states take most of them."""
CHUNK_ODDS, RUN_ODDS = 5, 2
"""One in CHUNK_ODDS changes applies to all stages of a chunk; if devices are crowded, one in RUN_ODDS of the others to
a run of stages, because the best choices there often depend on depth alone."""


class Space(NamedTuple):
    """The constants of a chain's problem, and its cost table, which grows.

    Attributes:
        rows: [device type, level, first unit, units, column]: the cost table; negative where not yet filled.
        type_of: Device type of each stage.
        device_of: Device of each stage.
        limits: Memory limit per device in bytes.
        down: Per device, its link lane to the host.
        up: Per device, its link lane from the host.
        host: Bytes of host memory per device.
        choices: Candidate values of each policy entry.
        options: Number of candidate values of each policy entry.
        scales: Length of each micro-batch.
        static: Bytes used on every device regardless of its units.
        communication: Per stage, time of a message to the next one.
        on_device: Per stage, 1 if its optimizer must step on the device.
        longest: Upper bound on the time of every step that completes.
        offloads: 1 if activations can be offloaded.
        hostable: 1 if the optimizer can be offloaded.
        crowded: 1 if states would take most of the device memory, or exceed it.
        short: 1 if they would take nearly all of it, or exceed it.
        filled: 1 if states take most of the device memory in random points.
        free: Per device, bytes that remain next to all states of its initial units; negative if they exceed it.
        saved: Per stage, bytes freed on the device by offloading the optimizer of its initial units.
        tails: Time after the last operation if hosts step everything, if devices step a vanishing part, and if devices
            step everything.
    """

    rows: Floats
    type_of: Ints
    device_of: Ints
    limits: Floats
    down: Ints
    up: Ints
    host: float
    choices: Floats
    options: Ints
    scales: Floats
    static: float
    communication: Floats
    on_device: Ints
    longest: float
    offloads: int
    hostable: int
    crowded: int
    short: int
    filled: int
    free: Floats
    saved: Floats
    tails: Floats


_streaming_lead, _recompute_lead = inlined(streaming_lead), inlined(recompute_lead)


@inlined
def tail_time(a: Space, point: Ints) -> float:
    """The time after the last operation, interpolated by the largest fraction of its step that a device runs itself."""
    if not point[ON_HOST].any():
        device_tail: float = a.tails[2]
        return device_tail
    device_times, total_times = np.zeros(len(a.limits)), np.zeros(len(a.limits))
    begin = 0
    for s in range(point.shape[1]):
        step = a.rows[a.type_of[s], point[LEVEL, s], begin, point[COUNT, s], T_DEVICE_STEP]
        begin += point[COUNT, s]
        total_times[a.device_of[s]] += step
        if not point[ON_HOST, s]:
            device_times[a.device_of[s]] += step
    share = (device_times / total_times).max()
    tail: float = a.tails[1] + share * (a.tails[2] - a.tails[1]) if share > 0 else a.tails[0]
    return tail


@jit
def fill(a: Space, point: Ints, stages: Floats, capacity: Floats, host: Floats, missing: Ints) -> float:
    """Write the list scheduler's input for a point: the stages' rows and the devices' and hosts' free bytes.

    Returns the bytes of states that exceed the fullest device or host; -1 if a row of the table is missing, whose
    indices are written to `missing`.
    """
    S, P = point.shape[1], len(a.limits)
    capacity[:], host[:] = a.limits - a.static, a.host
    peaks = np.zeros((3, P))
    workspace, gathered, prefetched = peaks[0], peaks[1], peaks[2]
    begin = 0
    for s in range(S):
        count, level = point[COUNT, s], point[LEVEL, s]
        row = a.rows[a.type_of[s], level, begin, count]
        if row[T_FORWARD] < 0:
            missing[0], missing[1], missing[2], missing[3] = a.type_of[s], level, begin, count
            return -1.0
        begin += count
        d = a.device_of[s]
        hosted = point[ON_HOST, s] > 0
        capacity[d] -= row[B_STATES_HOSTED] if hosted else row[B_STATES]
        host[d] -= row[B_HOST] if hosted else 0.0
        workspace[d] = max(workspace[d], row[B_WORKSPACE])
        # Only two stages of a device are gathered at a time.
        prefetched[d] = max(prefetched[d], min(gathered[d], row[B_GATHERED]))
        gathered[d] = max(gathered[d], row[B_GATHERED])
        before_input = row[B_RETAINED] + row[B_RECOMPUTED]
        fraction = point[SHARE, s] / QUARTERS
        stage = stages[s]
        stage[FORWARD], stage[INPUT], stage[WEIGHT] = row[T_FORWARD], row[T_INPUT], row[T_WEIGHT]
        stage[SEND] = a.communication[s] if s + 1 < S and a.device_of[s + 1] != d else 0.0
        stage[RETAINED] = row[B_RETAINED]
        stage[WORKSPACE] = row[B_RECOMPUTED] + max(row[B_AFTER_INPUT] - before_input, 0.0)
        stage[FREED_BY_I], stage[FREED_BY_W] = max(before_input - row[B_AFTER_INPUT], 0.0), row[B_AFTER_INPUT]
        stage[OFFLOADED] = row[B_RETAINED] * fraction
        # Rounded as in simulation, so that simultaneous events are simultaneous in both.
        if row[B_RETAINED] != row[B_FULL]:
            fraction = fraction * row[B_RETAINED] / row[B_FULL]
        stage[TRANSFER] = row[T_TRANSFER] * fraction
        stage[HOSTED] = 1.0 if hosted else 0.0
        stage[LOAD] = row[T_LOAD] if hosted else 0.0
        stage[GATHER] = row[T_GATHER]
        stage[DRAIN] = row[T_DRAIN] if hosted else 0.0
        stage[STEP] = row[T_STEP] if hosted else 0.0
        stage[RECOMPUTE], stage[DROPPED] = row[T_RECOMPUTE], row[B_DROPPED]
        stage[OFFLOAD_LEAD] = stage[RELOAD_LEAD] = stage[RECOMPUTE_LEAD] = 0.0
        if fraction > 0:
            share, transfer = point[SHARE, s] / QUARTERS, row[T_TRANSFER]
            if row[B_RETAINED] != row[B_FULL]:
                transfer = transfer * row[B_RETAINED] / row[B_FULL]
            stage[OFFLOAD_LEAD] = _streaming_lead(row[T_FORWARD], transfer, share, row[S_OFFLOAD])
            reload_lead = _streaming_lead(row[T_INPUT] + row[T_RECOMPUTE], transfer, share, row[S_RELOAD])
            stage[RELOAD_LEAD] = min(reload_lead, stage[TRANSFER])
            stage[RECOMPUTE_LEAD] = _recompute_lead(row[T_RECOMPUTE], transfer, share, row[S_RECOMPUTE])
    capacity -= workspace + gathered + prefetched
    lacking: float = max(0.0, -capacity.min(), -host.min())
    return lacking


@jit
def score(
    a: Space, point: Ints, policy: Floats, stages: Floats, capacity: Floats, host: Floats, missing: Ints,
    threshold: float, operations: Ints, starts: Floats,
) -> float:  # fmt: skip
    """The step time; a value above all step times if the point does not fit; -1 if a row of the table is missing."""
    lacking = fill(a, point, stages, capacity, host, missing)
    if lacking < 0:
        return -1.0
    if lacking > 0:
        penalty: float = a.longest * (10 + lacking / a.limits.min())
        return penalty
    tail = tail_time(a, point)
    _, time, missing_operations = place(
        stages, a.device_of, capacity, a.down, a.up, host, a.scales, policy, point[IN_FLIGHT], threshold - tail, np.inf,
        operations, starts,
    )  # fmt: skip
    if missing_operations > 0:
        return a.longest * (2 + missing_operations / (3 * len(stages) * len(a.scales)))
    return min(time + tail, REJECTED)


@jit
def change(a: Space, point: Ints, choice: int, value: int, s: int, random: Ints) -> None:
    """Set a choice of one stage, of all stages of its chunk, or of a run of stages that starts with it."""
    devices = len(a.limits)
    if draw(random, CHUNK_ODDS) == 0:
        first = s // devices * devices
        point[choice, first : first + devices] = value
    elif a.crowded and draw(random, RUN_ODDS) == 0:
        point[choice, s : s + 1 + draw(random, point.shape[1] - s)] = value
    else:
        point[choice, s] = value


@jit
def neighbor(a: Space, point: Ints, policy: Floats, random: Ints) -> None:
    """Change a point in place to a random neighbor."""
    S = point.shape[1]
    levels = a.rows.shape[1]
    dice, s = draw(random, 100), draw(random, S)
    offloads = a.offloads > 0
    if dice < BELOW_SHIFT:
        other = s + 2 * draw(random, 2) - 1 if draw(random, 2) == 0 else draw(random, S)
        by = 1
        if 0 <= other < S and point[COUNT, s] > by and point[COUNT, other] + by < a.rows.shape[3]:
            point[COUNT, s] -= by
            point[COUNT, other] += by
    elif dice < BELOW_LEVEL:
        step = 2 * draw(random, 2) - 1
        change(a, point, LEVEL, min(max(point[LEVEL, s] + step, 0), levels - 1), s, random)
    elif dice < BELOW_SHARE and offloads:
        change(a, point, SHARE, draw(random, QUARTERS + 1), s, random)
    elif dice < BELOW_IN_FLIGHT:
        limit = UNLIMITED if draw(random, 10) < 3 else 1 + draw(random, 2 * S - 1)
        change(a, point, IN_FLIGHT, limit, s, random)
    elif dice < BELOW_HOST and a.hostable:
        # Two stages of a device may swap where their optimizers step.
        other = draw(random, S) if a.short else s
        if a.device_of[other] == a.device_of[s] and point[ON_HOST, other] != point[ON_HOST, s]:
            point[ON_HOST, other], point[ON_HOST, s] = point[ON_HOST, s], point[ON_HOST, other]
        else:
            change(a, point, ON_HOST, 1 - point[ON_HOST, s], s, random)
        point[ON_HOST] *= 1 - a.on_device
    else:
        n = draw(random, len(policy))
        policy[n] = a.choices[n, draw(random, a.options[n])]


@jit
def _offload_fewest(a: Space, point: Ints, skipped_chunks: int, share: float) -> None:
    """Offload the optimizer of each device's deepest stages until a share of its memory is free.

    Stages of the deepest `skipped_chunks` chunks come last.  The point is unchanged if enough is free on all devices.
    """
    S, P = point.shape[1], len(a.limits)
    free = a.free - share * a.limits
    if free.min() >= 0:
        return
    point[ON_HOST] = 0
    for n in range(S):
        s = S - 1 - (n + skipped_chunks * P) % S
        d = a.device_of[s]
        if free[d] < 0 and not a.on_device[s]:
            point[ON_HOST, s] = 1
            free[d] += a.saved[s]


@jit
def random_point(a: Space, counts: Ints, point: Ints, policy: Floats, random: Ints) -> None:
    """Draw a point with one level and one share per chunk, and a random policy."""
    S, P = point.shape[1], len(a.limits)
    levels, chunks = a.rows.shape[1], point.shape[1] // len(a.limits)
    offloads = a.offloads > 0
    level, share = np.zeros(chunks, np.int64), np.zeros(chunks, np.int64)
    for k in range(chunks):
        level[k] = draw(random, levels)
        if offloads and draw(random, 10) < 6:
            share[k] = draw(random, QUARTERS + 1)
    if draw(random, 2) == 0:
        # The shallow chunks' activations are needed last, so recomputation and reloads pay off most there.
        level, share = np.sort(level)[::-1], np.sort(share)[::-1]
    hosted = draw(random, chunks + 1) if a.hostable else 0
    # Deeper chunks may keep their states on devices.
    deeper = draw(random, chunks - hosted + 1) if hosted and a.crowded and draw(random, 2) == 0 else 0
    for s in range(S):
        point[COUNT, s], point[IN_FLIGHT, s] = counts[s], UNLIMITED
        point[LEVEL, s], point[SHARE, s] = level[s // P], share[s // P]
        point[ON_HOST, s] = 1 if chunks - hosted - deeper <= s // P < chunks - deeper and not a.on_device[s] else 0
    if hosted and a.short and draw(random, MIN_HOSTED_ODDS) == 0:
        _offload_fewest(a, point, deeper, (1 + draw(random, MAX_FREE_SHARE)) / 64)
    for n in range(len(policy)):
        policy[n] = a.choices[n, draw(random, a.options[n])]
    if a.crowded and draw(random, STAGE_ORDER_ODDS) == 0:
        # Hosts step the deepest stages alongside the remaining backwards, while activations wait on hosts.
        point[LEVEL] = draw(random, levels)
        if offloads:
            point[SHARE] = QUARTERS
        policy[BACKWARDS] = BY_STAGE + draw(random, 2)
        if a.short:
            # Earlier reloads take memory that preceding forwards need.
            policy[HORIZON] = a.choices[HORIZON, draw(random, min(DRAWN_HORIZONS, a.options[HORIZON]))]
            policy[PREFETCH] = a.choices[PREFETCH, draw(random, DRAWN_PREFETCHES)]
    elif offloads and a.filled and draw(random, MIN_RETAINED_ODDS) == 0:
        point[LEVEL], point[SHARE] = levels - 1, QUARTERS


@jit
def sample(
    a: Space, counts: Ints, best: Ints, best_policy: Floats, values: Floats, missing: Ints, begin: int, end: int,
    random: Ints,
) -> int:  # fmt: skip
    """Draw the random points from `begin` to `end` and store the best; returns as `anneal` does."""
    S = best.shape[1]
    stages, capacity, host = np.zeros((S, COLUMNS)), np.zeros(len(a.limits)), np.zeros(len(a.limits))
    operations, starts = np.empty((0, 3), np.int64), np.empty(0)
    point, policy = best.copy(), best_policy.copy()
    for step in range(begin, end):
        random_state = random[0]
        random_point(a, counts, point, policy, random)
        value = score(a, point, policy, stages, capacity, host, missing, values[1], operations, starts)
        if value < 0:
            random[0] = random_state
            return step
        if value < values[1]:
            values[1] = value
            best[:], best_policy[:] = point, policy
    return end


@jit
def anneal(
    a: Space, point: Ints, policy: Floats, best: Ints, best_policy: Floats, values: Floats, missing: Ints, begin: int,
    end: int, steps: int, initial: float, final: float, random: Ints,
) -> int:  # fmt: skip
    """Run steps `begin` to `end` of `steps`, cooling geometrically between temperatures relative to the step time.

    `values` are the scores of the point and of the best.  Returns the step at which a row of the table was missing,
    which is repeated once the row is filled, or `end`.
    """
    S = point.shape[1]
    stages, capacity, host = np.zeros((S, COLUMNS)), np.zeros(len(a.limits)), np.zeros(len(a.limits))
    operations, starts = np.empty((0, 3), np.int64), np.empty(0)
    candidate, candidate_policy = point.copy(), policy.copy()
    for step in range(begin, end):
        temperature = initial * (final / initial) ** (step / steps)
        random_state = random[0]
        neighbor(a, candidate, candidate_policy, random)
        allowed = values[0] * (1 - temperature * np.log((1 + draw(random, 1000000)) / 1000000.0))
        value = score(a, candidate, candidate_policy, stages, capacity, host, missing, allowed, operations, starts)
        if value < 0:
            random[0] = random_state
            return step
        if value <= allowed:
            values[0] = value
            point[:], policy[:] = candidate, candidate_policy
            if value < values[1]:
                values[1] = value
                best[:], best_policy[:] = candidate, candidate_policy
        else:
            candidate[:], candidate_policy[:] = point, policy
    return end
