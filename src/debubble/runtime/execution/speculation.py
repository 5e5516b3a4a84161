"""Which operations of a step can run before it is known whether the step before it stands.

All that no backward precedes: the forwards of the warm-up with their messages, transfers and recomputations.  They
change no parameter and no gradient, so they can be run again.
"""

from __future__ import annotations

import itertools

from debubble.ir import Kind, Op, Program

BINDING = (Kind.B, Kind.I, Kind.W, Kind.G, Kind.D, Kind.S)
"""What changes gradients or parameters."""


def ahead_of_gradients(program: Program) -> frozenset[int]:
    """Those instructions; the same on every rank, and with every message both its ends."""
    after: list[list[int]] = [[] for _ in program.instructions]
    found: list[int] = []
    for index, instruction in enumerate(program.instructions):
        for wait in instruction.waits:
            after[wait.instruction].append(index)
        kind, stage, j = instruction.op
        if kind in BINDING or (kind in (Kind.O, Kind.L) and instruction.peer is not None):
            found.append(index)
        elif kind in (Kind.RECV_F, Kind.RECV_B):
            # A message is sent only if it is received, else the sender would wait.
            send = Op(Kind.SEND_F, stage - 1, j) if kind is Kind.RECV_F else Op(Kind.SEND_B, stage + 1, j)
            after[index].append(program.index[send])
    for queue in program.queues:
        for earlier, later in itertools.pairwise(queue.instructions):
            after[earlier].append(later)
    bound = set(found)
    for index in found:
        for other in after[index]:
            if other not in bound:
                bound.add(other)
                found.append(other)
    return frozenset(range(len(program.instructions))) - bound
