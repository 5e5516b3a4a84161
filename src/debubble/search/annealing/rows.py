"""What operations cost, in rows by kind, stage and micro-batch; one row for all micro-batches where they are alike."""

from __future__ import annotations

import numpy as np

from debubble.ir import Kind, Number
from debubble.ir.ops import CODE
from debubble.search.annealing.layout import KINDS, B, F, Floats, I, W
from debubble.search.problem import OrderProblem


def alike(problem: OrderProblem) -> range:
    """The micro-batches that have rows of their own: the first for all if they are alike."""
    return range(1 if problem.costs.micro_batch_scale is None else problem.micro_batches)


def operations(problem: OrderProblem) -> tuple[list[Number], list[Number], list[Number]]:
    """(times, allocated, freed) by kind, stage and micro-batch, first as without, then as with an R in the list."""
    tables = problem.op_costs.tables()
    kinds = [CODE[kind] for kind in KINDS]
    times, allocated, freed = (table[:, kinds].ravel().tolist() for table in tables)
    return times, allocated, freed


def messages(problem: OrderProblem) -> list[Number]:
    """Time of the message behind each operation; -1 where there is none."""
    costs, device_of = problem.costs, problem.placement.device_of
    result: list[Number] = []
    for kind in KINDS:
        for stage in range(problem.stages):
            other = stage + 1 if kind is Kind.F else stage - 1
            sends = kind in (Kind.F, Kind.I, Kind.B) and 0 <= other < problem.stages
            if sends and device_of[other] != device_of[stage]:
                result.extend(costs.communication[min(stage, other)] * costs.scale_of(j) for j in alike(problem))
            else:
                result.extend(-1 for _ in alike(problem))
    return result


def tails(problem: OrderProblem, time: Floats, message: Floats) -> Floats:
    """Longest chain of data behind each operation, with the backward split where it may be."""
    S = problem.stages
    shape = (len(KINDS), S, len(alike(problem)))
    t, c = time.reshape(shape), np.maximum(message.reshape(shape), 0)
    tail = np.zeros(shape)
    step = np.minimum(t[I], t[B]) if problem.split else t[B]
    for s in range(S):
        before = 0 if s == 0 else step[s - 1] + np.maximum(tail[I, s - 1], 0)
        tail[B, s] = 0 if s == 0 else c[B, s] + before
        tail[I, s] = np.maximum(t[W, s] if problem.split else 0, 0 if s == 0 else c[I, s] + before)
        if not problem.split:
            tail[I, s] = tail[B, s]
    for s in reversed(range(S)):
        tail[F, s] = step[s] + tail[I, s] if s == S - 1 else c[F, s] + t[F, s + 1] + tail[F, s + 1]
    return tail.reshape(-1)
