import pytest

import debubble as db

CLUSTER = "2xA100-80GB"


def test_a_sweep_has_the_plan_of_every_value() -> None:
    found = db.sweep("llama-tiny", CLUSTER, micro_batches=[2, 4], planner="dapple")
    alone = db.plan("llama-tiny", CLUSTER, micro_batches=4, planner="dapple")
    assert found.over == "micro_batches"
    assert found.points[1].plan is not None
    assert found.points[1].plan.schedule == alone.schedule


def test_a_value_for_which_nothing_fits_has_the_reason() -> None:
    found = db.sweep("llama-tiny", CLUSTER, micro_batches=4, memory_limit=["10MiB", "1GiB"], planner="dapple")
    assert [point.plan is None for point in found.points] == [True, False]
    assert found.points[0].reason != "" == found.points[1].reason


def test_clusters_can_be_swept() -> None:
    found = db.sweep("llama-tiny", [CLUSTER, "4xA100-80GB"], micro_batches=4, planner="dapple")
    assert [point.plan.devices for point in found.points if point.plan is not None] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"micro_batches": 4}, "varies one argument, which is a list; 0 are"),
        ({"micro_batches": [2, 4], "tensor": [1, 2]}, "2 are: micro_batches, tensor"),
        ({"micro_batches": [2]}, "2 to 64 values, not 1"),
    ],
)
def test_other_than_one_list_is_refused(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(db.InputError, match=said):
        db.sweep("llama-tiny", CLUSTER, planner="dapple", **arguments)


def test_the_page_has_a_slider_over_the_values() -> None:
    found = db.sweep("llama-tiny", CLUSTER, micro_batches=[2, 4, 8], planner="dapple")
    page = found.show().content.decode()
    assert '<input id="slider" type="range" min="0" max="2" value="0"' in page
    assert page.count("data-point=") == page.count("<svg") - 1 == 3
