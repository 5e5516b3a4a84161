"""Searching: every answer is a correct schedule within memory, bounds hold, and the same seed gives the same answer."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import DebubbleError, InfeasibleError, Kind, Lane, Number, Placement, Schedule, StageCosts
from debubble.search.annealing.search import search
from debubble.search.bounds import lower_bound
from debubble.search.optimize import optimize
from debubble.search.problem import Incumbent, OrderProblem
from debubble.simulator import TimedOperation, Timeline, simulate
from tests.search.orders import offload_problems, uniform
from tests.strategies import random_schedules, stage_costs


def check_independently(timeline: Timeline, problem: OrderProblem) -> None:
    """Memory at every instant, lanes exclusive, data before use: from times alone, not from the Program's waits."""
    times = {o.op: o for o in timeline.operations}
    for device, trace in enumerate(timeline.memory):
        limit = problem.costs.limit_of(device)
        at_instant = {at: held for at, held in trace}
        assert limit is None or max(at_instant.values()) <= limit
    lanes: dict[tuple[int, Lane], list[tuple[float, float]]] = {}
    for o in timeline.operations:
        if o.lane in (Lane.COMPUTE, Lane.D2H, Lane.H2D):
            lanes.setdefault((o.device, o.lane), []).append((float(o.start), float(o.end)))
    for spans in lanes.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end
    schedule, costs = timeline.program.schedule, problem.costs

    def streams(then: TimedOperation, before: TimedOperation, overlap: Number) -> bool:
        """Tell whether one begins late enough to run beside the rest of the other; everything moves."""
        return then.start >= before.end - overlap * min(then.duration, before.duration)

    for op, o in times.items():
        same = {kind: times[other] for kind in Kind if (other := op._replace(kind=kind)) in times}
        if op.kind in (Kind.I, Kind.B):
            assert o.start >= same[Kind.F].end
            assert Kind.L not in same or streams(o, same[Kind.L], costs.reload_overlap[op.stage])
            if op.stage + 1 < schedule.stages:
                assert o.start >= times[schedule.backward_of(op.stage + 1, op.micro_batch)].end
        if op.kind is Kind.F and op.stage:
            assert o.start >= times[op._replace(stage=op.stage - 1)].end + problem.costs.communication[op.stage - 1]
        if op.kind is Kind.W:
            assert o.start >= same[Kind.I].end
        if op.kind is Kind.L:
            assert o.start >= same[Kind.O].end
            assert streams(same[Kind.O], same[Kind.F], costs.offload_overlap[op.stage])


def last(problem: OrderProblem, *, steps: int, seed: int = 0) -> Incumbent:
    *_, best = search(problem, steps=steps, seed=seed)
    return best


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_incumbent_passes_an_independent_checker(data: st.DataObject) -> None:
    problem = data.draw(offload_problems(micro_batches=5))
    previous = float("inf")
    for incumbent in search(problem, steps=400):
        timeline = simulate(incumbent.schedule, problem.costs)
        check_independently(timeline, problem)
        assert timeline.makespan == incumbent.value < previous
        assert incumbent.bound <= incumbent.value
        previous = float(incumbent.value)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_no_schedule_beats_the_lower_bound(data: st.DataObject) -> None:
    schedule = data.draw(random_schedules())
    costs = data.draw(stage_costs(stages=schedule.stages, offload=True))
    costs = costs.with_limit(data.draw(st.none() | st.integers(5, 60)))
    try:
        timeline = simulate(schedule, costs)
    except DebubbleError:
        return
    for objective, value in (("makespan", timeline.makespan), ("span", timeline.span)):
        assert lower_bound(OrderProblem.of(schedule, costs, objective=objective)) <= value  # type: ignore[arg-type]


def test_the_same_seed_and_steps_give_the_same_schedule() -> None:
    problem = uniform(4, 6, offload=20, limit=6)
    answers = [last(problem, steps=6000, seed=seed) for seed in (3, 3, 4)]
    assert answers[0].schedule == answers[1].schedule
    assert answers[0].schedule != answers[2].schedule


@pytest.mark.parametrize(("p", "m", "to", "limit"), [(4, 8, 10, 3), (4, 16, 5, 4), (8, 16, 5, 8)])
def test_local_search_meets_the_bound_where_the_link_keeps_up(p: int, m: int, to: int, limit: int) -> None:
    best = last(uniform(p, m, offload=to, limit=2 * limit), steps=400_000)
    assert best.optimal


def test_no_more_moves_are_made_than_allowed() -> None:
    for steps in (0, 1, 500):
        assert all(each.steps <= steps for each in search(uniform(4, 8, offload=20, limit=6), steps=steps))


def test_a_given_start_is_improved_and_its_name_kept() -> None:
    problem = uniform(3, 4, offload=10, limit=4)
    start = Schedule.of(
        "mine", problem.placement, 4, [[f"{s}{k}{j}" for j in range(4) for k in "FB"] for s in range(3)]
    )
    first = next(search(problem, starts=[start], steps=10))
    assert first.schedule.name == "mine"
    assert last(problem, steps=3000).value < first.value


def test_several_chunks_in_a_v_are_searched() -> None:
    costs = StageCosts.of(stages=8, activation=2, memory_limit=12)
    problem = OrderProblem(placement=Placement.v_shape(4, 2), micro_batches=6, costs=costs)
    best = last(problem, steps=20_000)
    check_independently(simulate(best.schedule, costs), problem)
    assert best.value <= 1.2 * float(lower_bound(problem))


def test_recomputation_frees_memory_that_there_is_no_link_for() -> None:
    problem = uniform(4, 8, limit=2)
    without = last(problem, steps=3000)
    problem = OrderProblem(
        placement=problem.placement, micro_batches=8, costs=problem.costs.replace(recompute=2), recompute=True
    )
    best = last(problem, steps=20_000)
    assert best.schedule.explicit_recompute
    assert best.value < without.value


def test_link_groups_share_their_lane() -> None:
    problem = uniform(4, 6, offload=10, limit=4, link_groups=[(0, 1), (2, 3)])
    best = last(problem, steps=2000)
    timeline = simulate(best.schedule, problem.costs)
    spans = sorted((o.start, o.end) for o in timeline.operations if o.lane is Lane.D2H and o.device in (0, 1))
    assert all(start >= end for (_, end), (start, _) in itertools.pairwise(spans))


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="its peak would be 2, above its limit of 0"):
        next(search(uniform(2, 2, offload=10, limit=0), steps=1))


def test_optimize_streams_better_values_and_higher_bounds() -> None:
    stream = list(optimize(uniform(3, 5, offload=20, limit=4), effort=20))
    values, bounds = [float(i.value) for i in stream], [float(i.bound) for i in stream]
    assert values == sorted(values, reverse=True)
    assert bounds == sorted(bounds)
    assert stream[-1].optimal
