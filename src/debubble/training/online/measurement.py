"""Measured costs of a run's operations, their drift, and the effect of a switch on the step time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from debubble.ir import Kind, Number, Op, Schedule, StageCosts
from debubble.ir.lowering.op_costs import OpCosts
from debubble.ir.trace import TraceEvent, TraceStep
from debubble.simulator import simulate

TIMED_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L, Kind.D, Kind.S, Kind.P)
"""Kinds whose times are measured on one device; messages involve two."""


def measured_costs(schedule: Schedule, costs: StageCosts, steps: Sequence[TraceStep]) -> StageCosts:
    """Scale the costs' times to some measured steps of the schedule: medians over steps and micro-batches.

    Sizes stay.  A fused backward keeps its assumed division into I and W.  Kinds that did not run keep their times,
    except recomputation, which is scaled like forwards.
    """
    events = [{Op.parse(event.name): event for event in step.events} for step in steps]
    speed = _speeds(schedule, costs, events)
    messages = _message_times(events)

    def scaled(times: Sequence[Number], *kinds: Kind) -> list[float]:
        first = (next((speed[kind, s] for kind in kinds if (kind, s) in speed), 1.0) for s in range(costs.stages))
        return [float(time) * factor for time, factor in zip(times, first, strict=True)]

    hosted = schedule.host_steps
    return costs.replace(
        forward=scaled(costs.forward, Kind.F),
        backward_input=scaled(costs.backward_input, Kind.I, Kind.B),
        backward_weight=scaled(costs.backward_weight, Kind.W, Kind.B),
        recompute=scaled(costs.recompute, Kind.R, Kind.F),
        offload=None if costs.offload is None else scaled(costs.offload, Kind.O),
        reload=None if costs.reload is None else scaled(costs.reload, Kind.L),
        gradient_offload=scaled(costs.gradient_offload, Kind.D) if hosted else costs.gradient_offload,
        host_step=scaled(costs.host_step, Kind.S) if hosted else costs.host_step,
        parameter_load=scaled(costs.parameter_load, Kind.P) if hosted else costs.parameter_load,
        communication=[messages.get(s, float(time)) for s, time in enumerate(costs.communication)],
    )


def memory_excess(schedule: Schedule, costs: StageCosts, steps: Sequence[TraceStep]) -> list[float]:
    """Bytes per device by which the peak of some steps exceeded the predicted one; 0 where it did not."""
    predicted = simulate(schedule, costs.with_limit(None)).peak_memory
    samples = [sample for step in steps for sample in step.memory]
    peaks = [max((s.bytes for s in samples if s.device == device), default=0) for device in range(schedule.devices)]
    return [max(0.0, peak - float(expected)) for peak, expected in zip(peaks, predicted, strict=True)]


def with_excess(costs: StageCosts, excess: Sequence[float]) -> StageCosts:
    """The costs with the excess, in bytes per device, added to static memory."""
    static = costs.static if len(costs.static) == len(excess) else costs.static * len(excess)
    return costs.replace(static=[size + more for size, more in zip(static, excess, strict=True)])


def drift(before: StageCosts, after: StageCosts) -> float:
    """Largest relative change of a stage's times: the sum of absolute differences over the sum of the old times.

    A common factor of all times is ignored, because it does not change which order is best.
    """
    old, new = _times(before), _times(after)
    factor = sum(map(sum, new)) / sum(map(sum, old))
    changes = [
        sum(abs(a * factor - b) for a, b in zip(*stage, strict=True)) / (factor * sum(stage[0]))
        for stage in zip(old, new, strict=True)
        if sum(stage[0])
    ]
    return max(changes)


def _times(costs: StageCosts) -> list[tuple[float, ...]]:
    """Times per stage of computation, messages and transfers."""
    groups = (costs.forward, costs.backward_input, costs.backward_weight, costs.communication)
    transfers = [group for group in (costs.offload, costs.reload) if group is not None]
    return [tuple(map(float, times)) for times in zip(*groups, *transfers, strict=True)]


def _speeds(
    schedule: Schedule, costs: StageCosts, steps: Sequence[Mapping[Op, TraceEvent]]
) -> dict[tuple[Kind, int], float]:
    """(kind, stage) -> median of measured over assumed times."""
    op_costs, explicit = OpCosts.from_schedule(schedule, costs), schedule.explicit_recompute
    ratios: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for events in steps:
        for op, event in events.items():
            if op.kind in TIMED_KINDS and (assumed := float(op_costs.time(op, explicit=op[1:] in explicit))):
                ratios[op.kind, op.stage].append((event.end - event.start) / assumed)
    return {key: median(values) for key, values in ratios.items()}


def _message_times(steps: Sequence[Mapping[Op, TraceEvent]]) -> dict[int, float]:
    """Stage -> time of a message to or from the next stage, from the start of the send to the end of the receive.

    It is the mean of both directions, so that clock offsets between devices cancel.  The fastest message of a step
    counts, because the end of a receive may be recorded late if the message is not needed at once.
    """
    times: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for events in steps:
        quickest: dict[tuple[int, Kind], float] = {}
        for op, event in events.items():
            if op.kind in (Kind.RECV_F, Kind.RECV_B):
                forward = op.kind is Kind.RECV_F
                sender = op.stage - 1 if forward else op.stage + 1
                sent = events[Op(Kind.SEND_F if forward else Kind.SEND_B, sender, op.micro_batch)]
                key: tuple[int, Kind] = min(sender, op.stage), op.kind
                quickest[key] = min(event.end - sent.start, quickest.get(key, math.inf))
        for key, time in quickest.items():
            times[key].append(time)
    directions: dict[int, list[float]] = defaultdict(list)
    for (stage, _), times_of_direction in times.items():
        directions[stage].append(median(times_of_direction))
    return {stage: max(0.0, fmean(medians)) for stage, medians in directions.items()}


TOLERANCE = 0.01
"""Relative difference of step times that is always attributed to noise."""
MIN_STANDARD_ERRORS = 2.0
"""Number of standard errors above which a difference is significant."""


@dataclass(frozen=True, kw_only=True)
class SwitchEffect:
    """Seconds per step before and after a switch."""

    before: float
    after: float
    noise: float
    """Seconds by which the two may differ by chance."""

    @property
    def gain(self) -> float:
        """Relative reduction of the step time; negative if steps are slower."""
        return 1 - self.after / self.before

    @property
    def worse(self) -> bool:
        """Whether steps are significantly slower."""
        return self.after - self.before > max(self.noise, TOLERANCE * self.before)


def effect(before: Sequence[float], after: Sequence[float]) -> SwitchEffect:
    """Compare the step times before and after a switch.

    It uses medians, on which a few slow steps (another process, a checkpoint) have no effect.
    """
    return SwitchEffect(
        before=median(before),
        after=median(after),
        noise=MIN_STANDARD_ERRORS * math.hypot(standard_error(before), standard_error(after)),
    )


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the median, estimated from the median absolute deviation under normality."""
    middle = median(values)
    sigma = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * sigma / math.sqrt(len(values))
