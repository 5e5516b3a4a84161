"""A fused recomputation frees what the forward kept and what it brought back, however little that is."""

import pytest

from debubble.ir import StageCosts
from debubble.schedules import schedules
from debubble.simulator import Repricer, simulate


@pytest.mark.parametrize("workspace", [None, 0, 1, 6, 9])
def test_memory_returns_to_static_after_the_step(workspace):
    costs = StageCosts.of(stages=3, activation=10, activation_recomputed=4, recompute_workspace=workspace, static=2)
    schedule = schedules["1f1b"](devices=3, micro_batches=6, recomputed_stages=2)
    timeline = simulate(schedule, costs)
    assert [trace[-1][1] for trace in timeline.memory] == [2, 2, 2]
    assert timeline.peak_memory == Repricer(schedule).price(costs).peak_memory
