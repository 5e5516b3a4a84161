from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from debubble.ir import Number, Placement, StageCosts
from debubble.schedules import schedules
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact.cp_model import build
from debubble.search.problem import OrderProblem
from tests.strategies import stage_costs


@st.composite
def tight_problems(draw: st.DrawFn) -> OrderProblem:
    """Few stages, looped or in a V, equal or not, with memory for a few activations of each."""
    devices, chunks = draw(st.sampled_from([(1, 2), (2, 1), (3, 1), (2, 2)]))
    make = draw(st.sampled_from([Placement.looped, Placement.v_shape]))
    costs = draw(stage_costs(stages=devices * chunks)).replace(communication_model="latency")
    if draw(st.booleans()):
        equal = {name: getattr(costs, name)[:1] * costs.stages for name in ("forward", "activation")}
        costs = costs.replace(**equal)
    share = draw(st.sampled_from([0, 1, 2]))
    costs = costs.replace(activation_after_input=[a * share // 2 for a in costs.activation])
    return OrderProblem(
        placement=make(devices, chunks),
        micro_batches=draw(st.integers(1, 4)),
        costs=costs.with_limit(draw(st.integers(1, 3)) * sum(costs.activation[:chunks])),
        split=draw(st.booleans()),
        objective=draw(st.sampled_from(["makespan", "span"])),
    )


def optimum(problem: OrderProblem) -> Number | None:
    """The optimum that CP-SAT proves without a given bound; None if nothing fits."""
    costs, effort = problem.costs, Effort(20)
    serial_time = sum(map(costs.work, range(problem.stages))) + 2 * sum(costs.communication)
    model = build(problem, horizon=serial_time * problem.micro_batches)
    solver = solver_of(effort)
    status = status_of(solver, model.cp, effort)
    return round(solver.objective_value) * model.unit if status == "OPTIMAL" else None


@pytest.mark.slow
@given(problem=tight_problems())
@settings(max_examples=25)
def test_no_optimum_is_below_the_bound(problem: OrderProblem) -> None:
    best = optimum(problem)
    assert best is None or lower_bound(problem) <= best


def two_chunks(limit: int, *, remains: int = 1) -> OrderProblem:
    """F = I = W = 10 on eight devices, where 1F1B has eight micro-batches in flight; I leaves `remains` of 2."""
    costs = StageCosts.of(
        stages=16, forward=10, backward_input=10, backward_weight=10, activation=2, activation_after_input=remains,
        memory_limit=4 * limit,
    )  # fmt: skip
    return OrderProblem(placement=Placement.v_shape(8), micro_batches=32, costs=costs)


@pytest.mark.parametrize(("limit", "bound"), [(4, 2150), (6, 2030), (8, 1990)])
def test_the_bound_counts_idle_time_in_both_ramps(limit: int, bound: int) -> None:
    assert lower_bound(two_chunks(limit)) == bound


def test_the_bound_counts_one_ramp_if_i_frees_everything() -> None:
    assert lower_bound(two_chunks(4, remains=0)) == 2070


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_a_v_with_half_of_1f1bs_memory_meets_the_bound(name: str) -> None:
    problem = two_chunks(4)
    schedule = schedules[name](devices=8, micro_batches=32, costs=problem.costs)
    assert problem.value(schedule) == lower_bound(problem) == 2150


def test_offload_and_recomputation_lower_the_bound() -> None:
    problem = two_chunks(4)
    recomputed = replace(problem, recompute=True)
    moved = replace(problem, costs=problem.costs.replace(offload=1, reload=1), offload=True)
    assert (lower_bound(moved), lower_bound(recomputed)) == (1990, 2070)
