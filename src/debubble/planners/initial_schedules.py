"""Initial solutions of an order search: published schedules that fit its problem."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from debubble.ir import DebubbleError, InfeasibleError, Number, Placement, Schedule
from debubble.schedules import schedules
from debubble.search.bounds import lower_bound
from debubble.search.effort import DISPATCH_PRICE, LIBRARY_PRICE, SEARCH_PRICE, START_PRICE, Effort
from debubble.search.problem import OrderProblem

MAX_TRIALS = 12
"""Approximate number of schedules that are built and simulated for problems with one stage per device."""
LOOPED = ("interleaved", "interleaved-less-memory", "group-interleaved", "breadth-first")
V_SHAPED = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules with several chunks in looped and in V-shaped placement, without offload and recomputation."""


def initial(problem: OrderProblem, effort: Effort) -> list[Schedule]:
    """The published schedules that fit the problem, fastest first; a search that starts from them is never slower.

    They are PipeOffload (which offloads nothing without a link), AdaOffload with a link and one stage per device, `zb`
    for one stage per device, and LOOPED or V_SHAPED for several.  None of them recomputes or offloads fractions of
    activations.  If effort remains, `zb` also runs its order search, as it does by default, unless the bound on orders
    without offload shows that it cannot be the fastest start.
    """
    if problem.fused_recompute or problem.offload_fraction or problem.asynchronous:
        return []
    linear = problem.placement == Placement.linear(problem.devices)
    build = partial(_built, problem)
    schedules_built: list[Schedule | None] = []
    names = LOOPED if problem.placement == Placement.looped(problem.devices, problem.placement.chunks) else V_SHAPED
    price = START_PRICE * problem.stages * problem.micro_batches * MAX_TRIALS
    effort.spend(price if linear else sum(_price(problem, n) for n in names))
    may_move = problem.offload or problem.costs.offload is None
    if may_move and problem.placement == Placement.looped(problem.devices, problem.placement.chunks):
        schedules_built.append(build("pipeoffload", chunks=problem.placement.chunks))
    if problem.offload and linear:
        schedules_built.append(build("adaoffload"))
    if linear:
        schedules_built.append(build("zb", steps=0))
    else:
        published = (build(name, chunks=problem.placement.chunks) for name in names)
        schedules_built.extend(made for made in published if made is not None and made.placement == problem.placement)
    starts = fastest_first(problem, filter(None, schedules_built))
    bound_without_offload = lower_bound(replace(problem, offload=False, recompute=False))
    if linear and effort.remaining > SEARCH_PRICE and (not starts or problem.value(starts[0]) > bound_without_offload):
        effort.spend(SEARCH_PRICE)
        starts = fastest_first(problem, filter(None, (*starts, build("zb"))))
    return starts


def _price(problem: OrderProblem, name: str) -> float:
    """Effort to build a library schedule."""
    once, per_pair = DISPATCH_PRICE if "tries" in schedules[name].options else LIBRARY_PRICE
    return once + per_pair * problem.stages * problem.micro_batches


def fastest_first(problem: OrderProblem, candidates: Iterable[Schedule]) -> list[Schedule]:
    """The candidates that fit, sorted by their value."""
    values: list[tuple[Number, Schedule]] = []
    for schedule in candidates:
        with contextlib.suppress(DebubbleError):
            values.append((problem.value(schedule), schedule))
    return [schedule for _, schedule in sorted(values, key=lambda entry: entry[0])]


def _built(problem: OrderProblem, name: str, **options: Any) -> Schedule | None:
    """A library schedule for the problem; None if it does not fit or has another number of chunks."""
    entry = schedules[name]
    accepted = entry.accepted_options(objective=problem.objective, **options)
    if "chunks" not in entry.options and problem.placement.chunks != entry.default_chunks:
        return None
    try:
        return entry(devices=problem.devices, micro_batches=problem.micro_batches, costs=problem.costs, **accepted)
    except InfeasibleError:
        return None
