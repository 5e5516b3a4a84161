"""torch's InterleavedZeroBubble schedule, which is not among `debubble.schedules`.

Source: torch.distributed.pipelining.schedules, ScheduleInterleavedZeroBubble (ZB1P of Qi et al., arXiv:2401.10241, with
several stages per device).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from debubble.ir import InputError, Kind, Op, Schedule
from debubble.schedules import schedules

ZERO_BUBBLE = "interleaved-zero-bubble"


def interleaved_zero_bubble(*, devices: int, micro_batches: int, chunks: int) -> Schedule:
    """Interleaved 1F1B with half its warm-up forwards and weight gradients delayed by `device` backwards.

    Raises:
        InputError: if the micro-batches cannot be divided evenly into rounds.
    """
    rounds = max(1, micro_batches // devices)
    if micro_batches % rounds:
        raise InputError(f"{micro_batches} micro-batches cannot be divided evenly over {rounds} rounds.")
    in_round = micro_batches // rounds
    placement = schedules["interleaved" if chunks > 1 else "1f1b"](
        devices=devices, micro_batches=devices, chunks=chunks if chunks > 1 else None
    ).placement

    def steps(device: int, *, backward: bool) -> Iterator[tuple[int, int]]:
        """(stage, micro-batch) pairs of a device, one round per chunk at a time."""
        numbers = [count() for _ in range(chunks)]
        for step in range(chunks * micro_batches):
            chunk = step // in_round % chunks
            chunk = chunks - 1 - chunk if backward else chunk
            yield chunk * devices + device, next(numbers[chunk])

    def order(device: int) -> Iterator[Op]:
        forwards = [Op(Kind.F, *step) for step in steps(device, backward=False)]
        backwards = [*steps(device, backward=True)]
        warmup = min((chunks - 1) * in_round + devices - 1 - device, len(forwards))
        yield from forwards[:warmup]
        for number, step in enumerate(backwards):
            yield from forwards[warmup + number : warmup + number + 1]
            yield Op(Kind.I, *step)
            if number >= device:
                yield Op(Kind.W, *backwards[number - device])
        yield from (Op(Kind.W, *step) for step in backwards[len(backwards) - device :])

    orders = [tuple(order(device)) for device in range(devices)]
    return Schedule.of(ZERO_BUBBLE, placement, micro_batches, [[op.name for op in ops] for ops in orders])
