"""Strawman: recompute where memory is short, and turn forward bubbles into backward bubbles that hide it.

Source: Huang et al., Obscura, USENIX ATC 2025, section 3.2 and figure 6.

p = devices, m = micro_batches, k = adjusted_stages - 1; stages 0..k are the adjusted ones.  Stage s <= k runs
mu_s = 3(p - s) - 2 forwards before its first backward (those of 1F1B and 2(p - s - 1) migrated ones).  The other
forwards stay where 1F1B has them: F of j directly after B of j - (p - s).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from debubble.ir import InputError, Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.one_f_one_b import alternate
from debubble.schedules.registry import schedule


@schedule(
    "strawman",
    paper="Obscura, ATC 2025",
    bubble="(p - 1)(f + b), and r (max(1, m - 3(p - k - 1)) + k) of recomputation stays visible",
    memory="min(m, 3 p - 2)",
)
def strawman(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    adjusted_stages: int | None = None,
) -> Schedule:
    """The adjusted stages recompute, and run what fits of their forwards before the first backward.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Their memory limit chooses the adjusted stages; nothing else is read.
        adjusted_stages: First stages that are adjusted; by default those that exceed the costs' memory limit.
    """
    adjusted = identify(adjusted_stages, devices=devices, micro_batches=micro_batches, costs=costs)
    orders = [_migrated(s, micro_batches, distance=devices - s) for s in range(adjusted)]
    orders += [alternate(s, micro_batches, warm_up=devices - s) for s in range(adjusted, devices)]
    return adjusted_pipeline("strawman", orders, micro_batches=micro_batches, adjusted=adjusted)


def identify(adjusted_stages: int | None, *, devices: int, micro_batches: int, costs: StageCosts | None) -> int:
    """Count the stages to adjust: as asked for, else up to the last stage that breaks its limit under 1F1B.

    Without costs or limit no stage does.  Raises InputError if the number is not within 0..devices.
    """
    if adjusted_stages is not None:
        if not 0 <= adjusted_stages <= devices:
            raise InputError(f"adjusted_stages must be between 0 and {devices}, the devices; it is {adjusted_stages}.")
        return adjusted_stages
    if costs is None or costs.memory_limit is None or costs.stages != devices:
        return 0
    over = [
        s
        for s in range(devices)
        if costs.static_of(s) + min(devices - s, micro_batches) * costs.activation[s] > (costs.limit_of(s) or 0)
    ]
    return over[-1] + 1 if over else 0


def adjusted_pipeline(name: str, orders: Iterable[Iterable[Op]], *, micro_batches: int, adjusted: int) -> Schedule:
    """The schedule of these orders, one stage each, whose adjusted stages recompute."""
    lists = list(orders)
    plain = Schedule.of(name, Placement.linear(len(lists)), micro_batches, lists)
    return replace(plain, fused_recompute=frozenset(range(adjusted)))


def _migrated(stage: int, micro_batches: int, *, distance: int) -> list[Op]:
    """The adjusted stage that is `distance` = p - s from the end."""
    warm_up = min(3 * distance - 2, micro_batches)
    order = [Op(Kind.F, stage, j) for j in range(warm_up)]
    for j in range(micro_batches):
        order.append(Op(Kind.B, stage, j))
        if warm_up <= j + distance < micro_batches:
            order.append(Op(Kind.F, stage, j + distance))
    return order
