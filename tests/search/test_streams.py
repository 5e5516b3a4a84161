"""Transfers that stream in the order search: exact models hold what simulation says, and no bound is above it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings

from debubble.ir import Kind, Number, Op, Placement, StageCosts
from debubble.ir.stage_costs import HostLink
from debubble.papers.optpipe.program.milp import solve_milp
from debubble.papers.optpipe.program.milp_model import MilpModel
from debubble.search.annealing.search import search
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact.cp_model import build, schedule_of
from debubble.search.exact.cp_sat import solve
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem
from tests.search.orders import offload_problems, uniform

SHARES: list[Number] = [Fraction(1, 2), 1]


def streaming(problem: OrderProblem, overlap: Number) -> OrderProblem:
    return replace(problem, costs=problem.costs.replace(offload_overlap=overlap, reload_overlap=overlap))


@given(problem=offload_problems(micro_batches=3))
@settings(max_examples=25, deadline=None)
def test_no_bound_is_above_what_the_exact_model_finds(problem: OrderProblem) -> None:
    problem = replace(problem, costs=problem.costs.replace(communication_model="latency"))
    *_, start = search(problem, steps=200)
    model = build(problem, horizon=start.value)
    effort = Effort(20)
    solver = solver_of(effort)
    if status_of(solver, model.cp, effort) == "OPTIMAL":
        found = round(solver.objective_value) * model.unit
        # Where a share of an activation moves, the grid of the times is one of floats.
        assert lower_bound(problem) <= found * (1 + 1e-5)
        assert found <= problem.value(schedule_of(model, solver.value)) * (1 + 1e-5)
        assert found <= start.value * (1 + 1e-5)


@pytest.mark.parametrize("overlap", SHARES)
@pytest.mark.parametrize("host_link", ["full-duplex", "half-duplex"])
def test_the_exact_models_agree(overlap: Number, host_link: HostLink) -> None:
    problem = streaming(uniform(2, 3, offload=20, limit=2, communication=0, host_link=host_link), overlap)
    *_, found = optimize(problem, effort=5)
    if not found.optimal:
        *_, found = solve(problem, found, effort=Effort(60))
    answer = solve_milp(MilpModel(problem), effort=Effort(60))

    assert found.optimal
    assert answer.bound == pytest.approx(float(found.value), rel=1e-5)


def test_streams_take_less_time_than_transfers_that_wait() -> None:
    waiting = uniform(2, 3, offload=20, limit=2, communication=0)
    times = []
    for problem in (waiting, streaming(waiting, 1)):
        *_, found = optimize(problem, effort=5)
        assert found.optimal
        times.append(found.value)
    assert times == [150, 120]


def test_a_backward_that_may_be_whole_counts_with_the_lead_of_the_longer_one() -> None:
    costs = StageCosts.of(stages=1, offload=8, backward_input=1, backward_weight=3, reload_overlap=Fraction(1, 2))
    problem = OrderProblem(placement=Placement.linear(1), micro_batches=1, costs=costs, offload=True)
    backward = Op(Kind.I, 0, 0)

    assert problem.op_costs.lead(backward) == Fraction(1, 2)
    assert problem.backward_lead(0) == problem.op_costs.lead(backward._replace(kind=Kind.B)) == 2
