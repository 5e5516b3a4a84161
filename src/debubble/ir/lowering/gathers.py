"""Gathers and frees of the sharded parameters of a device's stages (ZeRO-3, FSDP).

A device has the gathered parameters of two stages: of the stage that computes, and of the next one, which is prefetched
(as in FSDP).  Parameters that are used again after the next stage stay: a device that alternates between two stages
gathers both once, and a device with one stage gathers it once per step.  Weight gradients (W) need no parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from debubble.ir.ops import Kind, Op
from debubble.ir.schedule import Schedule

_GATHER_AND_FREE = {
    Kind.F: (Kind.UNSHARD_F, Kind.RESHARD_F),
    Kind.R: (Kind.UNSHARD_R, Kind.RESHARD_R),
    Kind.B: (Kind.UNSHARD_B, Kind.RESHARD_B),
    Kind.I: (Kind.UNSHARD_B, Kind.RESHARD_B),
}
"""Kind that uses parameters -> the gather before it and the free after it."""


class _GatherRun(NamedTuple):
    """Consecutive operations of one stage, by their indices in a device's list."""

    stage: int
    first: int
    last: int


def with_gathers(schedule: Schedule) -> Schedule:
    """Add the gathers and frees of all stages' parameters to a schedule's lists."""
    return replace(schedule, orders=tuple(map(_with_gathers, schedule.orders)))


def _with_gathers(order: Sequence[Op]) -> tuple[Op, ...]:
    runs = _runs(order)
    alongside: dict[int, list[Op]] = {}
    """Index of an operation -> gathers that may start with it, and frees after it."""
    for i, run in enumerate(runs):
        if i and (i < 2 or runs[i - 2].stage != run.stage):
            gather, _ = _GATHER_AND_FREE[order[run.first].kind]
            alongside.setdefault(runs[i - 1].first, []).insert(0, order[run.first]._replace(kind=gather))
        if i + 2 >= len(runs) or runs[i + 2].stage != run.stage:
            _, free = _GATHER_AND_FREE[order[run.last].kind]
            alongside.setdefault(run.last, []).append(order[run.last]._replace(kind=free))
    result = [entry for index, op in enumerate(order) for entry in (op, *alongside.get(index, ()))]
    if runs:
        first = order[runs[0].first]
        result.insert(0, first._replace(kind=_GATHER_AND_FREE[first.kind][0]))
    return tuple(result)


def _runs(order: Sequence[Op]) -> list[_GatherRun]:
    users = (index for index, op in enumerate(order) if op.kind in _GATHER_AND_FREE)
    runs = ((stage, list(run)) for stage, run in groupby(users, key=lambda index: order[index].stage))
    return [_GatherRun(stage, run[0], run[-1]) for stage, run in runs]
