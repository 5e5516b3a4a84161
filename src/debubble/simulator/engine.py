"""Exact simulation: every instruction starts at the latest of the moments that it waits for."""

from __future__ import annotations

from debubble.ir import InputError, Moment, Number, Program, Schedule, StageCosts, lower
from debubble.ir.graph import deadlock, predecessors, topological_order
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
    before = predecessors(program)
    order = topological_order(before)
    if len(order) < len(before):
        raise deadlock(program, before, order)
    starts: list[Number] = [0] * len(before)
    ends: list[Number] = [0] * len(before)
    begin = Moment.START
    for index in order:
        start: Number = 0
        for other, moment in before[index]:
            at = starts[other] if moment is begin else ends[other]
            if at > start:
                start = at
        starts[index] = start
        ends[index] = start + program.instructions[index].duration
    return Timeline(program=program, starts=tuple(starts), ends=tuple(ends))
