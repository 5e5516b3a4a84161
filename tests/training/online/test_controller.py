"""When an online run searches, switches, and switches back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import debubble as db
from debubble.ir import StageCosts
from debubble.ir.trace import MemorySample
from debubble.plans import Plan
from debubble.training.online.scheduler import BetterOrder
from tests.support.online_cases import (
    UNIT,
    Finished,
    Machine,
    controlled,
    events_of,
    gpipe_plan,
    ordered,
    solved,
    traced,
)

SLOW_WEIGHTS = UNIT.replace(backward_weight=[1, 3])


@pytest.fixture
def plan() -> Any:
    return gpipe_plan()


def test_a_bad_order_is_replaced_by_the_best_and_that_is_logged(plan: Any, tmp_path: Path) -> None:
    controller = controlled(plan, tmp_path)
    Machine(controller, UNIT).run(8)
    # One step to settle and three to measure; then the same with the new order.
    assert events_of(controller) == [(4, "search"), (4, "adopted"), (8, "kept")]
    assert controller.plan.simulate().makespan == 13
    entry = controller.journal.entries[-1]
    assert entry.predicted is not None
    assert entry.measured is not None
    assert (entry.predicted.before, entry.predicted.after) == (15, 13)
    assert (entry.measured.before, entry.measured.after) == (15, 13)
    lines = [json.loads(line) for line in (tmp_path / "plan.online.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["search", "adopted", "kept"]
    assert lines[2]["predicted"] == {"before": 15.0, "after": 13.0, "gain": pytest.approx(2 / 15)}
    assert lines[2]["measured"] == lines[2]["predicted"]
    assert Plan.load(tmp_path / "plan.online.json").schedule == controller.plan.schedule


def test_switch_that_measures_worse_is_reverted(plan: Any, tmp_path: Path) -> None:
    controller = controlled(plan, tmp_path)
    Machine(controller, UNIT, seconds={"gpipe": 15.0, "searched": 16.0}).run(40)
    assert events_of(controller) == [(4, "search"), (4, "adopted"), (8, "taken back")]
    assert controller.plan is plan
    assert Plan.load(controller.journal.plan).schedule == plan.schedule


def test_after_a_switch_back_only_a_faster_order_is_tried(plan: Any, tmp_path: Path) -> None:
    better, best = (ordered(plan, name) for name in ("1f1b", "zb-h1"))
    times = {"gpipe": 15.0, "1f1b": 16.0, "zb-h1": 14.0}
    orders = [BetterOrder(order, makespan, 15.0) for order, makespan in ((best, 13.0), (better, 14.0), (better, 14.0))]
    controller = controlled(plan, tmp_path, search=lambda p, _: Finished(p, orders))
    Machine(controller, UNIT, seconds=times).run(24)
    assert [e.schedule for e in controller.journal.entries if e.event == "adopted"] == ["1f1b", "zb-h1"]
    assert [e.event for e in controller.journal.entries] == ["search", "adopted", "taken back", "adopted", "kept"]
    assert controller.plan.schedule.name == "zb-h1"


def test_an_order_that_gains_too_little_is_not_adopted(plan: Any, tmp_path: Path) -> None:
    controller = controlled(ordered(plan, "zb-h1"), tmp_path)
    Machine(controller, UNIT).run(20)
    assert events_of(controller) == [(4, "search")]


def test_drifting_costs_start_a_search_with_measured_costs(plan: Any, tmp_path: Path) -> None:
    asked = []

    def search(p: Any, _: int) -> Any:
        asked.append(p)
        return solved(p)

    controller = controlled(plan, tmp_path, search=search)
    machine = Machine(controller, UNIT)
    machine.run(8)
    machine.costs = SLOW_WEIGHTS
    machine.run(6)
    # One window measured the change; the second agrees.
    assert [p.costs.backward_weight for p in asked] == [(1, 1), (1, 3)]
    assert asked[1].schedule.name == "searched"
    assert [e.event for e in controller.journal.entries][:4] == ["search", "adopted", "kept", "search"]
    assert (controller.journal.entries[3].drift or 0) > 0.2


def test_contradicted_window_starts_no_search(plan: Any, tmp_path: Path) -> None:
    controller = controlled(ordered(plan, "zb-h1"), tmp_path)
    machine = Machine(controller, UNIT)
    machine.run(4)
    for costs in (SLOW_WEIGHTS, UNIT, SLOW_WEIGHTS, UNIT):
        machine.costs = costs
        machine.run(3)
    assert events_of(controller) == [(4, "search")]


def test_new_search_closes_the_previous_one(plan: Any, tmp_path: Path) -> None:
    searches = []

    def search(p: Any, _: int) -> Any:
        searches.append(Finished(p))
        return searches[-1]

    controller = controlled(plan, tmp_path, search=search)
    machine = Machine(controller, UNIT)
    machine.run(4)
    machine.costs = SLOW_WEIGHTS
    machine.run(6)
    assert [s.closed for s in searches] == [True, False]
    controller.close()
    assert [s.closed for s in searches] == [True, True]


def refused(_: Any, __: int) -> None:
    raise OSError("Cannot allocate memory")


@pytest.mark.parametrize(
    ("search", "cause"), [(lambda p, _: Finished(p, failed="MemoryError"), "MemoryError"), (refused, "Cannot allocate")]
)
def test_failed_search_is_reported_once_and_the_run_continues(
    plan: Any, tmp_path: Path, search: Any, cause: str
) -> None:
    controller = controlled(plan, tmp_path, search=search)
    Machine(controller, UNIT).run(20)
    assert events_of(controller) == [(4, "search"), (4, "search failed")]
    assert f"the search for a better order failed ({cause}" in str(controller.journal.entries[1])
    assert controller.plan is plan


def test_a_search_that_finds_nothing_in_time_changes_nothing(plan: Any, tmp_path: Path) -> None:
    controller = controlled(plan, tmp_path, search=lambda p, _: Finished(p))
    Machine(controller, UNIT).run(20)
    assert controller.plan is plan
    assert not controller.journal.plan.exists()


def test_switch_is_reported_in_a_sentence(tmp_path: Path) -> None:
    controller = controlled(gpipe_plan(milliseconds()), tmp_path)
    Machine(controller, milliseconds()).run(8)
    assert [str(entry) for entry in controller.journal.entries] == [
        "step 4: searching a better order; measured costs differ by 0%",
        "step 4: adopted another order: predicted 13.3% less time per step (15 ms to 13 ms)",
        "step 8: kept another order: predicted 13.3% less time per step (15 ms to 13 ms), measured 13.3% less time per"
        " step (15 ms to 13 ms)",
    ]


def milliseconds() -> StageCosts:
    return UNIT.replace(forward=1e-3, backward_input=1e-3, backward_weight=1e-3)


def test_memory_above_the_prediction_starts_a_search(tmp_path: Path) -> None:
    plan = ordered(gpipe_plan(UNIT.with_limit(6)), "zb-h2")
    controller = controlled(plan, tmp_path)
    for step in range(1, 12):
        trace = traced(controller.plan, UNIT)
        activations = db.simulate(controller.plan.schedule, UNIT).peak_memory[0]
        sample = MemorySample(0, 0.0, float(activations) + (3 if step > 4 else 0))
        controller.after_step(step, trace.makespan, replace(trace, memory=(sample,)))
    assert events_of(controller) == [(4, "search"), (7, "search"), (7, "adopted"), (11, "kept")]
    assert plan.simulate().peak_memory[0] == 6
    assert controller.plan.costs.static == (3, 0)
    assert controller.plan.simulate().peak_memory[0] <= 6
    assert controller.plan.simulate().makespan > plan.simulate().makespan
    began, adopted = (str(entry) for entry in controller.journal.entries[1:3])
    assert "and device 0 holds 3 more than predicted" in began
    assert "within the memory that the one before it exceeds" in adopted
