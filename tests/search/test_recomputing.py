from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Placement, Schedule, StageCosts, check
from debubble.search.constructive.recomputing import fused_backward_orders, shortest_recomputing
from debubble.search.constructive.zero_bubble import RULES
from tests.strategies import stage_costs


@st.composite
def recomputing_steps(draw: st.DrawFn) -> tuple[Placement, int, StageCosts, frozenset[int]]:
    """A V or line placement with micro-batches, costs, and the stages that recompute."""
    p, v, m = draw(st.integers(1, 4)), draw(st.integers(1, 2)), draw(st.integers(1, 8))
    costs = draw(stage_costs(stages=p * v)).replace(communication_model="latency")
    recomputing = draw(st.frozensets(st.integers(0, p * v - 1)))
    return Placement.v_shape(p, v), m, costs, recomputing


@settings(max_examples=60)
@given(step=recomputing_steps())
def test_orders_of_fused_backwards_have_the_simulated_time(
    step: tuple[Placement, int, StageCosts, frozenset[int]],
) -> None:
    placement, m, costs, recomputing = step
    for order in fused_backward_orders(placement, m, costs, [None] * placement.devices, recomputing, RULES):
        schedule = replace(Schedule.of("fused", placement, m, order.orders), fused_recompute=recomputing)
        check(schedule)
        assert db.simulate(schedule, costs).makespan == order.makespan


@settings(max_examples=60)
@given(step=recomputing_steps(), count=st.integers(1, 3))
def test_orders_of_fused_backwards_respect_the_memory_limit(
    step: tuple[Placement, int, StageCosts, frozenset[int]], count: int
) -> None:
    placement, m, costs, recomputing = step
    limit = [
        costs.static_of(d) + count * sum(costs.activation[s] for s in stages)
        for d, stages in enumerate(placement.stages_of)
    ]
    limited = costs.with_limit(limit)
    free = [limited.capacity_of(d) for d in range(placement.devices)]
    orders = fused_backward_orders(placement, m, limited, free, recomputing, RULES)
    assert orders
    for order in orders:
        schedule = replace(Schedule.of("fused", placement, m, order.orders), fused_recompute=recomputing)
        timeline = db.simulate(schedule, limited)
        assert all(peak <= allowed for peak, allowed in zip(timeline.peak_memory, limit, strict=True))


def test_the_shortest_schedule_that_fits_is_taken() -> None:
    # GPipe keeps three inputs and restores one micro-batch, 3 + 9 bytes; 1F1B keeps one activation, 10 bytes.
    costs = StageCosts.of(stages=1, activation=10, activation_recomputed=1)
    gpipe, one_f_one_b = (db.schedules[name](devices=1, micro_batches=3) for name in ("gpipe", "1f1b"))
    results = [
        shortest_recomputing([gpipe, one_f_one_b], costs.with_limit(limit), frozenset({0})) for limit in (12, 11, 9)
    ]
    assert [schedule.name for schedule in results] == ["gpipe", "1f1b", "gpipe"]
    assert {schedule.fused_recompute for schedule in results} == {frozenset({0})}
