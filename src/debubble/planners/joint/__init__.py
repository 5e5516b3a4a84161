"""All levers together: partition, chunks, placement, recomputation, offload and order in one search."""

from debubble.planners.joint.planner import joint

__all__ = [
    "joint",
]
