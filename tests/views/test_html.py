from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape

import pytest

import debubble as db
from debubble.ir import Origin, PlannedUnit, WhatIf
from debubble.ir.degrees import Degrees
from debubble.planners.degrees.remedies import Misfit, Remedy
from debubble.planners.degrees.space import Job
from debubble.views import Scene, views
from debubble.views.html.infeasible import misfit_page
from tests.views.scenes import small_plan, trace_of


def page(*scenes: Scene) -> str:
    return views["html"](scenes).decode()


def words(text: str) -> str:
    """The visible text of the page on one line."""
    body = re.sub(r"<(script|style).*?</\1>", "", text.partition("<body>")[2], flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def data(text: str) -> dict:  # type: ignore[type-arg]
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return json.loads(match[1])  # type: ignore[no-any-return]


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = page(Scene.predicted(small_plan()))

    assert not re.search(r"""(src|href)\s*=|@import|url\(|https?://|fetch\(|import\(""", text)


def test_no_line_breaks_between_a_number_and_its_unit() -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", planner="dapple", micro_batches=4)
    body = re.sub(r"<(script|style).*?</\1>", "", page(Scene.predicted(plan)), flags=re.DOTALL)

    assert re.search(r"\d\xa0MiB", body)
    assert re.search(r"\d\xa0ms", body)
    assert not re.search(r"\d (GiB|MiB|KiB|ms|µs|s)\b", body)


def test_every_operation_that_takes_time_is_drawn_on_its_device() -> None:
    scene = Scene.predicted(small_plan())
    drawn = data(page(scene))["scenes"][0]

    bars = [
        sorted(bar for _, lane in device["lanes"] for bar in zip(lane["start"], lane["end"], strict=True))
        for device in drawn["devices"]
    ]

    assert bars == [
        sorted((float(o.start), float(o.end)) for o in scene.timeline.operations if o.device == d and o.end > o.start)
        for d in (0, 1)
    ]
    idle = [sum(end - start for start, end, *_ in device["bubbles"]) for device in drawn["devices"]]
    assert idle == [scene.timeline.makespan - busy for busy in scene.timeline.busy]


def test_the_memory_axis_ends_at_the_peak_below_a_far_limit() -> None:
    near, far = (data(page(Scene.predicted(small_plan(memory_limit=limit))))["scenes"][0] for limit in (6, 60))

    assert (near["highest"], far["highest"]) == (6, 3)
    device = near["devices"][0]
    assert (device["limit"], max(peak for _, peak in device["memory"]), device["memory"][-1][1]) == (6, 3, 1)


def test_prediction_and_measurement_share_the_page() -> None:
    plan = small_plan()
    text = page(*Scene.pair(plan, trace_of(plan, slower=1.5)))

    assert [scene["makespan"] for scene in data(text)["scenes"]] == [19, 28.5]
    assert text.count("<canvas data-scene") == 2
    assert "The step took 1.50 times as long as predicted." in text
    assert "Predicted: 1f1b, planned by hand" in text
    assert "Measured: step 5" in text


def test_names_cannot_break_the_page() -> None:
    scene = replace(Scene.predicted(small_plan()), title="</script><b>&")

    text = page(scene)

    assert "</script><b>" not in text
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in text


def test_the_page_answers_in_the_order_of_its_questions() -> None:
    text = words(page(Scene.predicted(small_plan())))

    assert "Does it fit? Yes: 3 of 6 Device 0 is fullest, at 50.0% of its limit." in text
    assert "Does it fit? 3, and no limit" in words(page(Scene.predicted(small_plan(memory_limit=None))))
    assert "How fast? 19 per step" in text
    assert "Why not faster? The critical path spends" in text
    assert "What would help? More micro-batches or fewer pipeline devices." in text
    assert re.search(r"At stake is what filling and draining the pipeline takes: [0-9.]+% of the devices' time", text)
    assert text.index("Why not faster?") < text.index("What would help?") < text.index("Memory at the peak")


def test_page_without_changes_shows_shares() -> None:
    plan = db.plan(db.models["llama-tiny"], db.Cluster.parse("4xA100-80GB"), micro_batches=4, planner="dapple")
    text = page(Scene.predicted(plan))

    [share] = re.findall(r"At stake is what .* takes: about ([0-9.]+)% of the step", text)
    assert f"{share}%; memory is" in text


def test_row_shows_how_many_devices_it_represents() -> None:
    def planned(data: int) -> str:
        cluster = db.Cluster.parse("4xA100-80GB")
        plan = db.plan(db.models["llama-tiny"], cluster, micro_batches=4, planner="dapple", data=data)
        return words(page(Scene.predicted(plan)))

    assert "A row stands for 2 devices that do the same work." in planned(data=2)
    assert "A row stands for" not in planned(data=1)


def test_page_shows_the_call_that_made_the_plan() -> None:
    origin = Origin(command="debubble plan --costs c.json", date="2026-11-22T17:00:00+00:00", version="0.1.0")
    text = words(page(Scene.predicted(replace(small_plan(), origin=origin))))

    assert "command debubble plan --costs c.json made 2026-11-22T17:00:00+00:00, by debubble 0.1.0" in text


def test_page_shows_planned_changes() -> None:
    more = WhatIf(change="10% more memory", lever=False, step_time=9.5, seconds_per_sequence=9.5 / 4)
    text = words(page(Scene.predicted(replace(small_plan(), what_ifs=(more,)))))

    assert "What would help? 10% more memory: at least 50.0% faster per sequence." in text


def test_quick_plans_of_changes_are_compared() -> None:
    same, more = (
        WhatIf(change=change, lever=False, step_time=step, seconds_per_sequence=step / 4, quick=True)
        for change, step in (("the same job again", 20.0), ("10% more memory", 15.0))
    )
    text = words(page(Scene.predicted(replace(small_plan(), what_ifs=(same, more)))))

    assert "What would help? 10% more memory: at least 21.1% faster per sequence." in text


def test_the_reserve_is_what_the_limit_leaves_of_the_device() -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", planner="dapple", micro_batches=4)
    text = words(page(Scene.predicted(plan)))

    assert "of 72.00 GiB" in text
    assert "The limit leaves 8.00 GiB of the device as a reserve." in text


def test_page_of_a_misfit_suggests_offload_or_devices() -> None:
    job = Job(model=db.models["llama-tiny"], cluster=db.Cluster.parse("2xA100-80GB"), global_batch=4)
    more = Remedy(change="--cluster 4xA100-80GB", degrees=Degrees(), step_time=2.0, on_host="optimizers")
    origin = Origin(command="debubble plan", date="2026-11-22", version="0.1.0")
    text = misfit_page(Misfit(job=job, reason="Why.", remedies=(more,)), origin=origin).decode()

    assert "A step then takes 2 s, with optimizers on the host." in words(text)
    assert '<span class="option">--cluster</span> 4xA100-80GB' in text


def test_the_partition_is_a_strip_per_device() -> None:
    plan = small_plan(schedule="pipeoffload", chunks=2, offload=1, reload=1)
    units = (PlannedUnit("attention", 0, "core"), PlannedUnit("mlp", 0, "none"))
    text = page(Scene.predicted(replace(plan, partition=(units, *plan.partition[1:]))))

    assert 'title="attention 0, recomputing core"' in text
    assert "recomputes core" in text
    assert "share of micro-batches that are offloaded" in text


def test_memory_of_a_model_plan_is_stacked_by_component() -> None:
    plan = db.plan(db.models["llama2-7b"], db.Cluster.parse("4xA100-80GB"), planner="dapple", micro_batches=4)
    scene = Scene.predicted(plan)
    text = page(scene)
    device = data(text)["scenes"][0]["devices"][0]

    assert data(text)["scenes"][0]["parts"] == ["weights", "gradients", "optimizer", "workspace", "activations"]
    assert sum(device["static"]) == pytest.approx(plan.simulate().program.static[0])
    assert "<h1>llama2-7b on 4 x A100-80GB</h1>" in text
    assert "tokens/s" in words(text)


def test_two_plans_are_labeled_by_letters() -> None:
    plan = small_plan()
    text = page(Scene.predicted(plan), Scene.predicted(replace(small_plan(forward=2), planner="another")))
    assert [title[:3] for title in re.findall(r"<h1>(.*?)</h1>", text)] == ["A: ", "B: "]
    assert f"by {plan.planner}; B is " in words(text)
    assert "by another." in words(text)
    assert "A B B / A step 19 24 1.263" in words(text)


def test_measured_operations_are_coloured_by_their_difference() -> None:
    plan = small_plan()

    assert data(page(*Scene.pair(plan, trace_of(plan))))["differs"]
    assert not data(page(Scene.predicted(plan), Scene.predicted(plan)))["differs"]


def test_pictures_have_text_for_screen_readers() -> None:
    text = page(Scene.predicted(small_plan()))

    for tag in re.findall(r"<(?:canvas|input|button|div)[^>]*(?:role=\"img\"|<canvas|type=\"search\")[^>]*>", text):
        assert "aria-label" in tag
    assert 'role="status" aria-live="polite"' in text


def test_page_warns_if_similar_runs_used_more_memory() -> None:
    plan = db.plan("llama2-13b", "8xA100-40GB", micro_batches=16, planner="adapipe")
    text = words(page(Scene.predicted(plan)))

    assert "Does it fit? Likely: " in text
    assert "By published runs like it, up to " in text
