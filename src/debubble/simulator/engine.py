"""Exact simulation: every instruction starts at the latest of the moments that it depends on.

The longest path through the precedence graph is one function, which runs as plain Python over lists of any numbers, or
compiled over arrays of int64 or float64 with the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from debubble.argument_types import with_checked_types
from debubble.ir import InputError, Program, Schedule, StageCosts, lower
from debubble.ir.arrays import Edges, Ints, Numbers, exact
from debubble.ir.program import START, STREAM
from debubble.kernels import jit
from debubble.simulator.timeline import Timeline

_MIN_LOADING_INSTRUCTIONS, _MIN_COMPILED_INSTRUCTIONS = 1_000_000, 1_000
"""Minimum number of instructions for which compiled code pays if the compiler has to be loaded, and if it is loaded."""


class Graph:
    """A precedence graph, prepared for longest paths with many sets of durations."""

    def __init__(self, before: Edges, *, compiled: bool = False) -> None:
        """Prepare the graph; `compiled` uses compiled code for any size, which pays for many sets of durations."""
        self.after = before.reversed
        self.missing = np.diff(before.first)
        self.compiled = compiled

    def times(self, duration: Numbers, lead: Numbers) -> tuple[Numbers, Numbers, Ints]:
        """Compute start and end of every instruction from its duration and lead.

        Also returns the instructions in an order in which they can start, without those on or after a cycle.
        """
        count = len(duration)
        duration, lead = _uniform(duration, lead)
        outputs = np.zeros(count, duration.dtype), np.zeros(count, duration.dtype), np.zeros(count, np.int64)
        minimum = _MIN_COMPILED_INSTRUCTIONS if _compiled.cache_info().currsize else _MIN_LOADING_INSTRUCTIONS
        if duration.dtype != object and (self.compiled or count >= minimum):
            reached = _compiled()(*self.after, self.missing.copy(), duration, lead, *outputs)
            start, end, order = outputs
            return start, end, order[:reached]
        lists = [column.tolist() for column in (*self.after, self.missing, duration, lead, *outputs)]
        reached = longest_path(*lists)
        start, end = (np.array(times, dtype=duration.dtype) for times in lists[-3:-1])
        return start, end, np.array(lists[-1][:reached], dtype=np.int64)


def longest_path(
    first: Any, after: Any, moment: Any, missing: Any, duration: Any, lead: Any, start: Any, end: Any, order: Any
) -> int:
    """Write every instruction's start and end and the order in which they become ready; returns how many do.

    `after[first[i] : first[i + 1]]` depend on instruction i, and `missing` counts the dependencies of each one.
    """
    reached = 0
    for i in range(len(missing)):
        if missing[i] == 0:
            order[reached] = i
            reached += 1
    done = 0
    while done < reached:
        i = order[done]
        done += 1
        begin = start[i]
        finish = end[i] = begin + duration[i]
        for edge in range(first[i], first[i + 1]):
            follower = after[edge]
            time = begin if moment[edge] == START else finish
            if moment[edge] == STREAM:
                time = max(begin, finish - lead[follower])
            if time > start[follower]:
                start[follower] = time
            missing[follower] -= 1
            if missing[follower] == 0:
                order[reached] = follower
                reached += 1
    return reached


def _uniform(duration: Numbers, lead: Numbers) -> tuple[Numbers, Numbers]:
    """Durations and leads as arrays of one type that represents both exactly."""
    if not lead.any():
        return duration, np.zeros(len(duration), duration.dtype)
    if lead.dtype != duration.dtype:
        duration, lead = np.split(exact([*duration.tolist(), *lead.tolist()]), 2)
    return duration, lead


@cache
def _compiled() -> Callable[..., int]:
    return jit(longest_path)


@with_checked_types()
def simulate(schedule: Schedule | Program, costs: StageCosts | None = None) -> Timeline:
    """Lower a schedule with its costs, or take a Program, and compute its timeline.

    Args:
        schedule: A schedule, or a program lowered from one.
        costs: The schedule's costs; None for a program, which includes them.

    Returns:
        The timeline, exact if the costs are integers or fractions.

    Raises:
        DeadlockError: With the cycle if operations wait for each other.
        InputError: If a schedule comes without costs.  Whatever `lower` raises passes.

    Example:
        >>> costs = db.StageCosts.of(stages=4)
        >>> db.simulate(db.schedules["1f1b"](devices=4, micro_batches=8), costs).makespan
        33
    """
    if isinstance(schedule, Schedule):
        if costs is None:
            raise InputError("Simulating a schedule needs its costs.")
        schedule = lower(schedule, costs)
    return run(schedule)


def run(program: Program) -> Timeline:
    """Compute the timeline of a program: the longest path through it.  Raises DeadlockError with a cycle."""
    start, end, order = Graph(program.predecessors).times(program.duration, program.lead)
    if len(order) < len(start):
        raise program.deadlock(order.tolist())
    return Timeline(program=program, start=start, end=end)
