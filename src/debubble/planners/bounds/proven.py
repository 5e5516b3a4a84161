"""Lower bounds for every plan of a problem, with any schedule, recomputation and offload."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

from debubble.costs import Units
from debubble.errors import readable, readable_bytes
from debubble.ir import InfeasibleError, Number, StageCosts
from debubble.planners.bounds.host_steps import finished_units, min_host_steps
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

ORDER_SEARCH = "every order of these stages, by a search of bounds"
"""The argument of a bound that the planner of a problem with fixed stages proved."""


@dataclass(frozen=True)
class Bound:
    """A lower bound on the pipeline or the step of every plan, and its argument in words."""

    time: Number
    argument: str


def proven_bound(problem: Problem) -> Bound:
    """The largest lower bound on the pipeline of every plan of a problem; it is cached."""
    return _bounds(problem)[0]


def proven_step_bound(problem: Problem) -> Bound:
    """The largest lower bound on the full step of every plan, with gradient reduction and optimizer; it is cached."""
    return _bounds(problem)[1]


def _bounds(problem: Problem) -> tuple[Bound, Bound]:
    entries, tail = problem.entries, problem.tail
    key = (
        id(entries), id(tail), problem.devices, problem.micro_batches, problem.chunks, problem.objective, problem.target
    )  # fmt: skip
    if key not in _bound_cache:
        pieces = _pieces(problem)
        host_steps = min_host_steps(pieces) if _has_ramps(problem) else 0.0
        pipeline = _best_bound(problem, pieces, host_steps)
        _bound_cache[key] = pipeline, _best_step_bound(problem, pieces, host_steps, pipeline)
        for keyed in filter(None, (entries, tail)):
            weakref.finalize(keyed, _bound_cache.pop, key, None)
    return _bound_cache[key]


_bound_cache: dict[tuple[object, ...], tuple[Bound, Bound]] = {}
"""Cached bounds of pipeline and step, dropped with their costs; problems that differ only in their budget share one."""


def _best_step_bound(problem: Problem, pieces: Pieces, host_steps: float, pipeline: Bound) -> Bound:
    best = Bound(problem.step_bound(pipeline.time), pipeline.argument)
    workload, tail = problem.workload, problem.tail
    if tail is None or not isinstance(workload, ModelUnits) or workload.units.on_devices or not _has_ramps(problem):
        return best
    time = _ramps(pieces, host_steps, known_bound=float(pipeline.time), after=tail.optimizer)
    return max(best, Bound(time + tail.min_seconds, WITH_OPTIMIZER), key=_time)


def _has_ramps(problem: Problem) -> bool:
    """Whether the ramps bound applies: it needs the makespan objective and micro-batches of equal length."""
    return problem.objective == "makespan" and problem.equally_long


def _best_bound(problem: Problem, pieces: Pieces, host_steps: float) -> Bound:
    best = Bound(lower_bound(problem), WORK_AND_PATH)
    ramps = _has_ramps(problem)
    arrivals = ramps and len(set(pieces.capacities)) == 1
    if isinstance(problem.workload, ModelUnits):
        best = max(best, Bound(granular_bound(pieces, arrivals=arrivals), GRANULAR), key=_time)
    if ramps:
        argument = WITH_HOST_STEPS if host_steps else RAMPS
        best = max(best, Bound(_ramps(pieces, host_steps), argument), key=_time)
    if isinstance(problem.workload, ModelUnits) and not assigns_freely(problem):
        best = max(best, Bound(bound_of_equal_counts(problem, known_bound=best.time), CONTIGUOUS), key=_time)
    return best


def _ramps(pieces: Pieces, host_steps: float, *, known_bound: float = 0.0, after: float = 0.0) -> float:
    """The ramps bound, given that the CPU optimizer steps of some device take at least `host_steps`."""
    time = ramps_bound(pieces, known_bound=known_bound, after=after, host_steps=host_steps)
    if not host_steps or math.isinf(time):
        return time
    # Either a plan takes longer than `cutoff`, or its CPU steps are so short that every device has some of the largest.
    cutoff = MAX_PLAN_RATIO * time
    longest = cutoff - earliest_host_step(pieces)
    for finished in finished_units(pieces, longest=longest, min_step=host_steps / MAX_HOST_STEPS):
        time = max(time, min(cutoff, ramps_bound(pieces, known_bound=known_bound, after=after, finished=finished)))
    return time


MAX_PLAN_RATIO = 1.3
"""Plans are assumed to take at most this multiple of a bound, in order to raise the bound up to it."""
MAX_HOST_STEPS = 6
"""Kinds of units are skipped if a device's CPU steps are more than this multiple of one of theirs: they add little."""


def assigns_freely(problem: Problem) -> bool:
    """Whether devices may have different numbers of stages: neither `chunks` nor a target fixes them."""
    return problem.chunks is None and problem.levers is None


def bound_of_equal_counts(problem: Problem, *, known_bound: Number) -> float:
    """A lower bound on the pipeline if all devices have equally many stages; at least `known_bound`."""
    pieces = _pieces(problem)
    max_chunks = len(pieces.pieces) // problem.devices
    chunks = range(1, max_chunks + 1) if problem.chunks is None else (problem.chunks,)
    arrivals = _has_ramps(problem) and len(set(pieces.capacities)) == 1
    return contiguous_bound(pieces, chunks=chunks, known_bound=float(known_bound), arrivals=arrivals)


def _time(bound: Bound) -> Number:
    return bound.time


def _pieces(problem: Problem) -> Pieces:
    scales = problem.entries.micro_batch_scale
    count = problem.micro_batches if scales is None else float(sum(scales))
    match problem.workload:
        case FixedStages(costs):
            capacities = [limit - float(costs.static_of(d)) for d, limit in enumerate(problem.limits)]
            return pieces_of_stages(costs, capacities=capacities, micro_batches=count)
        case ModelUnits(units):
            capacities = [limit - float(units.static) for limit in problem.limits]
            return pieces_of_units(units, capacities=capacities, micro_batches=count)


def lower_bound(problem: Problem) -> Number:
    """The simplest lower bound on the pipeline of every plan of the problem.

    Work: the busiest device has at least an even share of all work.  Path: the first micro-batch passes forward and
    backward through all stages; its last weight gradients may overlap with that.  With fixed stages, device d is also
    idle until the first forward arrives, which counts for the makespan only.
    """
    match problem.workload:
        case FixedStages(costs):
            return _bound_of_stages(problem, costs)
        case ModelUnits(units):
            return _bound_of_units(problem, units)


def _bound_of_units(problem: Problem, units: Units) -> Number:
    m = problem.whole_micro_batches
    path = problem.shortest * sum(u.forward + u.backward_input for u in units.units)
    # The path is that of the tokens that attend to the fewest keys, the work that of average tokens.
    work = [unit.work for unit in units.average.units]
    return max(m * sum(work) / _speed(problem, units), path, m * max(work))


def _speed(problem: Problem, units: Units) -> Number:
    """Total speed of the devices relative to the fastest type; a device counts as fast as for its best unit."""
    if not units.on_devices:
        return problem.devices
    speeds = {
        id(table): max(fast.work / unit.work for fast, unit in zip(units.units, table, strict=True) if unit.work)
        for table in units.on_devices
    }
    return sum(speeds[id(table)] for table in units.on_devices)


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
    """Raise InfeasibleError if the model states exceed the memory of all devices together.

    States that can be offloaded count with the bytes that stay on the device.
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
