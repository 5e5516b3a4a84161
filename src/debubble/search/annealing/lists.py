"""Schedules as lists of numbers, which the search kernel changes, and parts of them that repeat themselves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from debubble.ir import InputError, Op, Schedule
from debubble.search.annealing.layout import KIND_INDEX, KINDS, Ints
from debubble.search.problem import OrderProblem


def encode(problem: OrderProblem, schedule: Schedule) -> tuple[Ints, Ints]:
    """A schedule's lists as numbers: (orders padded to the longest possible, lengths)."""
    if schedule.peers:
        raise InputError("The search does not handle offload to a peer device.")
    S, m = problem.stages, problem.micro_batches
    room = 6 * m * problem.placement.chunks
    orders = np.zeros((problem.devices, room), dtype=np.int64)
    lengths = np.zeros(problem.devices, dtype=np.int64)
    for device, order in enumerate(schedule.orders):
        for index, op in enumerate(order):
            if op.kind not in KIND_INDEX:
                raise InputError(f"The search orders F, B, I, W, R, O and L only; the schedule has {op.name}.")
            orders[device, index] = (KIND_INDEX[op.kind] * S + op.stage) * m + op.micro_batch
        lengths[device] = len(order)
    return orders, lengths


def decode(problem: OrderProblem, orders: Ints, lengths: Ints, *, name: str) -> Schedule:
    """The schedule of the kernel's lists."""
    S, m = problem.stages, problem.micro_batches
    lists = tuple(
        tuple(Op(KINDS[code // (S * m)], code // m % S, code % m) for code in order[:length].tolist())
        for order, length in zip(orders, lengths, strict=True)
    )
    return problem.schedule(name, lists)


class Block(NamedTuple):
    """A part of every device's list that repeats itself, with `step` micro-batches later each time."""

    windows: tuple[int, ...]
    """Operations of one period, by device."""
    periods: int
    step: int

    def begins(self, schedule: Schedule) -> tuple[int, ...]:
        """Where it begins in each list of a schedule that has it."""
        return tuple(map(self._begin, schedule.orders, self.windows))

    def _begin(self, order: tuple[Op, ...], window: int) -> int:
        length = window * (self.periods - 1)
        again = [later(op, self.step) == then for op, then in zip(order, order[window:], strict=False)]
        return next(begin for begin in range(len(again)) if all(again[begin : begin + length]))


def later(op: Op, by: int) -> Op:
    """The same operation of a later micro-batch."""
    return op._replace(micro_batch=op.micro_batch + by)
