from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Placement, Schedule, StageCosts
from debubble.schedules import schedules
from debubble.simulator import Repricer, simulate


@pytest.mark.parametrize("workspace", [None, 0, 9])
def test_memory_returns_to_static_after_the_step(workspace: Any) -> None:
    costs = StageCosts.of(stages=3, activation=10, activation_recomputed=4, recompute_workspace=workspace, static=2)
    schedule = schedules["1f1b"](devices=3, micro_batches=6, recomputed_stages=2)
    timeline = simulate(schedule, costs)
    assert [trace[-1][1] for trace in timeline.memory] == [2, 2, 2]
    assert timeline.peak_memory == Repricer(schedule).price(costs).peak_memory


def test_an_input_backward_has_a_separate_workspace() -> None:
    costs = StageCosts.of(
        stages=1, activation=10, activation_after_input=6, activation_recomputed=2, recompute_workspace=3,
        recompute_workspace_input=5,
    )  # fmt: skip
    fused = Schedule.of("fused", Placement.linear(1), 1, [["0F0", "0B0"]])
    split = Schedule.of("split", Placement.linear(1), 1, [["0F0", "0I0", "0W0"]])
    peaks = [max(db.simulate(replace(s, fused_recompute=frozenset({0})), costs).peak_memory) for s in (fused, split)]
    assert peaks == [2 + 3, 2 + 5]


def test_later_units_are_freed_when_a_unit_recomputes() -> None:
    """The first of two units of 10 bytes that keep 2 is restored after the second has freed all, or all but 5."""
    unit = Unit(
        type="dense", layer=0, forward=1, backward_input=1, backward_weight=1, static=0, activation_after_input=5,
        strategies={"none": Strategy(10), "full": Strategy(2, 1)},
    )  # fmt: skip
    units = Units(units=(unit, unit))
    costs = units.stage_costs([[(0, "full"), (1, "full")]], Placement.linear(1))
    assert costs.recompute_workspace == (8,)
    assert costs.recompute_workspace_input == (8 + 5 - 2,)
    last_saved = units.stage_costs([[(0, "full"), (1, "none")]], Placement.linear(1))
    assert last_saved.recompute_workspace == (0,)
