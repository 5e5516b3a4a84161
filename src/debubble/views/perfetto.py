"""Perfetto and Chrome traces: a process per device, a track per lane, arrows for messages, memory counters.

The file is the JSON object form of the Trace Event Format; `ts` (from the first event) and `dur` are in microseconds.
An abstract time of 1 is drawn as one second.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from debubble.ir import Kind, Lane, Number, Op
from debubble.simulator import TimedOperation
from debubble.views.palette import KIND_WORDS
from debubble.views.registry import view
from debubble.views.scene import Scene

_PROCESSES_PER_SCENE = 1000
"""Offset of the process numbers of each further scene."""

_TRACKS_PER_LANE = 1000
"""Offset of the track numbers of each lane; overlapping messages of a lane need several tracks."""


@view("perfetto")
def perfetto(scenes: Sequence[Scene]) -> bytes:
    """Write a trace for ui.perfetto.dev or chrome://tracing."""
    events: list[dict[str, Any]] = []
    for number, scene in enumerate(scenes):
        first = number * _PROCESSES_PER_SCENE
        prefix = f"{scene.title.partition(':')[0]}: " if len(scenes) > 1 else ""
        place = {
            operation.op: {"pid": first + operation.device, "tid": track} for operation, track in _tracks(scene).items()
        }
        events += _names(scene, place, first, prefix)
        events += _operations(scene, place)
        events += _bubbles(scene, first)
        events += _messages(scene, place, first)
        events += _memory(scene, first)
        events += _phases(scene, first)
    zero = min(event.get("ts", 0.0) for event in events)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - zero, 3)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")).encode()


_Places = dict[Op, dict[str, int]]


def _tracks(scene: Scene) -> dict[TimedOperation, int]:
    """The track of every operation: the first free one of its lane."""
    tracks: dict[TimedOperation, int] = {}
    free: dict[tuple[int, Lane], list[Number]] = {}
    for operation in sorted(scene.timeline.operations, key=lambda o: (o.start, o.end)):
        ends = free.setdefault((operation.device, operation.lane), [])
        row = next((row for row, end in enumerate(ends) if end <= operation.start), len(ends))
        ends[row : row + 1] = [operation.end]
        tracks[operation] = _LANES.index(operation.lane) * _TRACKS_PER_LANE + row
    return tracks


_LANES = list(Lane)


def _names(scene: Scene, place: _Places, first: int, prefix: str) -> Iterator[dict[str, Any]]:
    for device in range(scene.devices):
        process = {"ph": "M", "pid": first + device}
        yield {**process, "name": "process_name", "args": {"name": f"{prefix}device {device}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": first + device}}
    for pid, tid in sorted({(track["pid"], track["tid"]) for track in place.values()}):
        lane, row = divmod(tid, _TRACKS_PER_LANE)
        name = _LANES[lane].value + (f" {row + 1}" if row else "")
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _operations(scene: Scene, place: _Places) -> Iterator[dict[str, Any]]:
    for operation in scene.timeline.operations:
        op = operation.op
        yield {
            "ph": "X",
            "name": op.name,
            "cat": KIND_WORDS[op.kind],
            **place[op],
            "ts": _microseconds(operation.start),
            "dur": _microseconds(operation.duration),
            "args": {"stage": op.stage, "micro-batch": op.micro_batch},
        }


def _bubbles(scene: Scene, first: int) -> Iterator[dict[str, Any]]:
    for bubble in (b for idle in scene.bubbles for b in idle):
        awaited = bubble.awaited
        if awaited is not None and awaited.device == bubble.device and awaited.lane is Lane.COMPUTE:
            continue  # A blocking message, which has a slice of its own.
        yield {
            "ph": "X",
            "name": bubble.cause.value,
            "cat": "bubble",
            "pid": first + bubble.device,
            "tid": _LANES.index(Lane.COMPUTE) * _TRACKS_PER_LANE,
            "ts": _microseconds(bubble.start),
            "dur": _microseconds(bubble.duration),
            "args": {"awaited": awaited.name if awaited else "nothing"},
        }


def _messages(scene: Scene, place: _Places, first: int) -> Iterator[dict[str, Any]]:
    """An arrow from the start of each send to the operation that uses the message."""
    by_op = {operation.op: operation for operation in scene.timeline.operations}
    schedule = scene.timeline.program.schedule
    sends = (o for o in scene.timeline.operations if o.op.kind in (Kind.SEND_F, Kind.SEND_B))
    for number, send in enumerate(sends):
        _, stage, j = send.op
        target = Op(Kind.F, stage + 1, j) if send.op.kind is Kind.SEND_F else schedule.backward_of(stage - 1, j)
        arrow = {"name": "message", "cat": "message", "id": first * 1_000_000 + number}
        yield {**arrow, "ph": "s", **place[send.op], "ts": _microseconds(send.start)}
        yield {**arrow, "ph": "f", "bp": "e", **place[target], "ts": _microseconds(by_op[target].start)}


def _memory(scene: Scene, first: int) -> Iterator[dict[str, Any]]:
    for device, curve in enumerate(scene.memory):
        for time, level in curve:
            counter = {"ph": "C", "name": "memory", "pid": first + device, "tid": 0}
            yield {**counter, "ts": _microseconds(time), "args": {"bytes": float(level)}}


def _phases(scene: Scene, first: int) -> Iterator[dict[str, Any]]:
    """The devices' work before and after the program, on a separate track."""
    tid = len(_LANES) * _TRACKS_PER_LANE
    for device in sorted({phase.device for phase in scene.phases}):
        yield {"ph": "M", "pid": first + device, "tid": tid, "name": "thread_name", "args": {"name": "around"}}
    for phase in scene.phases:
        span = {"ts": _microseconds(phase.start), "dur": _microseconds(phase.end - phase.start)}
        yield {"ph": "X", "name": phase.what, "cat": "around", "pid": first + phase.device, "tid": tid, **span}


def _microseconds(time: Number) -> float:
    return round(float(time) * 1e6, 3)
