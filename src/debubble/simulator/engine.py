"""Exact simulation: every instruction starts at the latest of the moments that it waits for."""

from __future__ import annotations

from debubble.ir import InputError, Program, Schedule, StageCosts, lower
from debubble.ir.precedence import deadlock
from debubble.simulator.longest_path import Graph
from debubble.simulator.timeline import Timeline


def simulate(schedule: Schedule | Program, costs: StageCosts | None = None) -> Timeline:
    """Lower a schedule with its costs, or take a Program, and compute its timeline.

    Args:
        schedule: A schedule, or a program that was lowered from one.
        costs: The schedule's costs; None for a program, which has them.

    Returns:
        The timeline, exact where the costs are integers or fractions.

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
    start, end, order = Graph(program.predecessors).times(program.duration)
    if len(order) < len(start):
        raise deadlock(program, order.tolist())
    return Timeline(program=program, start=start, end=end)
