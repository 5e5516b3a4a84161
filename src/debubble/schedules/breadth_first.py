"""Breadth-first: every micro-batch passes a chunk before any passes the next.

Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023 (arXiv:2211.05953).

GPipe on a looped placement: the bubble shrinks with v, all activations are held, and each stage's weights are gathered
and its gradients reduced once per step, which suits fully sharded data parallelism.
"""

from __future__ import annotations

from debubble.ir import Kind, Op, Placement, Schedule, StageCosts
from debubble.schedules.registry import schedule


@schedule(
    "breadth-first",
    paper="Breadth-First Pipeline Parallelism, MLSys 2023",
    bubble="(p - 1)(f + b) / v, for m >= p",
    memory="m",
    peak=lambda p, m, v: m,
    default_chunks=2,
)
def breadth_first(*, devices: int, micro_batches: int, chunks: int = 2, costs: StageCosts | None = None) -> Schedule:
    """All forwards chunk by chunk, then all backwards from the last chunk down."""
    placement = Placement.looped(devices, chunks)
    orders = [
        [Op(Kind.F, s, j) for s in device_stages for j in range(micro_batches)]
        + [Op(Kind.B, s, j) for s in device_stages[::-1] for j in range(micro_batches)]
        for device_stages in placement.stages_of
    ]
    return Schedule.of("breadth-first", placement, micro_batches, orders)
