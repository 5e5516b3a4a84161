from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

import debubble as db
from debubble.ir import InputError
from debubble.simulator import Cause
from debubble.views import Scene, views
from debubble.views.palette import DARK
from debubble.views.picture import SIZES, TRANSFER, figure, picture
from tests.views.scenes import small_plan, surrounded, trace_of


def test_the_svg_has_the_title_and_a_number_in_every_bar() -> None:
    content = views["svg"]([Scene.predicted(small_plan(schedule="interleaved", chunks=2))])

    texts = [(e.text or "").strip() for e in ElementTree.fromstring(content).iter() if e.tag.endswith("text")]

    assert "Predicted: interleaved, planned by hand" in texts
    # Two chunks on two devices, forward and backward of four micro-batches.
    assert sum(text == "3" for text in texts) >= 8


def test_the_title_names_model_and_cluster() -> None:
    cluster = db.Cluster.parse("2xA100-80GB")
    plan = db.plan(db.models["llama-tiny"], cluster, micro_batches=4, planner="dapple")
    figures = [figure([Scene.predicted(plan)], size=SIZES[size]) for size in ("slide", "column")]
    titles = [figure.axes[0].get_title(loc="left") for figure in figures]

    assert [title.strip() for title in titles] == [
        "llama-tiny on 2 x A100-80GB: 1f1b, planned by dapple",
        "llama-tiny on 2 x A100-80GB: 1f1b",
    ]


@pytest.mark.parametrize("name", ["svg", pytest.param("pdf", marks=pytest.mark.slow)])
def test_the_same_plan_gives_the_same_picture(name: str) -> None:
    scene = Scene.predicted(small_plan())

    assert views[name]([scene]) == views[name]([scene])


def test_two_scenes_share_one_time_scale() -> None:
    plan = small_plan()
    axes = figure(Scene.pair(plan, trace_of(plan, slower=2))).axes

    assert len(axes) == 2
    assert {a.get_xlim() for a in axes} == {(0, 38)}
    assert {a.get_xlim() for a in figure(Scene.pair(plan, surrounded(plan))).axes} == {(-3, 24)}


def test_limit_far_above_the_peak_is_written_not_drawn() -> None:
    assert figure([Scene.predicted(small_plan(memory_limit=None, activation=0, static=0))]).axes
    near, far = (figure([Scene.predicted(small_plan(memory_limit=limit))]).axes[0] for limit in (6, 60))

    assert [len(axes.lines) for axes in (near, far)] == [2, 0]
    assert "3\nof 60" in [text.get_text() for text in far.texts]


@pytest.mark.parametrize(("size", "inches"), [("slide", 14), ("page", 7), ("column", 3.4)])
def test_picture_has_the_width_of_its_container(size: str, inches: float) -> None:
    content = picture([Scene.predicted(small_plan())], "png", size=size)

    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(content[16:20], "big") == inches * 150


def test_dark_picture_uses_the_dark_theme() -> None:
    content = picture([Scene.predicted(small_plan())], "svg", theme="dark").decode()

    assert DARK.paper in content
    assert DARK.causes[Cause.WARM_UP] in content


def test_an_unknown_theme_or_size_is_refused() -> None:
    scene = Scene.predicted(small_plan())

    with pytest.raises(InputError, match="There is no theme 'pink' of pictures; there are: light, dark"):
        picture([scene], "png", theme="pink")
    with pytest.raises(InputError, match="There is no size 'huge' of pictures; there are: slide, page, column"):
        picture([scene], "png", size="huge")


def test_transfers_in_two_directions_have_two_rows() -> None:
    costs = db.StageCosts.of(stages=3, offload=2.5, recompute=0.5, activation_recomputed=1)
    schedule = db.schedules["obscura"](devices=3, micro_batches=13, adjusted_stages=1, swapped_blocks=3)
    gantt = figure([Scene(db.simulate(schedule, costs), title="swapped")]).axes[0]
    top, height = TRANSFER
    tops = {
        round(box.y0, 3)
        for bars in gantt.collections
        for box in (path.get_extents() for path in bars.get_paths())
        if top - 0.01 < box.y0 < top + height and box.y1 < top + height
    }
    assert tops == {round(top, 3), round(top + height / 2, 3)}
