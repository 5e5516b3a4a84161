"""The list scheduler's numbers: what does not change while a step is scheduled, and how far its devices are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined
from debubble.planners.joint.list_scheduling.stage_table import (
    AGAIN,
    AGE,
    AHEAD,
    BACKLOG,
    BACKWARDS,
    BY_DEEP_STAGE,
    BY_STAGE,
    DEEP,
    DRAIN,
    FORWARD,
    HORIZON,
    HOSTED,
    HOSTS_FIRST,
    INPUT,
    MOVED,
    PREFETCH,
    SEND,
    STEP,
    WAIT_LIMIT,
    WEIGHT,
    WORKSPACE,
    F,
    I,
    W,
)

NEVER = np.inf


class Step(NamedTuple):
    """The step to schedule, and the quantities that a policy weighs.

    Attributes:
        stages: A row per stage, as in the table; so are the next four.
        device_of: Per stage, its device.
        capacity: Per device, bytes for activations.
        down: Per device, its lane to the host.
        up: Per device, its lane from the host.
        host: Per device, bytes of its host for activations.
        scales: Per micro-batch, its length: the factor on its times and bytes.
        most: Per stage, the micro-batches that may be between their forward and their backward.
        stages_of: [device, place]: the stages of a device.
        stage_counts: Per device, how many these are.
        to_stage: Per stage, the time that a micro-batch takes to it forwards.
        from_last: Per stage, the time that a micro-batch takes to it from the last stage backwards; longer than a step
            for stages whose backwards come after all micro-batches of another one.
        remaining_time: [F, I or W, stage, micro-batch]: the least time from its end to the end of the step.
        reserve: Per device, the room kept for one backward: its workspace and its reload.
        period: The time of a micro-batch on the busiest device.
        backlog: The policy's entries from here on.
        timeout: See the policy.
        horizon: See the policy.
        prefetch: See the policy.
        age: See the policy.
        ahead: See the policy.
        after_forwards: Per stage, 1 if its backwards wait for forwards.
    """

    stages: Floats
    device_of: Ints
    capacity: Floats
    down: Ints
    up: Ints
    host: Floats
    scales: Floats
    most: Ints
    stages_of: Ints
    stage_counts: Ints
    to_stage: Floats
    from_last: Floats
    remaining_time: Floats
    reserve: Floats
    period: float
    backlog: float
    timeout: float
    horizon: int
    prefetch: int
    age: float
    ahead: int
    after_forwards: Ints


class State(NamedTuple):
    """The state of a step in progress.  Times are NEVER as long as they are not known.

    Attributes:
        rest: Per device, the time of the compute operations that it has still to do.
        next_f: Per stage, the micro-batch whose forward comes next.
        next_i: That of the next backward.
        next_w: That of the next weight gradient.
        next_l: That of the next reload.
        next_r: That of the next recomputation, in the backward or as an operation of its own.
        data: [stage, micro-batch]: when a forward has its input.
        gradient: [stage, micro-batch]: when a backward has its gradient.
        back: [stage, micro-batch]: when its offload ends; once its reload is decided, when that ends.
        arrived: Per stage, when its first input arrives, with its parameters or without.
        loaded: Per stage, when the host has sent its parameters.
        started: Per micro-batch, the operations of its chain, F down and I up, that have started.
        wake: Per device, when it decides next.
        begun: Per device, when its last compute operation starts.
        free: Per device, when that operation ends.
        freed: Per device, bytes that it frees at its end, as long as no reload after it in the list counts on them.
        used: Per device, bytes, without those of offloads that have ended.
        away: Per device, bytes of activations that are on its host, until their backwards start.
        in_flight: Per device, micro-batches of its stages between forward and backward.
        waiting: Per device, weight gradients that wait.
        under_way: Per device, reloads whose backwards have not started.
        early: Per device, micro-batches that are recomputed and wait for their gradients.
        stepped: Per device, when its host has done the steps that it knows of.
        gone: [device, number]: when its offloads end.
        gone_bytes: [device, number]: the bytes that they free then.
        listed: Per device, the number of offloads in its list.
        served: Per device, the number of those that have had their turn on the link.
        ended: Per device, the number of those that had ended when it last decided.
        known: Per device, the number of those that had ended when its last compute operation started.
        unknown: Per device, the bytes of those that have ended since.
        going: Per device, the bytes of those in the list that had not ended when it last decided.
        transfers: [stream, number]: kind, stage and micro-batch of a transfer.
        ready: [stream, number]: when it may ask for the link, as far as other lanes are concerned.
        first: Per stream, the number of the transfer that comes next.
        after_last: Per stream, the number of transfers in it.
        idle_from: Per stream, when its last transfer that has had its turn ends.
        ask: Per stream, when its next transfer asks for the link.
        lane_free: Per lane of a link, when the last transfer that has had its turn there ends.
        turn: Per lane, when that one asked.
        turn_device: Per lane, the device that did.
        last: [0]: the last end so far.
        placed: [0]: the number of operations written down.
    """

    rest: Floats
    next_f: Ints
    next_i: Ints
    next_w: Ints
    next_l: Ints
    next_r: Ints
    data: Floats
    gradient: Floats
    back: Floats
    arrived: Floats
    loaded: Floats
    started: Ints
    wake: Floats
    begun: Floats
    free: Floats
    freed: Floats
    used: Floats
    away: Floats
    in_flight: Ints
    waiting: Ints
    under_way: Ints
    early: Ints
    stepped: Floats
    gone: Floats
    gone_bytes: Floats
    listed: Ints
    served: Ints
    ended: Ints
    known: Ints
    unknown: Floats
    going: Floats
    transfers: Ints
    ready: Floats
    first: Ints
    after_last: Ints
    idle_from: Floats
    ask: Floats
    lane_free: Floats
    turn: Floats
    turn_device: Ints
    last: Floats
    placed: Ints


@inlined
def place_of(number: int) -> int:
    """A number that is not negative as the place of an entry: compiled code need not ask whether it is negative."""
    return int(np.uint32(number))


@inlined
def _stages_by_device(stages: Floats, device_of: Ints, devices: int) -> tuple[Ints, Ints, float]:
    """The stages of each device and their number, and the time of a micro-batch on the busiest device."""
    stages_of = np.zeros((devices, len(stages)), np.int64)
    count, work = np.zeros(devices, np.int64), np.zeros(devices)
    for s in range(len(stages)):
        d = device_of[s]
        stages_of[d, count[d]] = s
        count[d] += 1
        work[d] += stages[s, FORWARD] + (stages[s, INPUT] + stages[s, AGAIN]) + stages[s, WEIGHT]
    return stages_of, count, work.max()


@inlined
def _depths(stages: Floats) -> tuple[Floats, Floats]:
    """The time that a micro-batch takes to each stage forwards, and from the last stage to it backwards."""
    forward, backward = np.zeros(len(stages)), np.zeros(len(stages))
    for s in range(1, len(stages)):
        forward[s] = forward[s - 1] + stages[s - 1, FORWARD] + stages[s - 1, SEND]
    for s in range(len(stages) - 2, -1, -1):
        backward[s] = backward[s + 1] + (stages[s + 1, INPUT] + stages[s + 1, AGAIN]) + stages[s, SEND]
    return forward, backward


@inlined
def _tails(stages: Floats, scales: Floats) -> Floats:
    """[F, I or W, stage, micro-batch]: the least time from the end of that operation to the end of the step.

    What is left is the rest of the micro-batch's way, on each stage of it the younger ones, which come in order, their
    weight gradients, and the step on the host after the last of these.
    """
    S, m = len(stages), len(scales)  # noqa: N806 - the field's letter
    remaining_time = np.zeros((3, S, m))
    backward = stages[:, INPUT]
    for j in range(m - 1, -1, -1):
        last = j == m - 1
        own, next_ = scales[j], scales[min(j + 1, m - 1)]
        for s in range(S):
            if last:
                remaining_time[W, s, j] = stages[s, DRAIN] + stages[s, STEP]
            else:
                remaining_time[W, s, j] = remaining_time[W, s, j + 1] + next_ * stages[s, WEIGHT]
            least = remaining_time[W, s, j] + own * stages[s, WEIGHT]
            if not last:
                least = max(least, remaining_time[I, s, j + 1] + next_ * backward[s])
            if s > 0:
                least = max(least, remaining_time[I, s - 1, j] + own * stages[s - 1, SEND] + own * backward[s - 1])
            remaining_time[I, s, j] = least
        for s in range(S - 1, -1, -1):
            if s == S - 1:
                least = remaining_time[I, s, j] + own * backward[s]
            else:
                least = remaining_time[F, s + 1, j] + own * stages[s, SEND] + own * stages[s + 1, FORWARD]
            if not last:
                least = max(least, remaining_time[F, s, j + 1] + next_ * stages[s, FORWARD])
            remaining_time[F, s, j] = least
    return remaining_time


@inlined
def _totals(stages: Floats, device_of: Ints, devices: int, scales: Floats) -> tuple[Floats, Floats]:
    """The time of all operations of each device, and its bytes kept for one backward: workspace and reload."""
    whole, longest = scales.sum(), scales.max()
    rest, reserve = np.zeros(devices), np.zeros(devices)
    for s in range(len(stages)):
        d = device_of[s]
        rest[d] += whole * (stages[s, FORWARD] + (stages[s, INPUT] + stages[s, AGAIN]) + stages[s, WEIGHT])
        reserve[d] = max(reserve[d], longest * (stages[s, WORKSPACE] + stages[s, MOVED]))
    return rest, reserve


@inlined
def _most_transfers(stages: Floats, device_of: Ints, devices: int, micro_batches: int) -> tuple[int, int]:
    """The most offloads of a device, and the most transfers of all kinds."""
    offloads, others = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    for s in range(len(stages)):
        if stages[s, MOVED] > 0:
            offloads[device_of[s]] += micro_batches
        if stages[s, HOSTED] > 0:
            others[device_of[s]] += 2
    return offloads.max(), (2 * offloads + others).max()


@inlined
def begun(
    stages: Floats, device_of: Ints, capacity: Floats, down: Ints, up: Ints, host: Floats, scales: Floats,
    policy: Floats, most: Ints, whole: bool,
) -> tuple[Step, State]:  # fmt: skip
    """A step before its first operation; who does not schedule the whole of it has no use for what is after."""
    S, devices, m = len(stages), len(capacity), len(scales)  # noqa: N806 - the field's letter
    stages_of, count, period = _stages_by_device(stages, device_of, devices)
    to_stage, from_last = _depths(stages)
    after_forwards, first = np.zeros(S, np.int64), policy[BACKWARDS] if len(policy) > BACKWARDS else 0.0
    for s in range(S):
        if first == HOSTS_FIRST and stages[s, HOSTED] <= 0:
            from_last[s] += 2 * m * period
            after_forwards[s] = 1
        elif first >= BY_STAGE:
            from_last[s] = (S - 1 - s) * m * period
            after_forwards[s] = 0 if first == BY_DEEP_STAGE and s >= S - DEEP * devices else 1
    remaining_time = _tails(stages, scales) if whole else np.zeros((3, S, m))
    rest, reserve = _totals(stages, device_of, devices, scales)
    step = Step(
        stages, device_of, capacity, down, up, host, scales, most, stages_of, count, to_stage, from_last,
        remaining_time,
        reserve, period, policy[BACKLOG], policy[WAIT_LIMIT], int(policy[HORIZON]), int(policy[PREFETCH]),
        policy[AGE] * period, int(policy[AHEAD]), after_forwards,
    )  # fmt: skip
    offloads, transfers = _most_transfers(stages, device_of, devices, m)
    # One array for many rows: to make one takes as long as ten operations.
    own, stage, stream = np.zeros((10, devices)), np.zeros((5, S), np.int64), np.zeros((4, 2 * devices))
    numbers, streams = np.zeros((8, devices), np.int64), np.zeros((3, 2 * devices), np.int64)
    times, first_inputs, gone = np.full((3, S, m), NEVER), np.zeros((2, S)), np.empty((2, devices, offloads))
    times[0, 0, :] = 0.0
    first_inputs[0, 1:] = NEVER
    stream[1, :], stream[3, :] = NEVER, -1.0
    state = State(
        rest, stage[0], stage[1], stage[2], stage[3], stage[4], times[0], times[1], times[2], first_inputs[0],
        first_inputs[1], np.zeros(m, np.int64), own[0], own[1], own[2], own[3], own[4], own[9],
        numbers[0], numbers[1], numbers[2], numbers[3], own[5], gone[0], gone[1],
        numbers[4], numbers[5], numbers[6], numbers[7], own[8], own[6], np.empty((2 * devices, transfers, 3), np.int64),
        np.empty((2 * devices, transfers)), streams[0], streams[1], stream[0], stream[1], stream[2],
        stream[3], streams[2], own[7], np.zeros(1, np.int64),
    )  # fmt: skip
    return step, state
