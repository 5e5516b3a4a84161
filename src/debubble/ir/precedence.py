"""The precedence graph of a Program: which instruction can start once which others have started or ended."""

from __future__ import annotations

from graphlib import TopologicalSorter

from debubble.errors import DeadlockError
from debubble.ir.arrays import Edges, edges
from debubble.ir.program import Program, Wait, waits_of

Before = list[tuple[Wait, ...]]
"""Per instruction, the moments of others that it follows."""


def predecessors(program: Program) -> Before:
    """Per instruction, the moments that it waits for: its waits, and the one before it in an exclusive queue."""
    return waits_of(program.predecessors)


def successors(before: Edges) -> Edges:
    """Turn the edges round: per instruction, those that wait for it."""
    return edges(len(before.first) - 1, before.other, before.after, before.at_start)


def topological_order(before: Before) -> list[int]:
    """Instructions such that each comes after all that it waits for; raises graphlib's CycleError if none does."""
    return [
        *TopologicalSorter({i: [wait.instruction for wait in waits] for i, waits in enumerate(before)}).static_order()
    ]


def deadlock(program: Program, done: list[int]) -> DeadlockError:
    """Make the error that names a cycle among the instructions that are not in `done`, the ones that became ready."""
    before = predecessors(program)
    stuck = set(range(len(before))).difference(done)
    path: list[int] = []
    seen: dict[int, int] = {}
    index = min(stuck)
    while index not in seen:
        seen[index] = len(path)
        path.append(index)
        index = next(other for other, _ in before[index] if other in stuck)
    return DeadlockError(tuple(program.instructions[i].op.name for i in path[seen[index] :]))
