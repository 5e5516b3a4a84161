"""Exact simulation: every instruction starts at the latest of the moments that it waits for."""

from __future__ import annotations

from debubble.ir import InputError, Program, Schedule, StageCosts, lower
from debubble.ir.precedence import deadlock
from debubble.simulator.longest_path import Graph
from debubble.simulator.timeline import Timeline


def simulate(schedule: Schedule | Program, costs: StageCosts | None = None) -> Timeline:
    """Lower a schedule with its costs (or take a Program) and compute its timeline.

    Raises DeadlockError with the cycle if operations wait for each other, and whatever `lower` raises.
    """
    if isinstance(schedule, Schedule):
        if costs is None:
            raise InputError("Simulating a schedule needs its costs.")
        schedule = lower(schedule, costs)
    return run(schedule)


def run(program: Program) -> Timeline:
    """Longest path over the Program."""
    start, end, order = Graph(program.predecessors).times(program.duration)
    if len(order) < len(start):
        raise deadlock(program, order.tolist())
    return Timeline(program=program, start=start, end=end)
