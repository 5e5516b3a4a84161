"""1F1B, the schedule of DAPPLE and PipeDream-Flush.

Source: Fan et al., DAPPLE, PPoPP 2021 (arXiv:2007.01045); Narayanan et al., SC 2021, figure 4.
"""

from __future__ import annotations

from dataclasses import replace

from debubble.ir import InputError, Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "1f1b", paper="DAPPLE, PPoPP 2021", bubble="(p - 1)(f + b)", memory="min(m, p)", peak=lambda p, m, v: min(m, p)
)
def one_f_one_b(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    recomputed_stages: int = 0,
) -> Schedule:
    """Stage s runs p - s forwards, then one backward and one forward in turn.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Not read; the order is the same for any.
        recomputed_stages: First stages that recompute on demand (fused).

    Raises:
        InputError: There are fewer stages.
    """
    if not 0 <= recomputed_stages <= devices:
        raise InputError(f"recomputed_stages must be between 0 and {devices}, the devices; it is {recomputed_stages}.")
    orders = [alternate(s, micro_batches, warm_up=devices - s) for s in range(devices)]
    plain = Schedule.of("1f1b", Placement.linear(devices), micro_batches, orders)
    return replace(plain, fused_recompute=frozenset(range(recomputed_stages)))


def alternate(stage: int, micro_batches: int, *, warm_up: int) -> list[Op]:
    """`warm_up` forwards, then backward and forward in turn, then the remaining backwards."""
    warm_up = min(warm_up, micro_batches)
    order = [Op(Kind.F, stage, j) for j in range(warm_up)]
    for j in range(micro_batches):
        order.append(Op(Kind.B, stage, j))
        if warm_up + j < micro_batches:
            order.append(Op(Kind.F, stage, warm_up + j))
    return order
