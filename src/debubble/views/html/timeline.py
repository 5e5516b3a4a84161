"""The data that the report's scripts draw: operations, idle time and memory of every scene."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.ir import Kind, Lane, Number
from debubble.simulator import Cause, TimedOperation
from debubble.views.palette import KIND_COLORS, KIND_WORDS, PART_COLORS, PHASE_COLOR, ink_on, shade
from debubble.views.scene import Scene

_KINDS = list(Kind)
_CAUSES = list(Cause)


def figures(scenes: Sequence[Scene]) -> dict[str, Any]:
    """The data of the report's scripts."""
    chunks = max(scene.timeline.program.schedule.placement.chunks for scene in scenes)
    return {
        "kinds": [_kind(kind, chunks) for kind in _KINDS],
        "causes": [cause.value for cause in _CAUSES],
        "partColors": PART_COLORS,
        "around": PHASE_COLOR,
        "differs": len(scenes) > 1 and scenes[0].plan is not None and scenes[1].plan is None,
        "first": short(min(scene.extent[0] for scene in scenes)),
        "last": short(max(scene.extent[1] for scene in scenes)),
        "scenes": [_scene(scene) for scene in scenes],
    }


def _kind(kind: Kind, chunks: int) -> dict[str, Any]:
    colors = [shade(KIND_COLORS[kind], chunk, chunks=chunks) for chunk in range(chunks)]
    return {"letter": kind.value, "words": KIND_WORDS[kind], "colors": colors, "inks": list(map(ink_on, colors))}


def _scene(scene: Scene) -> dict[str, Any]:
    lanes: list[dict[Lane, list[TimedOperation]]] = [{} for _ in range(scene.devices)]
    for o in sorted(scene.timeline.operations, key=lambda o: (o.start, o.end)):
        if o.end > o.start:
            lanes[o.device].setdefault(o.lane, []).append(o)
    critical = {operation.op for operation in scene.critical_path}
    schedule = scene.timeline.program.schedule
    parts = scene.static_parts
    return {
        "title": scene.title.partition(":")[0].lower(),
        "seconds": scene.seconds,
        "makespan": short(scene.timeline.makespan),
        "highest": scene.highest,
        "stages": schedule.stages,
        "microBatches": schedule.micro_batches,
        "slices": schedule.slices,
        "chunkOf": [scene.chunk_of(stage) for stage in range(schedule.stages)],
        "parts": [*(parts[0] if parts else ()), "activations" if parts else "memory"],
        "devices": [
            {
                "lanes": [[lane.value, _columns(scene, lanes[d][lane], critical)] for lane in Lane if lane in lanes[d]],
                "bubbles": [
                    [short(b.start), short(b.end), _CAUSES.index(b.cause), b.awaited.name if b.awaited else ""]
                    for b in scene.bubbles[d]
                ],
                "around": [[short(p.start), short(p.end), p.what] for p in scene.phases if p.device == d],
                # A dict, which keeps the last of several levels at a time.
                "memory": list({short(time): short(level) for time, level in scene.memory[d]}.items()),
                "static": list(parts[d].values()) if parts else [],
                "limit": None if scene.limits[d] is None else float(scene.limits[d] or 0),
            }
            for d in range(scene.devices)
        ],
    }


def _columns(scene: Scene, operations: Sequence[TimedOperation], critical: set[Any]) -> dict[str, list[float]]:
    """The operations of a lane as columns, in order of start."""
    return {
        "start": [short(o.start) for o in operations],
        "end": [short(o.end) for o in operations],
        "kind": [_KINDS.index(o.op.kind) for o in operations],
        "stage": [o.op.stage for o in operations],
        "microBatch": [o.op.micro_batch for o in operations],
        "critical": [i for i, o in enumerate(operations) if o.op in critical],
        "recompute": [short(scene.recompute_share(o)) for o in operations] if any(scene.timeline.recompute) else [],
    }


def short(number: Number) -> float:
    """Round to nine digits, which halves the file and moves nothing by a pixel at any zoom."""
    return float(f"{float(number):.9g}")
