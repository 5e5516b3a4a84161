"""Inputs of online decisions: measured costs, effects, and orders of summation."""

from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError, Kind, Op, Schedule, StageCosts
from debubble.training.online.measurement import drift, effect, measured_costs
from debubble.training.online.scheduler import better_orders, check_searchable, summation
from tests.support.online_cases import UNIT, gpipe_plan, ordered, traced
from tests.support.runtime_cases import LLAMA, LLAMA_TIED, plan_of

TRUE = StageCosts.of(
    forward=[2, 3], backward_input=[4, 3], backward_weight=[1, 2], recompute=[2, 3], communication=[0.5, 0],
    offload=[3, 4], reload=[2, 5], activation=2, memory_limit=20,
)  # fmt: skip
ASSUMED = UNIT.replace(offload=1, reload=1, recompute=1)


def test_split_schedule_measures_all_costs() -> None:
    start = ordered(gpipe_plan(ASSUMED), "zb-h1").schedule
    moved = (Op(Kind.O, 0, 1), Op(Kind.L, 0, 1)), (Op(Kind.O, 1, 1), Op(Kind.L, 1, 1))
    orders = []
    for order, (offload, reload) in zip(start.orders, moved, strict=True):
        listed = list(order)
        listed.insert(listed.index(Op(Kind.F, offload.stage, 1)) + 1, offload)
        listed.insert(listed.index(Op(Kind.I, offload.stage, 1)), reload)
        orders.append(tuple(listed))
    plan = replace(gpipe_plan(ASSUMED), schedule=replace(start, orders=tuple(orders)))
    costs = measured_costs(plan.schedule, ASSUMED, [traced(plan, TRUE)])
    for name in ("forward", "backward_input", "backward_weight", "recompute", "communication", "offload", "reload"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUE, name)), name
    assert costs.activation == ASSUMED.activation


def test_full_backward_is_split_by_the_assumed_ratio() -> None:
    plan = gpipe_plan(ASSUMED.replace(backward_weight=3))
    costs = measured_costs(plan.schedule, plan.costs, [traced(plan, TRUE)])
    assert costs.backward_input == (5 / 4, 5 / 4)
    assert costs.backward_weight == (15 / 4, 15 / 4)


def test_unused_operations_keep_their_assumed_time() -> None:
    plan = gpipe_plan(ASSUMED)
    costs = measured_costs(plan.schedule, ASSUMED, [traced(plan, TRUE)])
    assert (costs.offload, costs.reload) == (ASSUMED.offload, ASSUMED.reload)


def test_one_slow_step_changes_no_median() -> None:
    plan = gpipe_plan()
    steps = [traced(plan, UNIT), traced(plan, TRUE), traced(plan, UNIT)]
    assert measured_costs(plan.schedule, UNIT, steps) == UNIT.replace(forward=(1.0, 1.0))


def test_clocks_that_differ_change_no_message_time() -> None:
    plan = ordered(gpipe_plan(UNIT.replace(communication=[0.5, 0])), "1f1b")
    step = traced(plan, plan.costs)
    skewed = replace(
        step, events=tuple(e._replace(start=e.start + 9 * e.device, end=e.end + 9 * e.device) for e in step.events)
    )
    assert measured_costs(plan.schedule, UNIT, [skewed]).communication == (0.5, 0)


def test_drift_is_the_largest_change_of_a_stage() -> None:
    # 3 + 3 becomes 3 + 6, by a factor of 1.5: the first stage 1 - 1 / 1.5 faster, the other 2 / 1.5 - 1 slower.
    changed = UNIT.replace(forward=[1, 2], backward_input=[1, 2], backward_weight=[1, 2])
    assert drift(UNIT, changed) == pytest.approx(1 / 3)
    assert drift(UNIT, UNIT.replace(forward=3, backward_input=3, backward_weight=3)) == pytest.approx(0)


@pytest.mark.parametrize(
    ("after", "worse"),
    [
        ([1.0, 1.1, 0.9, 1.05, 0.95], False),
        ([1.05, 1.15, 0.95, 1.1, 1.0], False),  # within random variation
        ([1.5, 1.6, 1.4, 1.55, 1.45], True),
        ([1.0, 9.0, 0.9, 1.05, 0.95], False),  # one slow step
        ([0.5, 0.6, 0.4, 0.55, 0.45], False),
    ],
)
def test_switch_is_worse_if_steps_are_significantly_slower(after: Any, worse: bool) -> None:
    assert effect([1.0, 1.1, 0.9, 1.05, 0.95], after).worse is worse


def test_one_percent_is_no_difference_without_variation() -> None:
    assert not effect([100.0] * 5, [101.0] * 5).worse
    assert effect([100.0] * 5, [102.0] * 5).worse
    assert effect([1.0, 2.0, 30.0], [0.5, 1.0, 9.0]).gain == 0.5


@pytest.mark.parametrize("name", ["1f1b", "zb-h2"])
def test_published_orders_have_equal_sums(name: str) -> None:
    plan = gpipe_plan(micro_batches=8)
    assert summation(plan, ordered(plan, name).schedule) == summation(plan, plan.schedule)


def test_another_order_of_backwards_changes_sums() -> None:
    plan = gpipe_plan()
    late = replace(plan.schedule, orders=tuple((*o[:4], *reversed(o[4:])) for o in plan.schedule.orders))
    assert summation(plan, late) != summation(plan, plan.schedule)


def test_late_weight_gradient_changes_sums() -> None:
    def orders(first: Any, last: Any) -> Any:
        return Schedule.of("hand", db.Placement.linear(2), 2, [first.split(), last.split()])

    plan = plan_of(orders("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), LLAMA)
    mixed = orders("0F0 0F1 0I0 0B1 0W0", "1F0 1B0 1F1 1B1")
    assert summation(plan, mixed)["linear of unit 0"] == [("gradient", 1), ("gradient", 0)]
    assert summation(plan, mixed)["other of unit 0"] == summation(plan, plan.schedule)["other of unit 0"]


def test_tied_table_sums_the_gradients_of_two_stages() -> None:
    def plan(config: Any, order: Any) -> Any:
        return plan_of(Schedule.of("hand", db.Placement.of([0, 0]), 2, [order.split()]), config)

    early, late = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1", "0F0 1F0 0F1 1F1 1B0 1B1 0B0 0B1"
    for config, is_equal in ((LLAMA, True), (LLAMA_TIED, False)):
        plans = [plan(config, order) for order in (early, late)]
        sums = [summation(p, p.schedule) for p in plans]
        assert (sums[0] == sums[1]) is is_equal


def test_the_search_finds_faster_orders_with_the_same_sums() -> None:
    plan = gpipe_plan(UNIT.with_limit(4), micro_batches=8)
    plan = ordered(plan, "1f1b")
    orders = list(better_orders(plan, effort=5.0))
    times = [float(better.plan.simulate().makespan) for better in orders]
    assert times == sorted(set(times), reverse=True)
    assert times[-1] == 25  # 3 m + p - 1: zero bubble but for the warm-up
    for better in orders:
        assert summation(plan, better.plan.schedule) == summation(plan, plan.schedule)
        assert max(better.plan.simulate().peak_memory) <= 4
        assert (better.makespan, better.makespan_before) == (better.plan.simulate().makespan, 27)


def test_a_plan_with_optimizer_steps_or_peers_is_refused() -> None:
    stepping = ordered(gpipe_plan(StageCosts.of(stages=4, activation=1)), "1f1b")
    order = (*stepping.schedule.orders[0], Op(Kind.S, 0, 3))
    inside = replace(stepping.schedule, orders=(order, *stepping.schedule.orders[1:]))
    with pytest.raises(InputError, match="the plan also has S: train it without"):
        check_searchable(replace(stepping, schedule=inside))
    with pytest.raises(InputError, match="peer devices: train it without"):
        check_searchable(replace(stepping, schedule=replace(stepping.schedule, peers={0: 3})))
