"""Lower bounds that hold for every plan of a problem, whatever its schedule, recomputation and offload."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

from debubble.costs import Units
from debubble.errors import readable, readable_bytes
from debubble.ir import InfeasibleError, Number, StageCosts
from debubble.planners.bounds.host_steps import finished_units, least_host_steps
from debubble.planners.bounds.ramps import Pieces, earliest_host_step, pieces_of_stages, pieces_of_units, ramps_bound
from debubble.planners.bounds.whole_units import contiguous_bound, granular_bound
from debubble.planners.problem import FixedStages, ModelUnits, Problem

WORK_AND_PATH = "work and the path of one micro-batch"
GRANULAR = "the work of every device, once forwards reach it, where units are assigned whole and states fit"
CONTIGUOUS = (
    "the work of every device, once forwards reach it, where units are assigned whole in runs and states fit, with as"
    " many stages on every device"
)
RAMPS = "the devices' work, with the warm-up and cool-down that memory and links allow"
WITH_HOST_STEPS = f"{RAMPS}, and the CPU optimizer steps of the device with most of them, after the last forward"
WITH_OPTIMIZER = f"{RAMPS}, and the optimizer step, of devices after the pipeline or of hosts after the last gradient"

OF_ORDERS = "every order of these stages, by a search of bounds"
"""The argument of a bound that a planner of given stages found itself."""


@dataclass(frozen=True)
class Bound:
    """A time that no plan's pipeline, or no plan's step, beats, and the argument that says so, in words."""

    time: Number
    argument: str


def proven_bound(problem: Problem) -> Bound:
    """The best of the bounds on the pipeline that hold for every plan of a problem; they are worked out once."""
    return _bounds(problem)[0]


def proven_step_bound(problem: Problem) -> Bound:
    """The best of the bounds on the whole step, with gradient reduction and optimizer, that hold for every plan."""
    return _bounds(problem)[1]


def _bounds(problem: Problem) -> tuple[Bound, Bound]:
    entries, tail = problem.entries, problem.tail
    key = (
        id(entries), id(tail), problem.devices, problem.micro_batches, problem.chunks, problem.objective, problem.target
    )  # fmt: skip
    if key not in _proven:
        pieces = _pieces(problem)
        host_steps = least_host_steps(pieces) if _has_ramps(problem) else 0.0
        pipeline = _best_bound(problem, pieces, host_steps)
        _proven[key] = pipeline, _best_step_bound(problem, pieces, host_steps, pipeline)
        for part in filter(None, (entries, tail)):
            weakref.finalize(part, _proven.pop, key, None)
    return _proven[key]


_proven: dict[tuple[object, ...], tuple[Bound, Bound]] = {}
"""Bounds of pipeline and step for as long as the costs that they are of: problems that differ in their budget share
them."""


def _best_step_bound(problem: Problem, pieces: Pieces, host_steps: float, pipeline: Bound) -> Bound:
    best = Bound(problem.step_bound(pipeline.time), pipeline.argument)
    workload, tail = problem.workload, problem.tail
    if tail is None or not isinstance(workload, ModelUnits) or workload.units.on_devices or not _has_ramps(problem):
        return best
    time = _ramps(pieces, host_steps, least=float(pipeline.time), after=tail.optimizer)
    return max(best, Bound(time + tail.min_seconds, WITH_OPTIMIZER), key=_time)


def _has_ramps(problem: Problem) -> bool:
    """Ramps are counted in one time for all devices, and for micro-batches that are alike."""
    return problem.objective == "makespan" and problem.equally_long


def _best_bound(problem: Problem, pieces: Pieces, host_steps: float) -> Bound:
    best = Bound(lower_bound(problem), WORK_AND_PATH)
    ramps = _has_ramps(problem)
    arrivals = ramps and len(set(pieces.rooms)) == 1
    if isinstance(problem.workload, ModelUnits):
        best = max(best, Bound(granular_bound(pieces, arrivals=arrivals), GRANULAR), key=_time)
    if ramps:
        argument = WITH_HOST_STEPS if host_steps else RAMPS
        best = max(best, Bound(_ramps(pieces, host_steps), argument), key=_time)
    if isinstance(problem.workload, ModelUnits) and not assigns_freely(problem):
        best = max(best, Bound(bound_of_equal_counts(problem, least=best.time), CONTIGUOUS), key=_time)
    return best


def _ramps(pieces: Pieces, host_steps: float, *, least: float = 0.0, after: float = 0.0) -> float:
    """The bound of the ramps, with what CPU optimizer steps of at least so long say."""
    time = ramps_bound(pieces, least=least, after=after, host_steps=host_steps)
    if not host_steps or math.isinf(time):
        return time
    # A plan takes longer than this, or its CPU steps are short enough for every device to have some of the largest.
    within = MAX_PLAN_RATIO * time
    longest = within - earliest_host_step(pieces)
    for finished in finished_units(pieces, longest=longest, least=host_steps / MAX_HOST_STEPS):
        time = max(time, min(within, ramps_bound(pieces, least=least, after=after, finished=finished)))
    return time


MAX_PLAN_RATIO = 1.3
"""Times of a bound that a plan is assumed to take at most, to raise the bound."""
MAX_HOST_STEPS = 6
"""CPU steps of a device that are too many to be told apart: whole units say little then."""


def assigns_freely(problem: Problem) -> bool:
    """Tell whether devices may have unlike numbers of stages: where neither `chunks` nor a target says how many."""
    return problem.chunks is None and problem.levers is None


def bound_of_equal_counts(problem: Problem, *, least: Number) -> float:
    """The least time of a model's pipeline if every device has as many stages; `least` is known to be needed."""
    pieces = _pieces(problem)
    most = len(pieces.pieces) // problem.devices
    chunks = range(1, most + 1) if problem.chunks is None else (problem.chunks,)
    arrivals = _has_ramps(problem) and len(set(pieces.rooms)) == 1
    return contiguous_bound(pieces, chunks=chunks, least=float(least), arrivals=arrivals)


def _time(bound: Bound) -> Number:
    return bound.time


def _pieces(problem: Problem) -> Pieces:
    scales = problem.entries.micro_batch_scale
    count = problem.micro_batches if scales is None else float(sum(scales))
    match problem.workload:
        case FixedStages(costs):
            rooms = [limit - float(costs.static_of(d)) for d, limit in enumerate(problem.limits)]
            return pieces_of_stages(costs, rooms=rooms, micro_batches=count)
        case ModelUnits(units):
            rooms = [limit - float(units.static) for limit in problem.limits]
            return pieces_of_units(units, rooms=rooms, micro_batches=count)


def lower_bound(problem: Problem) -> Number:
    """A time that the pipeline's part of no plan for the problem beats.

    Work: the busiest device has at least its share of all work.  Path: the first micro-batch goes down and up through
    all stages, from stage 0's device and back to it, and its last weight gradients may be done next to that.  For fixed
    stages, device d also idles while the first forward is on its way to it, which counts in the makespan alone.
    """
    match problem.workload:
        case FixedStages(costs):
            return _bound_of_stages(problem, costs)
        case ModelUnits(units):
            return _bound_of_units(problem, units)


def _bound_of_units(problem: Problem, units: Units) -> Number:
    m = problem.whole_micro_batches
    path = problem.shortest * sum(u.forward + u.backward_input for u in units.units)
    # The path above is that of tokens that attend to the fewest keys.
    work = [unit.work for unit in units.average.units]
    return max(m * sum(work) / _paces(problem, units), path, m * max(work))


def _paces(problem: Problem, units: Units) -> Number:
    """The pace of all devices, in that of the fastest type; each is taken to be as fast as in its best unit."""
    if not units.on_devices:
        return problem.devices
    paces = {
        id(table): max(fast.work / unit.work for fast, unit in zip(units.units, table, strict=True) if unit.work)
        for table in units.on_devices
    }
    return sum(paces[id(table)] for table in units.on_devices)


def _bound_of_stages(problem: Problem, costs: StageCosts) -> Number:
    m = problem.whole_micro_batches
    path = problem.shortest * sum(f + i for f, i in zip(costs.forward, costs.backward_input, strict=True))
    bound: Number = max(path, m * sum(costs.work(s) for s in range(costs.stages)) / problem.devices)
    if costs.stages == problem.devices and problem.objective == "makespan":
        arrival: Number = 0
        for s in range(costs.stages):
            bound = max(bound, arrival + m * costs.work(s))
            arrival += problem.shortest * (costs.forward[s] + costs.communication[s])
    if problem.objective == "span":
        bound = max(bound, *(m * costs.work(s) for s in range(costs.stages)))
    return bound


def check_states(problem: Problem) -> None:
    """Raise InfeasibleError at once for what no plan can fit: model states larger than all devices together.

    States that can be the host's count with what stays on the device.
    """
    if isinstance(problem.workload, FixedStages):
        return
    units = problem.workload.units
    needed = sum(float(u.on_host.static if u.on_host and units.hostable else u.static) for u in units.units)
    capacity = sum(limit - float(units.static) for limit in problem.limits)
    if needed > capacity:
        with_host = " with the optimizer on the host" if units.hostable else ""
        together = (
            f"all {problem.devices} pipeline devices together" if problem.devices > 1 else "the pipeline's device"
        )
        size = readable if problem.tail is None else readable_bytes  # a units file may have any unit
        raise InfeasibleError(
            f"The model's states alone need {size(needed)}{with_host}, but a plan may use {size(capacity)}"
            f" on {together}.",
            missing=needed - capacity,
        )
