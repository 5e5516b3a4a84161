from __future__ import annotations

import json
import re
from dataclasses import replace

from debubble.views import Scene, views
from tests.views.scenes import small_plan, trace_of


def page(*scenes: Scene) -> str:
    return views["html"](scenes).decode()


def data(text: str) -> dict:  # type: ignore[type-arg]
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])  # type: ignore[no-any-return]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(Scene.predicted(small_plan()))

    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://|fetch\(|import\(""", text)


def test_every_operation_that_takes_time_is_drawn_on_its_device() -> None:
    scene = Scene.predicted(small_plan())
    drawn = data(page(scene))["scenes"][0]

    bars = [
        sorted((bar[0], bar[1]) for _, lane in device["lanes"] for bar in lane) for device in drawn["devices"]
    ]  # fmt: skip

    assert bars == [
        sorted((float(o.start), float(o.end)) for o in scene.timeline.operations if o.device == d and o.end > o.start)
        for d in (0, 1)
    ]


def test_bubbles_fill_the_rest_of_the_compute_lane() -> None:
    scene = Scene.predicted(small_plan())
    drawn = data(page(scene))["scenes"][0]

    idle = [sum(end - start for start, end, *_ in device["bubbles"]) for device in drawn["devices"]]

    assert idle == [scene.timeline.makespan - busy for busy in scene.timeline.busy]


def test_memory_is_drawn_with_its_limit() -> None:
    drawn = data(page(Scene.predicted(small_plan())))["scenes"][0]["devices"][0]

    assert drawn["limit"] == 6
    assert max(held for _, held in drawn["memory"]) == 3
    assert drawn["memory"][-1][1] == 1


def test_the_memory_axis_ends_at_the_peak_where_the_limit_is_far_above() -> None:
    near, far = (data(page(Scene.predicted(small_plan(memory_limit=limit))))["scenes"][0] for limit in (6, 60))

    assert (near["highest"], far["highest"]) == (6, 3)


def test_prediction_and_measurement_share_the_page() -> None:
    plan = small_plan()
    text = page(*Scene.beside(plan, trace_of(plan, slower=1.5)))

    assert [scene["makespan"] for scene in data(text)["scenes"]] == [19, 28.5]
    assert text.count("<canvas") == 2
    assert "Predicted: 1f1b, planned by hand" in text
    assert "Measured: step 5" in text


def test_names_cannot_break_the_page() -> None:
    scene = replace(Scene.predicted(small_plan()), title="</script><b>&")

    text = page(scene)

    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in text
