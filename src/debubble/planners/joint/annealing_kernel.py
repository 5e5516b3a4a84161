"""The compiled annealing chain of the joint search: points as arrays, their neighbours, simulated annealing.

A point is a row of whole numbers, one per stage and choice (`COUNT` to `ON_HOST`), with the entries of a policy.  What
a stage costs at a level is looked up in a table that Python fills as the chain asks for it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.ir.lowering.op_costs import recompute_lead, streaming_lead
from debubble.kernels import inlined, jit
from debubble.planners.joint.list_scheduling.scheduler import place
from debubble.planners.joint.list_scheduling.stage_table import (
    AFTER,
    AGAIN,
    AGAIN_LEAD,
    BACK_LEAD,
    BACKWARDS,
    BY_STAGE,
    COLUMNS,
    DRAIN,
    DROPPED,
    FORWARD,
    FREED,
    HORIZON,
    HOSTED,
    INPUT,
    KEPT,
    LOAD,
    MOVED,
    OUT_LEAD,
    PREFETCH,
    SEND,
    STEP,
    TRANSFER,
    WEIGHT,
    WORKSPACE,
)
from debubble.search.annealing.moves import draw

CHOICES = 5
COUNT, LEVEL, SHARE, MOST, ON_HOST = range(CHOICES)
"""Per stage: its units, its level of recomputation, the quarters of its activations that it offloads, the micro-batches
that may be in flight, and 1 if its optimizer is the host's."""

ENTRIES = 21
(
    T_FORWARD, T_INPUT, T_WEIGHT, B_KEPT, B_AGAIN, B_AFTER, B_STATES, B_SPACE, B_HOSTED, T_LOAD, T_DRAIN, T_STEP,
    T_AGAIN, B_DROPPED, T_OWN_STEP, B_WHOLE, T_TRANSFER, S_OUT, S_BACK, S_AGAIN, B_HOST,
) = range(ENTRIES)  # fmt: skip
"""Columns of the table of stages: times of F, I and W, without recomputation; bytes that F keeps, that come back
before I, and that remain after it; bytes of its states, of its workspace, and of its states where the host steps; times
of a step on the host; time of the recomputation, and the bytes that it brings back as an operation of its own; time of
its step on the device; bytes of its activation if it recomputes nothing, and the time to move them to the host; the
overlaps of its offloads, reloads and recomputations, as in StageCosts; bytes on the host if that steps."""

ADDRESS = 4
"""The numbers of a row's place in the table."""

QUARTERS = 4
"""Shares of a stage's activations are counted in quarters."""
UNLIMITED = 10**6
"""As many micro-batches in flight as memory allows."""
REJECTED = 1e300
"""The score of what is worse than it may be."""

SHIFTS, LEVELS, SHARES, FLIGHTS, HOSTS = 30, 52, 74, 82, 88
"""Shares of 100 moves: those below the first number shift units between stages; then they change levels, shares of
offload, micro-batches in flight, and, if hosts may step, who does; the others change the policy."""
STAGE_BY_STAGE = 2
"""One in so many random points goes back stage by stage, where devices are crowded."""
FEWEST_HOSTED = 2
"""One in so many random points has hosts step as few stages of each device as a share of its memory is to be left."""
FREE_SHARES = 24
"""The largest of these shares, in parts of 64."""
DRAWN_HORIZONS, DRAWN_PREFETCHES = 16, 3
"""How many choices of the list scheduler's horizon and prefetch, the least first, are drawn for points that go back
stage by stage, where devices are short of memory."""
LEAST_KEPT = 3
"""One in so many random points keeps as little of activations on devices as can be, where states leave little room."""
CHUNK, RUN = 5, 2
"""One in so many changes is made to all stages of a chunk; where devices are crowded, one in so many others to a run of
stages, as what is best often changes with depth alone there."""


class Space(NamedTuple):
    """The constants of a chain's problem, and its table, which grows.

    Attributes:
        rows: [type of device, level, first unit, units]: the entries above; negative where they are not known yet.
        type_of: Per stage, the type of its device.
        device_of: Per stage, its device.
        limits: Per device, bytes.
        down: Per device, its link's lane to the host.
        up: Per device, its lane from the host.
        host: Bytes that every device has on its host.
        choices: Per entry of a policy, what it may be.
        options: Per entry of a policy, how many these are.
        scales: Per micro-batch, its length.
        static: Bytes on every device.
        communication: Per stage, time of a message to the next one.
        on_device: Per stage, 1 if no host may step it.
        longest: Longer than any step that is not stuck.
        offloads: 1 if activations can be moved to the host.
        hostable: 1 if the host may step.
        crowded: 1 if states would take most of the devices' memory, or have no room there.
        short: 1 if they would take nearly all of it, or do not fit.
        full: 1 if states take most of devices' memory in the points that are drawn.
        free: Per device, bytes beside all states of the units that it has at first; negative if these do not fit.
        saved: Per stage, bytes of states that leave the device if a host steps it, of the units that it has at first.
        tails: The time after the last operation if hosts step everything, if devices step next to nothing of their
            states, and if they step all.
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
    full: int
    free: Floats
    saved: Floats
    tails: Floats


_streaming_lead, _recompute_lead = inlined(streaming_lead), inlined(recompute_lead)


@inlined
def tail_of(a: Space, point: Ints) -> float:
    """The time after the last operation: the largest share of its step that a device takes itself, and the rest."""
    if not point[ON_HOST].any():
        whole: float = a.tails[2]
        return whole
    own, all_ = np.zeros(len(a.limits)), np.zeros(len(a.limits))
    begin = 0
    for s in range(point.shape[1]):
        step = a.rows[a.type_of[s], point[LEVEL, s], begin, point[COUNT, s], T_OWN_STEP]
        begin += point[COUNT, s]
        all_[a.device_of[s]] += step
        if not point[ON_HOST, s]:
            own[a.device_of[s]] += step
    share = (own / all_).max()
    tail: float = a.tails[1] + share * (a.tails[2] - a.tails[1]) if share > 0 else a.tails[0]
    return tail


@jit
def fill(a: Space, point: Ints, stages: Floats, capacity: Floats, host: Floats, missing: Ints) -> float:
    """Write a point's stages and its devices' room as the list scheduler sees them.

    Returns the bytes that the fullest device or host lacks for states; -1 if the table lacks a row, which is noted.
    """
    S, P = point.shape[1], len(a.limits)
    capacity[:], host[:] = a.limits - a.static, a.host
    space = np.zeros(P)
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
        capacity[d] -= row[B_HOSTED] if hosted else row[B_STATES]
        host[d] -= row[B_HOST] if hosted else 0.0
        space[d] = max(space[d], row[B_SPACE])
        before = row[B_KEPT] + row[B_AGAIN]
        part = point[SHARE, s] / QUARTERS
        stage = stages[s]
        stage[FORWARD], stage[INPUT], stage[WEIGHT] = row[T_FORWARD], row[T_INPUT], row[T_WEIGHT]
        stage[SEND] = a.communication[s] if s + 1 < S and a.device_of[s + 1] != d else 0.0
        stage[KEPT] = row[B_KEPT]
        stage[WORKSPACE] = row[B_AGAIN] + max(row[B_AFTER] - before, 0.0)
        stage[FREED], stage[AFTER] = max(before - row[B_AFTER], 0.0), row[B_AFTER]
        stage[MOVED] = row[B_KEPT] * part
        # Rounded as simulation does, so that what happens at one moment here does there.
        if row[B_KEPT] != row[B_WHOLE]:
            part = part * row[B_KEPT] / row[B_WHOLE]
        stage[TRANSFER] = row[T_TRANSFER] * part
        stage[HOSTED] = 1.0 if hosted else 0.0
        stage[LOAD] = row[T_LOAD] if hosted else 0.0
        stage[DRAIN] = row[T_DRAIN] if hosted else 0.0
        stage[STEP] = row[T_STEP] if hosted else 0.0
        stage[AGAIN], stage[DROPPED] = row[T_AGAIN], row[B_DROPPED]
        stage[OUT_LEAD] = stage[BACK_LEAD] = stage[AGAIN_LEAD] = 0.0
        if part > 0:
            share, whole = point[SHARE, s] / QUARTERS, row[T_TRANSFER]
            if row[B_KEPT] != row[B_WHOLE]:
                whole = whole * row[B_KEPT] / row[B_WHOLE]
            stage[OUT_LEAD] = _streaming_lead(row[T_FORWARD], whole, share, row[S_OUT])
            back = _streaming_lead(row[T_INPUT] + row[T_AGAIN], whole, share, row[S_BACK])
            stage[BACK_LEAD] = min(back, stage[TRANSFER])
            stage[AGAIN_LEAD] = _recompute_lead(row[T_AGAIN], whole, share, row[S_AGAIN])
    capacity -= space
    lacking: float = max(0.0, -capacity.min(), -host.min())
    return lacking


@jit
def score(
    a: Space, point: Ints, policy: Floats, stages: Floats, capacity: Floats, host: Floats, missing: Ints,
    threshold: float, operations: Ints, starts: Floats,
) -> float:  # fmt: skip
    """The time of the step; more than any step takes where something does not fit; -1 if the table lacks a row."""
    lacking = fill(a, point, stages, capacity, host, missing)
    if lacking < 0:
        return -1.0
    if lacking > 0:
        beyond: float = a.longest * (10 + lacking / a.limits.min())
        return beyond
    tail = tail_of(a, point)
    _, time, left = place(
        stages, a.device_of, capacity, a.down, a.up, host, a.scales, policy, point[MOST], threshold - tail, np.inf,
        operations, starts,
    )  # fmt: skip
    if left > 0:
        return a.longest * (2 + left / (3 * len(stages) * len(a.scales)))
    return min(time + tail, REJECTED)


@jit
def change(a: Space, point: Ints, choice: int, to: int, s: int, random: Ints) -> None:
    """Change one stage's entry, or the same for all stages of its chunk, or for a run of stages that it begins."""
    devices = len(a.limits)
    if draw(random, CHUNK) == 0:
        first = s // devices * devices
        point[choice, first : first + devices] = to
    elif a.crowded and draw(random, RUN) == 0:
        point[choice, s : s + 1 + draw(random, point.shape[1] - s)] = to
    else:
        point[choice, s] = to


@jit
def neighbour(a: Space, point: Ints, policy: Floats, random: Ints) -> None:
    """Change a point at random, in place."""
    S = point.shape[1]
    levels = a.rows.shape[1]
    dice, s = draw(random, 100), draw(random, S)
    offloads = a.offloads > 0
    if dice < SHIFTS:
        other = s + 2 * draw(random, 2) - 1 if draw(random, 2) == 0 else draw(random, S)
        by = 1
        if 0 <= other < S and point[COUNT, s] > by and point[COUNT, other] + by < a.rows.shape[3]:
            point[COUNT, s] -= by
            point[COUNT, other] += by
    elif dice < LEVELS:
        step = 2 * draw(random, 2) - 1
        change(a, point, LEVEL, min(max(point[LEVEL, s] + step, 0), levels - 1), s, random)
    elif dice < SHARES and offloads:
        change(a, point, SHARE, draw(random, QUARTERS + 1), s, random)
    elif dice < FLIGHTS:
        to = UNLIMITED if draw(random, 10) < 3 else 1 + draw(random, 2 * S - 1)
        change(a, point, MOST, to, s, random)
    elif dice < HOSTS and a.hostable:
        # Two stages of a device may change places between it and its host.
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
def _host_fewest(a: Space, point: Ints, deeper: int, share: float) -> None:
    """Have hosts step each device's deepest stages but those of so many chunks, until a share of its memory is free.

    Where states leave as much on all devices, the point remains as it is.
    """
    S, P = point.shape[1], len(a.limits)
    free = a.free - share * a.limits
    if free.min() >= 0:
        return
    point[ON_HOST] = 0
    for n in range(S):
        s = S - 1 - (n + deeper * P) % S
        d = a.device_of[s]
        if free[d] < 0 and not a.on_device[s]:
            point[ON_HOST, s] = 1
            free[d] += a.saved[s]


@jit
def random_point(a: Space, counts: Ints, point: Ints, policy: Floats, random: Ints) -> None:
    """Write a point whose stages have one level and one share per chunk, with a random policy."""
    S, P = point.shape[1], len(a.limits)
    levels, chunks = a.rows.shape[1], point.shape[1] // len(a.limits)
    offloads = a.offloads > 0
    level, share = np.zeros(chunks, np.int64), np.zeros(chunks, np.int64)
    for k in range(chunks):
        level[k] = draw(random, levels)
        if offloads and draw(random, 10) < 6:
            share[k] = draw(random, QUARTERS + 1)
    if draw(random, 2) == 0:
        # What a step needs last, the shallow chunks' activations, is worth the most time to bring back.
        level, share = np.sort(level)[::-1], np.sort(share)[::-1]
    hosted = draw(random, chunks + 1) if a.hostable else 0
    # Deeper chunks, whose backwards come last, may keep their states.
    deeper = draw(random, chunks - hosted + 1) if hosted and a.crowded and draw(random, 2) == 0 else 0
    for s in range(S):
        point[COUNT, s], point[MOST, s] = counts[s], UNLIMITED
        point[LEVEL, s], point[SHARE, s] = level[s // P], share[s // P]
        point[ON_HOST, s] = 1 if chunks - hosted - deeper <= s // P < chunks - deeper and not a.on_device[s] else 0
    if hosted and a.short and draw(random, FEWEST_HOSTED) == 0:
        _host_fewest(a, point, deeper, (1 + draw(random, FREE_SHARES)) / 64)
    for n in range(len(policy)):
        policy[n] = a.choices[n, draw(random, a.options[n])]
    if a.crowded and draw(random, STAGE_BY_STAGE) == 0:
        # The deepest stages' hosts step beside all that is left, while activations wait on hosts.
        point[LEVEL] = draw(random, levels)
        if offloads:
            point[SHARE] = QUARTERS
        policy[BACKWARDS] = BY_STAGE + draw(random, 2)
        if a.short:
            # Earlier reloads fill the memory that the forwards before them need.
            policy[HORIZON] = a.choices[HORIZON, draw(random, min(DRAWN_HORIZONS, a.options[HORIZON]))]
            policy[PREFETCH] = a.choices[PREFETCH, draw(random, DRAWN_PREFETCHES)]
    elif offloads and a.full and draw(random, LEAST_KEPT) == 0:
        point[LEVEL], point[SHARE] = levels - 1, QUARTERS


@jit
def sample(
    a: Space, counts: Ints, best: Ints, best_policy: Floats, values: Floats, missing: Ints, begin: int, end: int,
    random: Ints,
) -> int:  # fmt: skip
    """Draw the random points from `begin` to `end`, and keep the best; returns as `anneal` does."""
    S = best.shape[1]
    stages, capacity, host = np.zeros((S, COLUMNS)), np.zeros(len(a.limits)), np.zeros(len(a.limits))
    operations, starts = np.empty((0, 3), np.int64), np.empty(0)
    point, policy = best.copy(), best_policy.copy()
    for step in range(begin, end):
        before = random[0]
        random_point(a, counts, point, policy, random)
        found = score(a, point, policy, stages, capacity, host, missing, values[1], operations, starts)
        if found < 0:
            random[0] = before
            return step
        if found < values[1]:
            values[1] = found
            best[:], best_policy[:] = point, policy
    return end


@jit
def anneal(
    a: Space, point: Ints, policy: Floats, best: Ints, best_policy: Floats, values: Floats, missing: Ints, begin: int,
    end: int, steps: int, warm: float, cold: float, random: Ints,
) -> int:  # fmt: skip
    """Run from step `begin` to `end` of `steps` that cool from one temperature to another, parts of the step's time.

    `values` are the score of the point and of the best.  Returns the step at which a row was lacking, or `end`; the
    move is tried again once there is the row.
    """
    S = point.shape[1]
    stages, capacity, host = np.zeros((S, COLUMNS)), np.zeros(len(a.limits)), np.zeros(len(a.limits))
    operations, starts = np.empty((0, 3), np.int64), np.empty(0)
    tried, tried_policy = point.copy(), policy.copy()
    for step in range(begin, end):
        temperature = warm * (cold / warm) ** (step / steps)
        before = random[0]
        neighbour(a, tried, tried_policy, random)
        allowed = values[0] * (1 - temperature * np.log((1 + draw(random, 1000000)) / 1000000.0))
        found = score(a, tried, tried_policy, stages, capacity, host, missing, allowed, operations, starts)
        if found < 0:
            random[0] = before
            return step
        if found <= allowed:
            values[0] = found
            point[:], policy[:] = tried, tried_policy
            if found < values[1]:
                values[1] = found
                best[:], best_policy[:] = tried, tried_policy
        else:
            tried[:], tried_policy[:] = point, policy
    return end
