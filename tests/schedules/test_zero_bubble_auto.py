"""The automatic schedule reaches what is proven optimal, and refuses what cannot fit."""

import pytest

import debubble as db


def found(F, I, W, C, limit, p=4, m=8):  # noqa: E741 - the paper's letters
    costs = db.StageCosts.of(
        stages=p,
        forward=F,
        backward_input=I,
        backward_weight=W,
        communication=C,
        activation=1,
        activation_after_input=1,
        memory_limit=limit,
    )
    return db.simulate(db.schedules["zb"](devices=p, micro_batches=m, costs=costs), costs)


@pytest.mark.parametrize(("limit", "optimum"), [(1, 72), (4, 27), (8, 27)])
def test_zb_is_optimal_where_no_search_is_needed(limit, optimum):
    assert found(1, 1, 1, 0, limit).makespan == optimum


def test_zb_with_twice_the_memory_leaves_no_bubble_within_a_span():
    costs = db.StageCosts.of(stages=8, activation_after_input=1, memory_limit=16)
    schedule = db.schedules["zb"](devices=8, micro_batches=32, costs=costs, objective="span")
    assert db.simulate(schedule, costs).span == 3 * 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "limit", "optimum"),
    [((1, 1, 1, 0), 2, 41), ((1, 1, 1, 0), 3, 31), ((10, 11, 9, 1), 2, 440), ((10, 11, 9, 1), 3, 334)],
)
def test_zb_below_1f1bs_memory_reaches_the_proven_optimum(times, limit, optimum):
    assert found(*times, limit).makespan == optimum


def test_zb_refuses_a_limit_below_one_activation():
    with pytest.raises(db.InfeasibleError, match="raise the memory limit"):
        found(1, 1, 1, 0, limit=0)


def test_zb_honours_a_limit_per_device():
    costs = db.StageCosts.of(stages=4, activation=2, memory_limit=[8, 6, 4, 8])
    schedule = db.schedules["zb"](devices=4, micro_batches=8, costs=costs, steps=0)
    peaks = db.simulate(schedule, costs).peak_memory
    assert all(peak <= limit for peak, limit in zip(peaks, [8, 6, 4, 8], strict=True))


def test_a_heavier_last_stage_changes_the_order():
    even = db.StageCosts.of(stages=4)
    heavy = db.StageCosts.of(stages=4, forward=[1, 1, 1, 3], backward_input=[1, 1, 1, 3])
    build = db.schedules["zb"]
    assert build(devices=4, micro_batches=8, costs=even) != build(devices=4, micro_batches=8, costs=heavy)
