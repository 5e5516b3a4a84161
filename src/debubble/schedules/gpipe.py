"""GPipe: all forwards, then all backwards.

Source: Huang et al., GPipe, NeurIPS 2019 (arXiv:1811.06965).
"""

from __future__ import annotations

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule("gpipe", paper="GPipe, NeurIPS 2019", bubble="(p - 1)(f + b)", memory="m", peak=lambda p, m, v: m)
def gpipe(*, devices: int, micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """Every stage runs all its forwards, then all its backwards."""
    orders = [[Op(kind, s, j) for kind in (Kind.F, Kind.B) for j in range(micro_batches)] for s in range(devices)]
    return Schedule.of("gpipe", Placement.linear(devices), micro_batches, orders)
