"""The precedence graph of a Program: who can start once what has happened."""

from __future__ import annotations

import itertools

from debubble.ir.errors import DeadlockError
from debubble.ir.program import Moment, Program

Edges = list[list[tuple[int, Moment]]]


def predecessors(program: Program) -> Edges:
    """Per instruction, the moments that it waits for: its waits, and the one before it in an exclusive queue."""
    edges: Edges = [list(instruction.waits) for instruction in program.instructions]
    end = Moment.END
    for queue in program.queues:
        if queue.exclusive:
            order = queue.instructions
            for before, after in itertools.pairwise(order):
                edges[after].append((before, end))
    return edges


def successors(program: Program) -> tuple[Edges, list[int]]:
    """The same edges forwards, and per instruction the number of those that lead to it."""
    edges: Edges = [[] for _ in program.instructions]
    missing = [0] * len(edges)
    for index, before in enumerate(predecessors(program)):
        missing[index] = len(before)
        for other, moment in before:
            edges[other].append((index, moment))
    return edges, missing


def topological_order(before: Edges) -> list[int]:
    """Instructions such that each comes after all that it waits for; shorter than the program if there is a cycle."""
    after: list[list[int]] = [[] for _ in before]
    missing = [0] * len(before)
    for index, edges in enumerate(before):
        missing[index] = len(edges)
        for other, _ in edges:
            after[other].append(index)
    order = [index for index, count in enumerate(missing) if not count]
    for index in order:
        for other in after[index]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    return order


def deadlock(program: Program, before: Edges, done: list[int]) -> DeadlockError:
    """The cycle among the instructions that never become ready."""
    stuck = set(range(len(before))).difference(done)
    path: list[int] = []
    seen: dict[int, int] = {}
    index = min(stuck)
    while index not in seen:
        seen[index] = len(path)
        path.append(index)
        index = next(other for other, _ in before[index] if other in stuck)
    return DeadlockError(tuple(program.instructions[i].op.name for i in path[seen[index] :]))
