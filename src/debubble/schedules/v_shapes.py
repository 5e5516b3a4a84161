"""ZB-V, V-Half and V-Min: two chunks per device in a V, so that all devices hold the same amount.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (ZB-V also in Zero Bubble, ICLR 2024).
Its B is our I; its building blocks are `search.constructive.building_blocks`.

Activations of a device's first chunk live longer the shorter those of its second live, and the sum is the same on all
devices.  The three schedules differ in their memory, and so in how far forwards run ahead.  The originals repeat a
fixed block designed for F = B = W; here blocks and greedy rules are tried for the actual costs, by stage and with
communication, and the shortest order within the same memory is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from debubble.ir import Number, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule
from debubble.search.problem import Objective
from debubble.search.zero_bubble import zero_bubble_schedule


def _v_shape(name: str, summary: str, *, bubble: str, memory: str, activations: Callable[[int], Number]) -> None:
    """Register a V-shaped schedule with memory for the activations of `activations(p)` micro-batches per device."""

    @schedule(
        name,
        paper="Controllable Memory, NeurIPS 2024",
        bubble=bubble,
        memory=f"min(m, {memory})",
        default_chunks=2,
        placement=Placement.v_shape,
        peak=lambda p, m, v: min(m, activations(p)),
    )
    def build(
        *,
        devices: int,
        micro_batches: int,
        costs: StageCosts | None = None,
        memory_limit: Number | Sequence[Number] | None = None,
        objective: Objective = "makespan",
        tries: int | None = None,
        steps: int = 0,
        recomputing: frozenset[int] = frozenset(),
    ) -> Schedule:
        return zero_bubble_schedule(
            name, Placement.v_shape(devices), micro_batches, costs,
            activations=activations(devices), memory_limit=memory_limit, objective=objective, tries=tries, steps=steps,
            recomputing=recomputing,
        )  # fmt: skip

    build.__doc__ = f"""{summary}

    Args:
        devices: Pipeline devices, p.
        micro_batches: Micro-batches of a step, m.
        costs: Times and bytes per stage; all times 1 by default.
        memory_limit: Bytes per device, as in StageCosts, for less memory.
        objective: `makespan`, or `span` for an optimizer step that each device takes by itself.
        tries: Candidates to try; by default fewer for larger steps.
        steps: Moves of local search from the best order.
        recomputing: Stages whose backwards recompute.

    Raises:
        InfeasibleError: No order fits the memory.
    """


_v_shape(
    "zb-v",
    "Almost no bubble, in 1F1B's memory.",
    bubble="(p - 1) f / 2 for f = i = w",
    memory="p",
    activations=lambda p: p,
)
_v_shape(
    "v-half",
    "Half of 1F1B's memory and one activation.",
    bubble="found for the costs",
    memory="p / 2 + 1",
    activations=lambda p: Fraction(p, 2) + 1,
)
_v_shape(
    "v-min",
    "A third of 1F1B's memory: what a block holds whose micro-batch never waits.",
    bubble="found for the costs",
    memory="floor((p + 4) / 3)",
    activations=lambda p: (p + 4) // 3,
)
