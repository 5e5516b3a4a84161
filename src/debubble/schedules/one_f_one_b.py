"""1F1B, the schedule of DAPPLE and PipeDream-Flush.

Source: Fan et al., DAPPLE, PPoPP 2021 (arXiv:2007.01045); Narayanan et al., SC 2021, figure 4.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import replace

from debubble.ir import InputError, Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "1f1b", paper="DAPPLE, PPoPP 2021", bubble="(p - 1)(f + b)", memory="min(m, p)", peak=lambda p, m, v: min(m, p)
)
def one_f_one_b(
    *, devices: int, micro_batches: int, costs: StageCosts | None = None, recomputed_stages: int = 0
) -> Schedule:
    """Stage s runs p - s forwards, then one backward and one forward in turn.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Not read; the order is the same for any.
        recomputed_stages: Number of first stages that recompute (fused).

    Raises:
        InputError: There are fewer stages.
    """
    if not 0 <= recomputed_stages <= devices:
        raise InputError(f"recomputed_stages must be between 0 and {devices}, the devices; it is {recomputed_stages}.")
    orders = [alternate(s, micro_batches, warm_up=devices - s) for s in range(devices)]
    plain = Schedule.of("1f1b", Placement.linear(devices), micro_batches, orders)
    return replace(plain, fused_recompute=frozenset(range(recomputed_stages)))


def alternate(stage: int, micro_batches: int, *, warm_up: int, distance: int | None = None) -> list[Op]:
    """`warm_up` forwards, then backwards, each followed by the forward of the micro-batch `distance` later.

    `distance` defaults to `warm_up`, so that backwards and forwards alternate.
    """
    warm_up = min(warm_up, micro_batches)
    distance = warm_up if distance is None else distance
    order = [Op(Kind.F, stage, j) for j in range(warm_up)]
    for j in range(micro_batches):
        order.append(Op(Kind.B, stage, j))
        if warm_up <= j + distance < micro_batches:
            order.append(Op(Kind.F, stage, j + distance))
    return order


def with_transfers(order: Iterable[Op], offloaded: Container[int], *, ahead: int) -> list[Op]:
    """A stage's list with O after the forwards of offloaded micro-batches, and L `ahead` backwards before theirs."""
    extended: list[Op] = []
    for op in order:
        kind, stage, j = op
        extended.append(op)
        if kind is Kind.F and j in offloaded:
            extended.append(Op(Kind.O, stage, j))
        elif kind is Kind.B and j + ahead in offloaded:
            extended.append(Op(Kind.L, stage, j + ahead))
    return extended
