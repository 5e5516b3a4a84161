from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from debubble.views import Scene, views
from tests.views.scenes import small_plan, surrounded, trace_of


def test_the_png_is_a_png_of_the_promised_width() -> None:
    content = views["png"]([Scene.predicted(small_plan())])

    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == 14 * 150


def test_the_svg_has_the_title_and_a_number_in_every_bar() -> None:
    content = views["svg"]([Scene.predicted(small_plan(schedule="interleaved", chunks=2))])

    texts = [(e.text or "").strip() for e in ElementTree.fromstring(content).iter() if e.tag.endswith("text")]

    assert "Predicted: interleaved, planned by hand" in texts
    # Two chunks on two devices, forward and backward of four micro-batches.
    assert sum(text == "3" for text in texts) >= 8


def test_the_same_plan_gives_the_same_svg() -> None:
    scene = Scene.predicted(small_plan())

    assert views["svg"]([scene]) == views["svg"]([scene])


def test_two_scenes_are_drawn_under_each_other_on_one_scale() -> None:
    from debubble.views.picture import figure

    plan = small_plan()
    axes = figure(Scene.beside(plan, trace_of(plan, slower=2))).axes

    assert len(axes) == 4
    assert {a.get_xlim() for a in axes} == {(0, 38)}


def test_the_scale_has_room_for_what_surrounds_a_program() -> None:
    from debubble.views.picture import figure

    plan = small_plan()
    axes = figure(Scene.beside(plan, surrounded(plan))).axes

    assert {a.get_xlim() for a in axes} == {(-3, 24)}


def test_a_plan_without_a_limit_or_memory_is_drawn_too() -> None:
    scene = Scene.predicted(small_plan(memory_limit=None, activation=0, static=0))

    assert views["png"]([scene]).startswith(b"\x89PNG")


def test_a_limit_far_above_the_peak_is_said_instead_of_drawn() -> None:
    from debubble.views.picture import figure

    near, far = (figure([Scene.predicted(small_plan(memory_limit=limit))]).axes[1] for limit in (6, 60))

    assert near.get_ylim()[1] > 6
    assert [text.get_text() for text in near.texts] == []
    assert far.get_ylim()[1] < 6
    assert [text.get_text() for text in far.texts] == ["limit 60"]
