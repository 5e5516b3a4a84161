"""The list scheduler's arrays: the constants of a step, and the state of its devices, streams and links."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir.arrays import Floats, Ints
from debubble.kernels import inlined
from debubble.planners.joint.list_scheduling.stage_table import (
    AGE,
    AHEAD,
    BACKLOG,
    BACKWARDS,
    BY_DEEP_STAGE,
    BY_STAGE,
    DEEP_STAGES,
    DRAIN,
    FORWARD,
    HORIZON,
    HOSTED,
    HOSTS_FIRST,
    INPUT,
    OFFLOADED,
    PREFETCH,
    RECOMPUTE,
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
    """The constants of the step to schedule.

    Attributes:
        stages: A row per stage; it and the next five are those of StageTable.
        device_of: Device of each stage.
        capacity: Bytes for activations per device.
        down: Per device, its lane to the host.
        up: Per device, its lane from the host.
        host: Bytes of host memory for activations per device.
        scales: Length of each micro-batch, a factor on its times and bytes.
        max_in_flight: Limit on micro-batches between forward and backward per stage.
        stages_of: [device, index]: the stages of a device.
        stage_counts: Number of stages per device.
        forward_depth: Per stage, the time from the first stage to it.
        backward_priority: Per stage, the time from the last stage back to it; increased by more than a step for stages
            whose backwards come after all micro-batches of other stages.
        remaining_time: [F, I or W, stage, micro-batch]: lower bound on the time from its end to the end of the step.
        reserve: Bytes per device reserved for one backward: its workspace and its reload.
        period: The time of a micro-batch on the busiest device.
        backlog: Policy entry BACKLOG.
        timeout: Policy entry WAIT_LIMIT.
        horizon: Policy entry HORIZON.
        prefetch: Policy entry PREFETCH.
        age: Policy entry AGE, in time.
        ahead: Policy entry AHEAD.
        after_forwards: Per stage, 1 if its backwards wait for forwards.
    """

    stages: Floats
    device_of: Ints
    capacity: Floats
    down: Ints
    up: Ints
    host: Floats
    scales: Floats
    max_in_flight: Ints
    stages_of: Ints
    stage_counts: Ints
    forward_depth: Floats
    backward_priority: Floats
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
    """The state of a step in progress.  Unknown times are NEVER.

    Attributes:
        remaining_work: Per device, the time of its remaining compute operations.
        next_f: Per stage, the micro-batch of its next forward.
        next_i: Per stage, that of its next backward.
        next_w: Per stage, that of its next weight gradient.
        next_l: Per stage, that of its next reload.
        next_r: Per stage, that of its next recomputation, fused or separate.
        input_ready: [stage, micro-batch]: when a forward has its input.
        gradient_ready: [stage, micro-batch]: when a backward has its gradient.
        transfer_end: [stage, micro-batch]: end of its offload, or of its reload once that is decided.
        input_arrival: Per stage, when its first input arrives, regardless of its parameters.
        parameters_loaded: Per stage, when the host has sent its parameters.
        progress: Per micro-batch, how many of its operations, F down and I up, have started.
        wake: Per device, when it decides next.
        compute_start: Per device, start of its last compute operation.
        compute_end: Per device, end of that operation.
        freed_at_end: Per device, bytes freed at that end and not yet claimed by a reload later in the list.
        used_bytes: Per device, bytes in use, without those of ended offloads.
        host_bytes: Per device, bytes of activations on its host; counted until their backwards start.
        in_flight: Per device, micro-batches of its stages between forward and backward.
        waiting_weights: Per device, number of delayed weight gradients.
        reloads_in_flight: Per device, reloads whose backwards have not started.
        recomputed_ahead: Per device, recomputed micro-batches that wait for their gradients.
        host_free: Per device, when its host has finished the known optimizer steps.
        offload_end: [device, index]: when each of its offloads ends.
        offload_bytes: [device, index]: the bytes freed then.
        offloads_listed: Per device, number of offloads in its list.
        offloads_served: Per device, number of offloads that the link has served.
        offloads_ended: Per device, number of offloads ended at its last decision.
        offloads_at_start: Per device, number of offloads ended at the start of its last compute operation.
        freed_since_start: Per device, bytes of the offloads ended since.
        offloading_bytes: Per device, bytes of listed offloads that had not ended at its last decision.
        transfers: [stream, index]: kind, stage and micro-batch of a transfer.
        transfer_ready: [stream, index]: when it may request the link, apart from earlier transfers of its stream.
        next_transfer: Per stream, index of the next transfer to serve.
        transfer_count: Per stream, number of its transfers.
        stream_free: Per stream, end of its last served transfer.
        request: Per stream, when its next transfer requests the link.
        lane_free: Per link lane, end of the last served transfer.
        last_request: Per link lane, when that transfer requested it.
        last_device: Per link lane, the device of that transfer.
        gathered: Per device, 1 + the stage whose parameters its last operation used; 0 before its first one.
        gathered_before: Per device, 1 + the stage before that one, whose parameters are still gathered.
        run_start: Per device, start of its first operation in a row of the last stage.
        makespan: [0]: the last end so far.
        placed: [0]: number of recorded operations.
    """

    remaining_work: Floats
    next_f: Ints
    next_i: Ints
    next_w: Ints
    next_l: Ints
    next_r: Ints
    input_ready: Floats
    gradient_ready: Floats
    transfer_end: Floats
    input_arrival: Floats
    parameters_loaded: Floats
    progress: Ints
    wake: Floats
    compute_start: Floats
    compute_end: Floats
    freed_at_end: Floats
    used_bytes: Floats
    host_bytes: Floats
    in_flight: Ints
    waiting_weights: Ints
    reloads_in_flight: Ints
    recomputed_ahead: Ints
    host_free: Floats
    offload_end: Floats
    offload_bytes: Floats
    offloads_listed: Ints
    offloads_served: Ints
    offloads_ended: Ints
    offloads_at_start: Ints
    freed_since_start: Floats
    offloading_bytes: Floats
    transfers: Ints
    transfer_ready: Floats
    next_transfer: Ints
    transfer_count: Ints
    stream_free: Floats
    request: Floats
    lane_free: Floats
    last_request: Floats
    last_device: Ints
    gathered: Ints
    gathered_before: Ints
    run_start: Floats
    makespan: Floats
    placed: Ints


@inlined
def index_of(number: int) -> int:
    """Convert a nonnegative number to an index that compiled code need not check for negative values."""
    return int(np.uint32(number))


@inlined
def _stages_by_device(stages: Floats, device_of: Ints, devices: int) -> tuple[Ints, Ints, float]:
    """The stages of each device, their number, and the time of a micro-batch on the busiest device."""
    stages_of = np.zeros((devices, len(stages)), np.int64)
    count, work = np.zeros(devices, np.int64), np.zeros(devices)
    for s in range(len(stages)):
        d = device_of[s]
        stages_of[d, count[d]] = s
        count[d] += 1
        work[d] += stages[s, FORWARD] + (stages[s, INPUT] + stages[s, RECOMPUTE]) + stages[s, WEIGHT]
    return stages_of, count, work.max()


@inlined
def _depths(stages: Floats) -> tuple[Floats, Floats]:
    """Per stage, the time of a micro-batch from the first stage to it, and from the last stage back to it."""
    forward, backward = np.zeros(len(stages)), np.zeros(len(stages))
    for s in range(1, len(stages)):
        forward[s] = forward[s - 1] + stages[s - 1, FORWARD] + stages[s - 1, SEND]
    for s in range(len(stages) - 2, -1, -1):
        backward[s] = backward[s + 1] + (stages[s + 1, INPUT] + stages[s + 1, RECOMPUTE]) + stages[s, SEND]
    return forward, backward


@inlined
def _remaining_times(stages: Floats, scales: Floats) -> Floats:
    """[F, I or W, stage, micro-batch]: lower bound on the time from the end of that operation to the end of the step.

    After it come the rest of the micro-batch's path, the later micro-batches on each of those stages, their weight
    gradients, and the optimizer step on the host after the last of these.
    """
    S, m = len(stages), len(scales)  # noqa: N806 - the field's letter
    remaining_time = np.zeros((3, S, m))
    backward = stages[:, INPUT]
    for j in range(m - 1, -1, -1):
        last = j == m - 1
        scale, next_scale = scales[j], scales[min(j + 1, m - 1)]
        for s in range(S):
            if last:
                remaining_time[W, s, j] = stages[s, DRAIN] + stages[s, STEP]
            else:
                remaining_time[W, s, j] = remaining_time[W, s, j + 1] + next_scale * stages[s, WEIGHT]
            remaining = remaining_time[W, s, j] + scale * stages[s, WEIGHT]
            if not last:
                remaining = max(remaining, remaining_time[I, s, j + 1] + next_scale * backward[s])
            if s > 0:
                path = remaining_time[I, s - 1, j] + scale * stages[s - 1, SEND] + scale * backward[s - 1]
                remaining = max(remaining, path)
            remaining_time[I, s, j] = remaining
        for s in range(S - 1, -1, -1):
            if s == S - 1:
                remaining = remaining_time[I, s, j] + scale * backward[s]
            else:
                remaining = remaining_time[F, s + 1, j] + scale * stages[s, SEND] + scale * stages[s + 1, FORWARD]
            if not last:
                remaining = max(remaining, remaining_time[F, s, j + 1] + next_scale * stages[s, FORWARD])
            remaining_time[F, s, j] = remaining
    return remaining_time


@inlined
def _device_totals(stages: Floats, device_of: Ints, devices: int, scales: Floats) -> tuple[Floats, Floats]:
    """Per device, the total time of its operations, and the bytes reserved for one backward: workspace and reload."""
    total, longest = scales.sum(), scales.max()
    work, reserve = np.zeros(devices), np.zeros(devices)
    for s in range(len(stages)):
        d = device_of[s]
        work[d] += total * (stages[s, FORWARD] + (stages[s, INPUT] + stages[s, RECOMPUTE]) + stages[s, WEIGHT])
        reserve[d] = max(reserve[d], longest * (stages[s, WORKSPACE] + stages[s, OFFLOADED]))
    return work, reserve


@inlined
def _transfer_limits(stages: Floats, device_of: Ints, devices: int, micro_batches: int) -> tuple[int, int]:
    """The maximum numbers, over devices, of offloads and of transfers of all kinds."""
    offloads, host_transfers = np.zeros(devices, np.int64), np.zeros(devices, np.int64)
    for s in range(len(stages)):
        if stages[s, OFFLOADED] > 0:
            offloads[device_of[s]] += micro_batches
        if stages[s, HOSTED] > 0:
            host_transfers[device_of[s]] += 2
    return offloads.max(), (2 * offloads + host_transfers).max()


@inlined
def initial_state(
    stages: Floats, device_of: Ints, capacity: Floats, down: Ints, up: Ints, host: Floats, scales: Floats,
    policy: Floats, max_in_flight: Ints, full_step: bool,
) -> tuple[Step, State]:  # fmt: skip
    """The constants and the initial state of a step; bounds on remaining times are computed for a full step only."""
    S, devices, m = len(stages), len(capacity), len(scales)  # noqa: N806 - the field's letter
    stages_of, count, period = _stages_by_device(stages, device_of, devices)
    forward_depth, backward_priority = _depths(stages)
    after_forwards, priority = np.zeros(S, np.int64), policy[BACKWARDS] if len(policy) > BACKWARDS else 0.0
    for s in range(S):
        if priority == HOSTS_FIRST and stages[s, HOSTED] <= 0:
            backward_priority[s] += 2 * m * period
            after_forwards[s] = 1
        elif priority >= BY_STAGE:
            backward_priority[s] = (S - 1 - s) * m * period
            after_forwards[s] = 0 if priority == BY_DEEP_STAGE and s >= S - DEEP_STAGES * devices else 1
    remaining_time = _remaining_times(stages, scales) if full_step else np.zeros((3, S, m))
    remaining_work, reserve = _device_totals(stages, device_of, devices, scales)
    step = Step(
        stages, device_of, capacity, down, up, host, scales, max_in_flight, stages_of, count, forward_depth,
        backward_priority, remaining_time, reserve, period,
        policy[BACKLOG], policy[WAIT_LIMIT], int(policy[HORIZON]), int(policy[PREFETCH]),
        policy[AGE] * period, int(policy[AHEAD]), after_forwards,
    )  # fmt: skip
    offloads, transfers = _transfer_limits(stages, device_of, devices, m)
    # Rows share one array, because an allocation takes as long as ten operations.
    device, stage, stream = np.zeros((11, devices)), np.zeros((5, S), np.int64), np.zeros((4, 2 * devices))
    numbers, streams = np.zeros((10, devices), np.int64), np.zeros((3, 2 * devices), np.int64)
    times, first_inputs, gone = np.full((3, S, m), NEVER), np.zeros((2, S)), np.empty((2, devices, offloads))
    times[0, 0, :] = 0.0
    first_inputs[0, 1:] = NEVER
    stream[1, :], stream[3, :] = NEVER, -1.0
    state = State(
        remaining_work, stage[0], stage[1], stage[2], stage[3], stage[4], times[0], times[1], times[2], first_inputs[0],
        first_inputs[1], np.zeros(m, np.int64), device[0], device[1], device[2], device[3], device[4], device[9],
        numbers[0], numbers[1], numbers[2], numbers[3], device[5], gone[0], gone[1],
        numbers[4], numbers[5], numbers[6], numbers[7], device[8], device[6],
        np.empty((2 * devices, transfers, 3), np.int64), np.empty((2 * devices, transfers)),
        streams[0], streams[1], stream[0], stream[1], stream[2], stream[3], streams[2],
        numbers[8], numbers[9], device[10], device[7], np.zeros(1, np.int64),
    )  # fmt: skip
    return step, state
