"""Gathers of the parameters of a device's stages, and where they are freed again (ZeRO-3, FSDP).

A device has the whole parameters of two stages: of the one that computes and of the one that computes next, whose
gather runs next to the computing (FSDP's prefetch).  What it needs again after the next stage stays: a device that
alternates between two stages gathers each once, and a device of one stage gathers it once per step.  Weight gradients
alone (W) need no parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from debubble.ir.ops import Kind, Op
from debubble.ir.schedule import Schedule

_OF_USER = {
    Kind.F: (Kind.UNSHARD_F, Kind.RESHARD_F),
    Kind.R: (Kind.UNSHARD_R, Kind.RESHARD_R),
    Kind.B: (Kind.UNSHARD_B, Kind.RESHARD_B),
    Kind.I: (Kind.UNSHARD_B, Kind.RESHARD_B),
}
"""The gather before and the free after each kind that uses parameters."""


class _GatherRun(NamedTuple):
    """Operations of one stage, one after the other, by their places in a device's list."""

    stage: int
    first: int
    last: int


def with_gathers(schedule: Schedule) -> Schedule:
    """The schedule with the gathers and frees of all stages' parameters in its lists."""
    return replace(schedule, orders=tuple(map(_with_gathers, schedule.orders)))


def _with_gathers(order: Sequence[Op]) -> tuple[Op, ...]:
    runs = _runs(order)
    alongside: dict[int, list[Op]] = {}
    """The gathers that may begin with an operation, and the frees after it."""
    for i, run in enumerate(runs):
        if i and (i < 2 or runs[i - 2].stage != run.stage):
            gather, _ = _OF_USER[order[run.first].kind]
            alongside.setdefault(runs[i - 1].first, []).insert(0, order[run.first]._replace(kind=gather))
        if i + 2 >= len(runs) or runs[i + 2].stage != run.stage:
            _, free = _OF_USER[order[run.last].kind]
            alongside.setdefault(run.last, []).append(order[run.last]._replace(kind=free))
    everything = [each for at, op in enumerate(order) for each in (op, *alongside.get(at, ()))]
    if runs:
        first = order[runs[0].first]
        everything.insert(0, first._replace(kind=_OF_USER[first.kind][0]))
    return tuple(everything)


def _runs(order: Sequence[Op]) -> list[_GatherRun]:
    users = (at for at, op in enumerate(order) if op.kind in _OF_USER)
    runs = ((stage, list(run)) for stage, run in groupby(users, key=lambda at: order[at].stage))
    return [_GatherRun(stage, run[0], run[-1]) for stage, run in runs]
