"""ZB-V, V-Half and V-Min: two chunks per device in a V, so that every device holds equally much.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (ZB-V also in Zero Bubble, ICLR 2024).
Its B is our I; its building blocks are `search.constructive.building_blocks`.

The first chunk of a device lives long where the second lives short, and the sum is the same on all.  The three differ
in how much memory they allow, and so in how far forwards run ahead.  The originals repeat one fixed block each, made
for F = B = W; here blocks and greedy rules are tried for the given costs, stage by stage and with communication, and
the shortest order within the same memory is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from debubble.ir import Number, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule
from debubble.search.constructive.zero_bubble import Objective, zero_bubble_schedule

_PAPER = "Controllable Memory, NeurIPS 2024"


@schedule(
    "zb-v",
    paper=_PAPER,
    bubble="(p - 1) f / 2 for f = i = w",
    memory="min(m, p)",
    default_chunks=2,
    peak=lambda p, m, v: min(m, p),
)
def zb_v(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int = 0,
) -> Schedule:
    """Almost no bubble, in 1F1B's memory.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Times and bytes per stage; all times 1 by default.
        memory_limit: Bytes per device, as in StageCosts, for less memory.
        objective: `makespan`, or `span` for an optimizer step that each device takes by itself.
        tries: Candidates to try; by default fewer for larger steps.
        steps: Moves of local search from the best order.

    Raises:
        InfeasibleError: No order fits the memory.
    """
    return zero_bubble_schedule(
        "zb-v", Placement.v_shape(devices), micro_batches, costs,
        activations=devices, memory_limit=memory_limit, objective=objective, tries=tries, steps=steps,
    )  # fmt: skip


@schedule(
    "v-half",
    paper=_PAPER,
    bubble="found for the costs",
    memory="min(m, p / 2 + 1)",
    default_chunks=2,
    peak=lambda p, m, v: min(Fraction(m), Fraction(p, 2) + 1),
)
def v_half(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int = 0,
) -> Schedule:
    """Half of 1F1B's memory and one activation.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Times and bytes per stage; all times 1 by default.
        memory_limit: Bytes per device, as in StageCosts, for less memory.
        objective: `makespan`, or `span` for an optimizer step that each device takes by itself.
        tries: Candidates to try; by default fewer for larger steps.
        steps: Moves of local search from the best order.

    Raises:
        InfeasibleError: No order fits the memory.
    """
    return zero_bubble_schedule(
        "v-half", Placement.v_shape(devices), micro_batches, costs,
        activations=Fraction(devices, 2) + 1, memory_limit=memory_limit, objective=objective, tries=tries, steps=steps,
    )  # fmt: skip


@schedule(
    "v-min",
    paper=_PAPER,
    bubble="found for the costs",
    memory="min(m, floor((p + 4) / 3))",
    default_chunks=2,
    peak=lambda p, m, v: min(m, (p + 4) // 3),
)
def v_min(
    *,
    devices: int,
    micro_batches: int,
    costs: StageCosts | None = None,
    memory_limit: Number | Sequence[Number] | None = None,
    objective: Objective = "makespan",
    tries: int | None = None,
    steps: int = 0,
) -> Schedule:
    """A third of 1F1B's memory: what a block holds whose micro-batch never waits.

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Times and bytes per stage; all times 1 by default.
        memory_limit: Bytes per device, as in StageCosts, for less memory.
        objective: `makespan`, or `span` for an optimizer step that each device takes by itself.
        tries: Candidates to try; by default fewer for larger steps.
        steps: Moves of local search from the best order.

    Raises:
        InfeasibleError: No order fits the memory.
    """
    return zero_bubble_schedule(
        "v-min", Placement.v_shape(devices), micro_batches, costs,
        activations=(devices + 4) // 3, memory_limit=memory_limit, objective=objective, tries=tries, steps=steps,
    )  # fmt: skip
