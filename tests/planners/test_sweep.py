import re
from typing import Any

import pytest

import debubble as db
from debubble.planners.sweep import Sweep, SweepPoint
from debubble.views.html.sweep import sweep_curve, sweep_rows, sweep_words
from debubble.views.sweep_picture import sweep_picture

CLUSTER = "2xA100-80GB"


def test_a_sweep_has_the_plan_of_every_value() -> None:
    sweep = db.sweep("llama-tiny", CLUSTER, micro_batches=[2, 4], planner="dapple")
    single = db.plan("llama-tiny", CLUSTER, micro_batches=4, planner="dapple")
    assert sweep.over == "micro_batches"
    assert sweep.points[1].plan is not None
    assert sweep.points[1].plan.schedule == single.schedule


def test_a_value_for_which_nothing_fits_has_the_reason() -> None:
    sweep = db.sweep("llama-tiny", CLUSTER, micro_batches=4, memory_limit=["10MiB", "1GiB"], planner="dapple")
    assert [point.plan is None for point in sweep.points] == [True, False]
    assert sweep.points[0].reason != "" == sweep.points[1].reason


def test_a_faster_plan_for_less_memory_is_the_answer_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    faster, slower = (
        db.plan("llama-tiny", CLUSTER, micro_batches=4, memory_limit=limit, planner=planner)
        for limit, planner in (("1GiB", "dapple"), ("2GiB", "dapple+"))
    )
    plans = {"1GiB": faster, "2GiB": slower}
    monkeypatch.setattr("debubble.planners.sweep.plan", lambda *_, memory_limit, **__: plans[memory_limit])
    less, more = db.sweep("llama-tiny", CLUSTER, micro_batches=4, memory_limit=["1GiB", "2GiB"]).points
    assert (less.found_with, more.found_with, more.plan) == (None, "1GiB", faster)


def test_clusters_can_be_swept() -> None:
    sweep = db.sweep("llama-tiny", [CLUSTER, "4xA100-80GB"], micro_batches=4, planner="dapple")
    assert [point.plan.devices for point in sweep.points if point.plan is not None] == [2, 4]


def test_a_wrong_name_is_refused_before_anything_is_planned() -> None:
    planned: list[Any] = []
    with pytest.raises(db.InputError, match="no device 'Foo'"):
        db.sweep("llama-tiny", [CLUSTER, "2xFoo"], micro_batches=4, progress_of=planned.append, planner="dapple")
    assert planned == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"micro_batches": 4}, "varies one argument, which is a list; 0 are"),
        ({"micro_batches": [2, 4], "tensor": [1, 2]}, "2 are: micro_batches, tensor"),
        ({"micro_batches": [2]}, "2 to 64 values, not 1"),
    ],
)
def test_a_sweep_needs_exactly_one_list_of_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(db.InputError, match=message):
        db.sweep("llama-tiny", CLUSTER, planner="dapple", **arguments)


def test_the_page_has_a_slider_over_the_values() -> None:
    sweep = db.sweep("llama-tiny", CLUSTER, micro_batches=[2, 4, 8], planner="dapple")
    page = sweep.show().content.decode()
    assert '<input id="slider" type="range" min="0" max="2" value="0"' in page
    assert page.count("data-point=") == page.count(">device 0</text>") == 3


@pytest.mark.parametrize(
    ("over", "values", "places"),
    [
        ("micro_batches", [4, 8, 32], [0, 1 / 3, 1]),
        ("micro_batches", [2, 3, 6], [0, 0.25, 1]),
        ("zero", [0, 1, 3], [0, 1 / 3, 1]),
        ("memory_limit", ["24GiB", "32GiB", "40GiB", "80GiB"], [0, 1 / 7, 2 / 7, 1]),
        ("cluster", ["4xH100-80GB", "8xH100-80GB", "32xH100-80GB"], [0, 1 / 3, 1]),
        ("cluster", ["4xH100-80GB", "8xA100-80GB", "32xH100-80GB"], [0, 0.5, 1]),
        ("optimizer", ["adamw", "adam", "sgd"], [0, 0.5, 1]),
        ("micro_batches", [2, 2], [0, 1]),
    ],
)
def test_numeric_values_are_drawn_to_scale(over: str, values: list[Any], places: list[float]) -> None:
    sweep = Sweep(over, tuple(SweepPoint(value, None, "Nothing fits.") for value in values))
    xs = [mark["x"] for mark in sweep_curve(sweep)["marks"]]
    assert [(x - xs[0]) / (xs[-1] - xs[0]) for x in xs] == pytest.approx(places, abs=1e-3)
    picture = sweep_picture(sweep, "svg")
    drawn = [float(x) for x in re.findall(rb"translate\(([0-9.]+) [0-9.]+\) rotate\(-90\)\">does not fit", picture)]
    assert [(x - drawn[0]) / (drawn[-1] - drawn[0]) for x in drawn] == pytest.approx(places, abs=1e-3)


def test_labels_of_near_values_do_not_overlap() -> None:
    sweep = Sweep("micro_batches", tuple(SweepPoint(value, None, "Nothing fits.") for value in (1000, 1001, 9000)))
    assert [mark["label"] for mark in sweep_curve(sweep)["marks"]] == ["1000", "", "9000"]
    assert re.findall(rb">(\d{4})</text>", sweep_picture(sweep, "svg")) == [b"1000", b"9000"]


def test_labels_are_fewer_on_a_phone() -> None:
    values = [f"{count}xA100-80GB" for count in (1, 2, 4, 8, 16)]
    sweep = Sweep("cluster", tuple(SweepPoint(value, None, "Nothing fits.") for value in values))
    marks = sweep_curve(sweep)["marks"]
    assert [mark["label"] for mark in marks] == values
    assert [mark["on_phones"] for mark in marks] == [True, False, True, False, True]


def test_devices_with_few_measured_runs_are_named() -> None:
    clusters = ["2xA100-80GB", "2xRTX4090-24GB", "2xRTX6000-PRO-96GB"]
    sweep = db.sweep("llama-tiny", clusters, micro_batches=4, planner="dapple")
    assert sweep_rows(sweep).caption.endswith(" Few or none of them ran on RTX4090-24GB and RTX6000-PRO-96GB.")


def test_the_words_of_a_value_describe_its_plan() -> None:
    sweep = db.sweep("llama-tiny", CLUSTER, micro_batches=[4, 8], planner="dapple")
    assert sweep_words(sweep.points[0]) == (
        "pipeline 2, 4 micro-batches of 1, 1f1b; no recomputation; no offload;"
        " runs in debubble, torch, torchtitan, automodel, megatron, primus, deepspeed"
    )


def test_the_words_of_a_value_include_host_memory() -> None:
    sweep = db.sweep(
        "llama-tiny", CLUSTER, micro_batches=[4, 8], planner="dapple", pipeline=1, data=2, zero=1, host_optimizer=0.5
    )
    assert "of host memory per GPU" in sweep_words(sweep.points[0])


def test_a_picture_of_a_sweep_names_its_values_and_is_repeatable() -> None:
    sweep = db.sweep("llama-tiny", CLUSTER, micro_batches=[2, 4], planner="dapple")
    drawn = sweep_picture(sweep, "svg", size="column")
    assert {">2</text>", ">4</text>", ">micro batches</text>"} <= {
        line[line.rindex(">", 0, -8) :] for line in drawn.decode().splitlines() if line.endswith("</text>")
    }
    assert drawn == sweep_picture(sweep, "svg", size="column")
    with pytest.raises(db.InputError, match="There is no size 'wall' of pictures"):
        sweep_picture(sweep, "svg", size="wall")


def test_ctrl_c_keeps_the_plans_before_it() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    sweep = db.sweep(
        "llama-tiny", CLUSTER, micro_batches=[2, 4, 8], planner="dapple",
        progress_of=lambda value: interrupt if value == 4 else None,
    )  # fmt: skip
    assert sweep.interrupted
    assert [point.value for point in sweep.points] == [2]


def test_ctrl_c_during_the_first_value_keeps_its_plan() -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    sweep = db.sweep("llama-tiny", CLUSTER, micro_batches=[2, 4], progress_of=lambda _: interrupt)
    (first,) = sweep.points
    assert sweep.interrupted
    assert first.plan is not None
    assert first.plan.interrupted


def test_a_picture_marks_values_that_do_not_fit() -> None:
    sweep = db.sweep("llama-tiny", CLUSTER, memory_limit=["100KiB", "10GiB"], planner="dapple", micro_batches=2)
    assert sweep_picture(sweep, "svg").count(b">does not fit</text>") == 1
