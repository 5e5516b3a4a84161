import sys
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.ir import Kind, Number, Op, Placement, StageCosts, check
from debubble.ir.lowering.op_costs import OpCosts
from debubble.search.constructive import list_scheduling
from debubble.search.constructive.building_blocks import INITIAL_GENES, BlockCandidate, build_pattern, repeat_pattern
from debubble.search.constructive.dispatch import compiled
from debubble.search.constructive.list_scheduling import (
    ALWAYS_WAIT,
    NO_OVERTAKING,
    GapFilling,
    Greedy,
    ListSchedule,
    ListScheduler,
    OrderFollowing,
)
from tests.strategies import stage_costs

RULES = st.one_of(
    st.builds(
        Greedy,
        alternate=st.booleans(),
        timeout=st.sampled_from([ALWAYS_WAIT, 0, 0.5]),
        overlap=st.sampled_from([0, 0.5, 1]),
    ),
    st.builds(GapFilling, min_gap=st.sampled_from([Fraction(1, 2), Fraction(1)])),
)


@st.composite
def steps(draw: st.DrawFn, *, exact: bool = True) -> tuple[Placement, int, StageCosts, list[Number | None]]:
    """A V or line placement with micro-batches, costs, and memory for activations per device (None: unlimited).

    Without `exact`, times and sizes are floats.
    """
    p, v, m = draw(st.integers(1, 5)), draw(st.integers(1, 2)), draw(st.integers(1, 8))
    costs = draw(stage_costs(stages=p * v)).replace(communication_model="latency")
    if draw(st.booleans()):
        costs = costs.replace(micro_batch_scale=[draw(st.integers(1, 4)) for _ in range(m)])
    factors: list[Number] = [1, Fraction(1, 3)] if exact else [0.1, 1.7]
    factor = draw(st.sampled_from(factors))
    costs = costs.replace(
        forward=[factor * t for t in costs.forward], activation=[factor * a for a in costs.activation],
        activation_after_input=[factor * a for a in costs.activation_after_input],
    )  # fmt: skip
    placement = Placement.v_shape(p, v)
    largest = max(costs.micro_batch_scale or (1,))
    counts = [draw(st.none() | st.integers(1, 3 * p)) for _ in range(p)]
    capacity: list[Number | None] = [
        None if n is None else n * largest * sum(sizes(costs, stages))
        for n, stages in zip(counts, placement.stages_of, strict=True)
    ]
    return placement, m, costs, capacity


def sizes(costs: StageCosts, stages: Sequence[int]) -> list[Number]:
    """The maximum bytes of a micro-batch on each of these stages."""
    return [max(costs.activation[s], costs.activation_after_input[s]) for s in stages]


def assert_equals_simulation(schedule: ListSchedule, costs: StageCosts, capacity: Sequence[Number | None]) -> None:
    """Ends, makespan and span equal those of the simulation, whose peaks are within the capacities."""
    placement, m = schedule.scheduler.placement, schedule.scheduler.micro_batches
    ordered = db.Schedule.of("listed", placement, m, schedule.orders)
    check(ordered)
    timeline = db.simulate(ordered, costs)
    ends = {o.op: o.end for lane in timeline.compute for o in lane}
    assert schedule.ends == tuple(tuple(ends[op] for op in order) for order in schedule.orders)
    assert (schedule.makespan, schedule.span) == (timeline.makespan, timeline.span)
    assert all(limit is None or peak <= limit for peak, limit in zip(timeline.peak_memory, capacity, strict=True))


@settings(max_examples=60)
@given(step=steps(), rule=RULES, split=st.booleans())
def test_list_schedules_of_rules_equal_the_simulation(
    step: tuple[Placement, int, StageCosts, list[Number | None]], rule: Greedy | GapFilling, split: bool
) -> None:
    placement, m, costs, capacity = step
    schedule = ListScheduler(placement, m, OpCosts(costs=costs), capacity, split=split).schedule(rule)
    if schedule is not None:
        assert_equals_simulation(schedule, costs, capacity)


@settings(max_examples=50)
@given(step=steps(), data=st.data())
def test_list_schedules_of_orders_equal_the_simulation(
    step: tuple[Placement, int, StageCosts, list[Number | None]], data: st.DataObject
) -> None:
    placement, m, costs, capacity = step
    candidate = BlockCandidate.from_genes(data.draw(st.sampled_from(INITIAL_GENES[2 * placement.chunks])))
    pattern = build_pattern(placement, costs, candidate.shape)
    if pattern is None:
        return
    # Late overtaking delays operations that have arrived, which the simulation does not.
    rule = replace(candidate.rule, late=False)
    schedule = ListScheduler(placement, m, OpCosts(costs=costs), capacity).follow(repeat_pattern(pattern, m), rule)
    if schedule is not None:
        assert_equals_simulation(schedule, costs, capacity)


@settings(max_examples=25)
@given(step=st.booleans().flatmap(lambda exact: steps(exact=exact)), rule=RULES, split=st.booleans())
def test_compiled_and_plain_list_scheduling_agree(
    step: tuple[Placement, int, StageCosts, list[Number | None]], rule: Greedy | GapFilling, split: bool
) -> None:
    placement, m, costs, capacity = step
    scheduler = ListScheduler(placement, m, OpCosts(costs=costs), capacity, split=split)
    schedules = []
    for operations in (0, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(list_scheduling, "MIN_COMPILED_OPERATIONS", operations)
            patch.setattr(list_scheduling, "MIN_LOADING_OPERATIONS", operations)
            schedules.append(scheduler.schedule(rule))
    compiled, plain = schedules
    if compiled is None or plain is None:
        assert compiled is plain
    else:
        assert (compiled.orders, compiled.ends) == (plain.orders, plain.ends)


def test_memory_is_not_reused_before_it_is_freed() -> None:
    costs = StageCosts.of(
        stages=8, backward_weight=[1] * 7 + [6], activation=[2, 14, 2, 2, 2, 2, 2, 2],
        activation_after_input=[1, 7, 1, 1, 1, 1, 1, 1], micro_batch_scale=[1, 2, 1, 2, 4, 4, 1],
    )  # fmt: skip
    capacity = [None, 128, None, None]
    scheduler = ListScheduler(Placement.v_shape(4), 7, OpCosts(costs=costs), capacity)
    schedule = scheduler.schedule(Greedy(alternate=False, timeout=ALWAYS_WAIT))
    assert schedule is not None
    assert_equals_simulation(schedule, costs, capacity)


def test_plain_python_agrees_if_numba_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = StageCosts.of(stages=16, communication=1, activation=2, activation_after_input=1)
    scheduler = ListScheduler(Placement.v_shape(8), 32, OpCosts(costs=costs), [32] * 8)
    expected = scheduler.schedule(Greedy())
    monkeypatch.setitem(sys.modules, "numba", None)
    compiled.cache_clear()
    try:
        schedule = scheduler.schedule(Greedy())
    finally:
        compiled.cache_clear()
    assert schedule is not None
    assert expected is not None
    assert schedule.ends == expected.ends


def numbers(scheduler: ListScheduler, names: str) -> list[int]:
    return [scheduler.number(Op.parse(name)) for name in names.split()]


def test_capacities_are_exact_fractions() -> None:
    costs = StageCosts.of(stages=1, activation=Fraction(1, 3), activation_after_input=Fraction(1, 3))
    scheduler = ListScheduler(Placement.linear(1), 3, OpCosts(costs=costs), [1])
    schedule = scheduler.follow([numbers(scheduler, "0F0 0F1 0F2 0I0 0I1 0I2")], OrderFollowing(0, NO_OVERTAKING))
    assert schedule is not None
    assert [op.kind for op in schedule.orders[0][:3]] == [Kind.F] * 3


def two_devices(rule: OrderFollowing, *, capacity: int) -> list[str]:
    """The order of device 0, which follows F0, I0, F1; I0 waits for a slow message, so that F1 may overtake."""
    costs = StageCosts.of(stages=2, communication=5, activation=1, activation_after_input=1)
    scheduler = ListScheduler(Placement.linear(2), 2, OpCosts(costs=costs), [capacity, 2])
    schedule = scheduler.follow([numbers(scheduler, f"{s}F0 {s}I0 {s}F1 {s}I1") for s in range(2)], rule)
    assert schedule is not None
    return [op.name for op in schedule.orders[0]]


def test_an_operation_that_has_arrived_overtakes_into_a_gap() -> None:
    assert two_devices(OrderFollowing(0, 0), capacity=2) == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]


@pytest.mark.parametrize(
    ("rule", "capacity"),
    [(OrderFollowing(0, NO_OVERTAKING), 2), (OrderFollowing(0, 0), 1), (OrderFollowing(0, 0, late=True), 2)],
)
def test_no_overtaking_if_disabled_out_of_memory_or_late(rule: OrderFollowing, capacity: int) -> None:
    assert two_devices(rule, capacity=capacity)[:2] == ["0F0", "0I0"]
