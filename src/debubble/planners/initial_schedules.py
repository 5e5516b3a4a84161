"""Initial solutions of an order search: the published schedules that fit its problem."""

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
"""Schedules that are built and simulated for the starts of one stage per device, at most about."""
IN_LOOP = ("interleaved", "interleaved-less-memory", "group-interleaved", "breadth-first")
IN_V = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules of several chunks that move and recompute nothing, by their placement."""


def initial(problem: OrderProblem, effort: Effort) -> list[Schedule]:
    """The published schedules that answer the problem, fastest first: no search from them ends after one of them.

    They are PipeOffload, which without a link moves nothing, and with one, for one stage per device, AdaOffload; `zb`
    for one stage per device and those in IN_LOOP and IN_V for several, which move nothing.  None of them recomputes or
    moves parts of activations.  Where more effort is left than that takes, `zb` searches its own order too, as that
    schedule does by default, unless the bound of orders that move nothing says that it cannot be the fastest start.
    """
    if problem.fused_recompute or problem.offload_fraction or problem.asynchronous:
        return []
    linear = problem.placement == Placement.linear(problem.devices)
    build = partial(_built, problem)
    schedules_built: list[Schedule | None] = []
    names = IN_LOOP if problem.placement == Placement.looped(problem.devices, problem.placement.chunks) else IN_V
    of_starts = START_PRICE * problem.stages * problem.micro_batches * MAX_TRIALS
    effort.spend(of_starts if linear else sum(_price(problem, n) for n in names))
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
    moves_nothing = lower_bound(replace(problem, offload=False, recompute=False))
    if linear and effort.remaining > SEARCH_PRICE and (not starts or problem.value(starts[0]) > moves_nothing):
        effort.spend(SEARCH_PRICE)
        starts = fastest_first(problem, filter(None, (*starts, build("zb"))))
    return starts


def _price(problem: OrderProblem, name: str) -> float:
    """Effort of building a schedule of the library."""
    once, per_pair = DISPATCH_PRICE if "tries" in schedules[name].options else LIBRARY_PRICE
    return once + per_pair * problem.stages * problem.micro_batches


def fastest_first(problem: OrderProblem, candidates: Iterable[Schedule]) -> list[Schedule]:
    """The candidates that fit, by their value."""
    values: list[tuple[Number, Schedule]] = []
    for schedule in candidates:
        with contextlib.suppress(DebubbleError):
            values.append((problem.value(schedule), schedule))
    return [schedule for _, schedule in sorted(values, key=lambda entry: entry[0])]


def _built(problem: OrderProblem, name: str, **options: Any) -> Schedule | None:
    """A schedule of the library for the problem; None if it does not fit, or has another number of chunks."""
    entry = schedules[name]
    given = entry.accepted_options(objective=problem.objective, **options)
    if "chunks" not in entry.options and problem.placement.chunks != entry.default_chunks:
        return None
    try:
        return entry(
            devices=problem.devices, micro_batches=problem.micro_batches, costs=problem.costs, **given
        )  # fmt: skip
    except InfeasibleError:
        return None
