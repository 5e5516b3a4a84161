"""Memory of a scene's devices by part: what is there throughout, and the activations at the peak."""

from __future__ import annotations

from debubble.planners.analysis.explanation import explanation
from debubble.views.scene import Scene

STATIC_PARTS = ("weights", "gradients", "optimizer", "workspace")
"""The parts of a device's memory that stay as they are, from the bottom of its curve up."""


def static_parts(scene: Scene) -> list[dict[str, float]]:
    """Per device, the bytes of what is there throughout, by part; empty where a scene was measured."""
    if scene.plan is None:
        return []
    why = explanation(scene.plan, scene.timeline, float(scene.step_time))
    if why is None:
        return [{"model states": float(static)} for static in scene.timeline.program.static]
    return [{part: getattr(parts, part) for part in STATIC_PARTS} for parts in why.memory]


def parts_at_the_peak(scene: Scene) -> list[dict[str, float]]:
    """Per device, the bytes of every part at its peak; empty where a scene was measured."""
    return [
        {**each, "activations": max(float(peak) - sum(each.values()), 0.0)}
        for each, peak in zip(static_parts(scene), scene.peak_memory, strict=False)
    ]
