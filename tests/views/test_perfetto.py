from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.plans import Plan
from debubble.views import Scene, views
from tests.strategies import random_schedules, stage_costs
from tests.views.scenes import small_plan, surrounded, trace_of


def events(*scenes: Scene) -> dict[str, list[dict[str, Any]]]:
    """Events by phase."""
    events_of_phase: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in json.loads(views["perfetto"](scenes))["traceEvents"]:
        events_of_phase[event["ph"]].append(event)
    return events_of_phase


def predicted(plan: Plan) -> Scene:
    return Scene.predicted(plan)


def test_every_operation_is_a_slice_on_its_device() -> None:
    scene = predicted(small_plan())

    slices = {e["name"]: e for e in events(scene)["X"] if e["cat"] != "bubble"}

    assert len(slices) == len(scene.timeline.operations)
    assert slices["1F0"]["pid"] == 1
    assert (slices["1F0"]["ts"], slices["1F0"]["dur"]) == (2e6, 1e6)


def test_arrow_joins_a_message_with_its_consumer() -> None:
    events_of_phase = events(predicted(small_plan()))

    assert len(events_of_phase["s"]) == len(events_of_phase["f"]) == 8
    ends = {e["id"]: e for e in events_of_phase["f"]}
    assert all(ends[e["id"]]["pid"] == 1 - e["pid"] and ends[e["id"]]["ts"] >= e["ts"] for e in events_of_phase["s"])


def test_the_memory_counter_reaches_the_peak() -> None:
    plan = small_plan()
    counters = events(predicted(plan))["C"]

    peaks = [max(e["args"]["bytes"] for e in counters if e["pid"] == device) for device in range(2)]

    assert tuple(peaks) == plan.simulate().peak_memory


def test_second_scene_has_separate_processes() -> None:
    plan = small_plan()
    metadata = events(*Scene.pair(plan, trace_of(plan)))["M"]

    assert {"compute", "send", "recv"} <= {e["args"]["name"] for e in metadata if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in metadata if e["name"] == "process_name"}

    assert names == {
        0: "Predicted: device 0",
        1: "Predicted: device 1",
        1000: "Measured: device 0",
        1001: "Measured: device 1",
    }


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_slices_of_a_track_never_overlap(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules())
    timeline = db.simulate(schedule, data.draw(stage_costs(stages=schedule.stages, offload=True)))

    tracks: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(Scene(timeline, title="random"))["X"]:
        tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))

    for spans in tracks.values():
        assert all(end <= start + 0.01 for (_, end), (start, _) in itertools.pairwise(sorted(spans)))


def test_phases_around_a_program_have_a_separate_track() -> None:
    plan = small_plan()
    events_of_phase = events(Scene.pair(plan, surrounded(plan))[1])

    around = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in events_of_phase["X"] if e["cat"] == "around"]

    assert around == [("reads data", 0, 0, 2e6), ("reads data", 1, 0, 2e6), ("updates", 1, 22e6, 5e6)]
    assert next(e["ts"] for e in events_of_phase["X"] if e["name"] == "0F0") == 3e6
    assert {e["tid"] for e in events_of_phase["X"] if e["cat"] == "around"}.isdisjoint(
        e["tid"] for e in events_of_phase["X"] if e["cat"] != "around"
    )
