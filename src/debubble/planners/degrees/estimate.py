"""Lower bounds and quick plans of one choice of degrees.

A quick plan has balanced stages, the order of 1F1B or interleaved 1F1B, and the least recomputation that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from debubble.costs.host_memory import check_host_states
from debubble.ir import DebubbleError, InfeasibleError
from debubble.planners.bounds.proven import lower_bound
from debubble.planners.bounds.quick_plans import PipelineBounds
from debubble.planners.partitioning.balance import balanced_counts
from debubble.planners.partitioning.local_search import PartitionSearch, PricedSchedule
from debubble.planners.problem import Problem, Solution, closest
from debubble.planners.registry import HostEstimate, planners
from debubble.schedules import schedules
from debubble.search.effort import RECOMPUTE_CHOICE_PRICE
from debubble.simulator import Repricer
from debubble.targets.orders import COMBINED

INTERLEAVED = ("interleaved", "interleaved-less-memory", COMBINED)
"""Orders of quick plans with several stages per device; a target allows one of them."""
CHUNKS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
"""Numbers of stages per device that quick plans try; one is 1F1B, more are interleaved."""
HOST_PLANNER = "chronos"
"""The planner that estimates steps with host offload."""
MAX_QUICK_PAIRS = 2048
"""Number of (stage, micro-batch) pairs up to which a dozen quick plans take a second or two."""


def step_bound(problem: Problem) -> float:
    """Lower bound in seconds on the step of any plan: work of the busiest device plus the shortest tail."""
    return float(problem.step_bound(lower_bound(problem)))


def estimated_step(problem: Problem) -> float:
    """Estimated seconds of a step with optimizer and activation offload; infinite if nothing seems to fit.

    It serves to compare choices; it is not a bound.
    """
    return _host_estimate().estimated_step(problem)


def estimated_uneven_step(problem: Problem) -> float:
    """Estimated seconds of a step on uneven stages without offload; infinite if nothing seems to fit."""
    try:
        return PipelineBounds(problem).uneven_estimate() + _tail(problem)
    except InfeasibleError:
        return math.inf


def quick_host_step(problem: Problem, *, spend: Callable[[float], None] = lambda _: None) -> float:
    """Seconds of a step of a quick plan with host offload.

    `spend` is called with the cost in seconds of the reference machine.  Raises InfeasibleError if none fits.
    """
    return _host_estimate().quick_step(problem, spend)


def _host_estimate() -> HostEstimate:
    estimate = planners[HOST_PLANNER].host_estimate
    assert estimate is not None
    return estimate


def quick_bound(problem: Problem) -> float:
    """Lower bound in seconds on the step of every quick plan, from its order and memory (see `PipelineBounds`).

    Raises InfeasibleError if no quick plan can fit.
    """
    bounds, reasons = _chunk_bounds(problem)
    if not bounds:
        raise _closest_error(reasons)
    return min(bound for bound, _ in bounds)


def quick_step(problem: Problem, *, spend: Callable[[float], None] = lambda _: None) -> tuple[float, Solution]:
    """The fastest quick plan, with the seconds of its step.

    Unless the number of chunks is fixed, numbers are tried in the order of their bounds until the next bound exceeds
    the best step; `spend` is called with the cost of each plan in seconds of the reference machine.  Raises
    InfeasibleError if none fits, even with full recomputation.
    """
    bounds, reasons = _chunk_bounds(problem)
    best: tuple[float, PricedSchedule] | None = None
    for bound, chunks in sorted(bounds):
        if best is not None and bound >= best[0]:
            break
        once, per_pair = RECOMPUTE_CHOICE_PRICE
        spend(once + per_pair * problem.devices * chunks * problem.micro_batches)
        try:
            candidate = _fit(problem, chunks)
        except DebubbleError as reason:
            reasons.append(reason)
        else:
            step = candidate.time + _tail(problem)
            if best is None or step < best[0]:
                best = step, candidate
    if best is None:
        raise _closest_error(reasons)
    return best[0], best[1].solution


def _closest_error(reasons: list[DebubbleError]) -> DebubbleError:
    return closest(reasons) if reasons else InfeasibleError("No schedule has that many chunks.")


def _chunk_bounds(problem: Problem) -> tuple[list[tuple[float, int]], list[DebubbleError]]:
    """The bound of the step for every number of chunks that may fit, and the errors of the others."""
    bounds, reasons = [], []
    pipeline, tail = PipelineBounds(problem), _tail(problem)
    for chunks in _chunks(problem):
        try:
            bounds.append((pipeline.bound(chunks) + tail, chunks))
        except DebubbleError as reason:
            reasons.append(reason)
    return bounds, reasons


def _tail(problem: Problem) -> float:
    """Seconds of the step after the pipeline: quick plans do all gradient reduction and optimizer steps there."""
    return 0.0 if problem.tail is None else problem.tail.after()


def _chunks(problem: Problem) -> list[int]:
    if problem.chunks is not None:
        choices = [problem.chunks]
    elif problem.devices == 1 and not problem.units.gathers:
        choices = [1]
    else:
        # With sharded parameters, a device has gathered those of two chunks at a time.
        choices = [v for v in CHUNKS if problem.devices * v <= len(problem.units.units)]
    return [v for v in choices if problem.allows(_order(problem, v))]


def _order(problem: Problem, chunks: int) -> str:
    if problem.slices > 1:
        return "seq1f1b" if chunks == 1 else "seq1f1b-interleaved"
    names = ("1f1b",) if chunks == 1 else INTERLEAVED
    return next(filter(problem.allows, names), names[0])


def _fit(problem: Problem, chunks: int) -> PricedSchedule:
    units = problem.units
    repricer = _repricer(
        _order(problem, chunks), problem.devices, problem.micro_batches // problem.slices, chunks, problem.slices
    )
    plan = PartitionSearch(problem, units, repricer).fitted(balanced_counts(units, problem.devices * chunks))
    assert plan.partition is not None
    check_host_states(units, plan.partition, plan.schedule)
    return plan


@lru_cache(maxsize=8)
def _repricer(order: str, devices: int, micro_batches: int, chunks: int, slices: int) -> Repricer:
    """The repricer of a quick plan's order; cached, as consecutive choices often have the same order."""
    options: dict[str, Any] = {
        **({"chunks": chunks} if chunks > 1 else {}),
        **({"slices": slices} if slices > 1 else {}),
    }
    return Repricer(schedules[order](devices=devices, micro_batches=micro_batches, **options))
