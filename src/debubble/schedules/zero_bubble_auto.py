"""The automatic zero-bubble schedule: an order of F, I and W for the given costs and memory.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 3 (ZB-1p and ZB-2p; the paper's B is our I).

The paper's heuristic builds its order micro-batch by micro-batch.  Here greedy rules and building blocks are tried, and
the shortest order is taken; where memory is below 1F1B's and the best order is no longer any simple pattern, exact and
local search go on from there (search/exact/tight_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from debubble.ir import Number, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule
from debubble.search.constructive.zero_bubble import Objective, room_within, shaped

SEARCHED = 160_000_000
"""Operations that local search may pass through below 1F1B's memory, unless a number of `steps` is asked for."""


@schedule(
    "zb",
    paper="Zero Bubble, ICLR 2024",
    bubble="(p - 1)(f + i - w), less with more memory",
    memory="min(m, 2 p), or memory_limit",
    peak=lambda p, m, v: min(m, 2 * p),
)
def zb(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int | None = None,
) -> Schedule:
    """The shortest zero-bubble order found for the given costs and any memory limit.

    `memory_limit`: bytes per device, as in StageCosts; without one ZB-H2's memory is used.  `objective`: `makespan`, or
    `span` for an optimizer step that each device takes by itself.  `tries`: candidates; `steps`: moves of local search
    (by default none from 1F1B's memory up).  Raises InfeasibleError if not even one micro-batch fits.
    """
    placement = Placement.linear(devices)
    costs = costs or StageCosts.of(stages=devices)
    if memory_limit is not None:
        costs = costs.with_limit(memory_limit)
    if steps is None:
        steps = SEARCHED // (3 * devices * micro_batches) if _is_tight(placement, micro_batches, costs) else 0
    return shaped(
        "zb", placement, micro_batches, costs, activations=2 * devices, objective=objective, tries=tries, steps=steps
    )


def _is_tight(placement: Placement, micro_batches: int, costs: StageCosts) -> bool:
    """Whether some device has less room than 1F1B takes on the first."""
    in_flight = min(micro_batches, placement.devices)
    needed = room_within(placement, costs.with_limit(None), in_flight)
    return any(has < needs for has, needs in zip(room_within(placement, costs, in_flight), needed, strict=True))
