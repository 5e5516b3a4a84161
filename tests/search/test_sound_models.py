import itertools
from dataclasses import replace

import pytest

import debubble as db
from debubble.ir import DebubbleError, InputError, Kind, Op, Placement, RunOptions, Schedule, SolverError, StageCosts
from debubble.planners import Problem, planners
from debubble.planners.model_problem import problem_of
from debubble.search.annealing.search import search
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact import cp_sat
from debubble.search.exact.cp_model import ScheduleModel, build, schedule_of
from debubble.search.exact.cp_sat import hint, keeps_order, solve
from debubble.search.optimize import optimize
from debubble.search.problem import OrderProblem
from debubble.training.online.scheduler import check_searchable
from tests.search.orders import uniform

PLANNERS = [
    name if name in ("joint", "dapple+", "pipeoffload") else pytest.param(name, marks=pytest.mark.slow)
    for name in planners
    if name not in ("auto", "milp", "optpipe")
]


def tight_llama(limit: str) -> Problem:
    """A problem whose devices cannot keep every activation."""
    model, cluster = db.models["llama2-13b"], db.Cluster.parse("4xA100-80GB").with_limit(limit)
    return problem_of(model, cluster, RunOptions(sequence_length=4096), micro_batches=8, effort=0.2)


def has_solution(problem: OrderProblem, schedule: Schedule) -> bool:
    """Whether CP-SAT's model has a solution with the compute order, offloads and recomputations of a schedule."""
    fused = {(op.stage, op.micro_batch) for op in schedule.operations if op.kind is Kind.B}
    horizon = problem.value(schedule)
    model = build(problem, horizon=horizon, fused=fused, ordered=keeps_order(schedule))
    for order in schedule.orders:
        compute = [op for op in order if op.kind not in (Kind.O, Kind.L)]
        for before, after in itertools.pairwise(compute):
            model.cp.add(model.starts[after] >= model.ends[before])
    for op, literal in model.present.items():
        model.cp.add(literal == (op in schedule.operations))
    # Any solution will do.
    model.cp.clear_objective()
    hint(model, schedule)
    effort = Effort(60)
    return status_of(solver_of(effort), model.cp, effort) in ("OPTIMAL", "FEASIBLE")


@pytest.mark.parametrize("name", PLANNERS)
def test_the_model_contains_the_plan_of_every_planner(name: str) -> None:
    # DAPPLE and OHP-CMB need more memory.
    solution = planners[name](tight_llama("82GiB" if name in ("dapple", "ohp-cmb") else "71GiB")).solution
    plan = solution.schedule
    if plan.peers or {op.kind for op in plan.operations} & {Kind.G, Kind.D, Kind.S, Kind.P}:
        pytest.skip("is refused with a sentence")
    problem = OrderProblem.from_schedule(plan, solution.costs)
    if problem.has_fused_and_explicit_recompute:
        pytest.skip("is not modelled")
    assert has_solution(problem, plan)


def test_a_fused_backward_that_needs_less_memory_stays_fused() -> None:
    # An I would leave 3 bytes, where only 2 fit.
    costs = StageCosts.of(stages=2, activation=1, activation_after_input=3, memory_limit=2)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=40, costs=costs)
    problem = OrderProblem.from_schedule(schedule, costs)
    assert not problem.split_covers_fused
    *_, best = optimize(problem, starts=[schedule], effort=1)
    assert {op.kind for op in best.schedule.operations} == {Kind.F, Kind.B}
    assert best.value <= problem.value(schedule)


def test_split_backwards_prove_no_bound_if_fused_need_less() -> None:
    costs = StageCosts.of(stages=2, activation=1, activation_after_input=3, memory_limit=4)
    problem = OrderProblem(placement=Placement.linear(2), micro_batches=4, costs=costs)
    *_, start = search(problem, steps=0)
    *_, best = start, *solve(problem, start, effort=Effort(60))
    assert best.bound == start.bound


def test_fractional_sizes_exclude_no_feasible_schedule() -> None:
    costs = StageCosts.of(
        stages=2, forward=2, backward_input=3, backward_weight=1, activation=1.7, activation_after_input=1.037,
        memory_limit=3.4,
    )  # fmt: skip
    rounded = costs.replace(activation=[1000] * 2, activation_after_input=[610] * 2).with_limit(2000)
    bounds, values = [], []
    for sizes in (costs, rounded):
        problem = OrderProblem(placement=Placement.linear(2), micro_batches=4, costs=sizes)
        *_, start = search(problem, steps=0)
        *_, best = start, *solve(problem, start, effort=Effort(60))
        bounds.append(best.bound)
        values.append(best.value)
    assert bounds[0] <= values[1]


def test_a_model_that_misses_a_known_schedule_is_an_error() -> None:
    problem = uniform(3, 4, limit=4)
    *_, best = search(problem, steps=0)
    impossible = replace(best, value=10, bound=0)
    with pytest.raises(SolverError, match="fault of debubble"):
        list(solve(problem, impossible, effort=Effort(60)))


def test_the_search_ignores_the_proof_of_a_wrong_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(problem: OrderProblem, **options: object) -> ScheduleModel:
        model = build(problem, **options)  # type: ignore[arg-type]
        model.cp.add(model.starts[Op(Kind.F, 0, 0)] > 10**6)
        return model

    monkeypatch.setattr(cp_sat, "build", wrong)
    problem = uniform(3, 5, offload=20, limit=4)
    with pytest.warns(UserWarning, match="nothing is concluded"):
        *_, best = optimize(problem, effort=1)
    assert best.bound < best.value


def test_plans_with_peers_are_refused() -> None:
    model, cluster = db.models["llama-tiny"], db.Cluster.parse("2xCPU")
    plan = db.plan(model, cluster, micro_batches=4, sequence_length=128, dtype="fp32", planner="dapple")
    check_searchable(plan)
    with pytest.raises(InputError, match="peer"):
        check_searchable(replace(plan, schedule=replace(plan.schedule, peers={0: 1})))
    assert issubclass(SolverError, DebubbleError)


def test_a_micro_batch_may_be_offloaded_and_recomputed() -> None:
    """Only the bytes that recomputation keeps move: 2 of 4 leave, and R allocates 2 more."""
    costs = StageCosts.of(
        stages=1, activation=4, activation_after_input=4, activation_recomputed=2, recompute=1, offload=2,
        memory_limit=6,
    )  # fmt: skip
    order = "0F0 0O0 0F1 0R1 0I1 0W1 0L0 0R0 0I0 0W0"
    plan = Schedule.of("mine", Placement.linear(1), 2, [order.split()])
    problem = OrderProblem.from_schedule(plan, costs)
    assert has_solution(problem, plan)


def test_the_optimum_may_reorder_micro_batches() -> None:
    # Micro-batch 1 has its backwards first, while 0 is on the host; backwards in the forwards' order take 47.
    costs = StageCosts.of(
        stages=4, forward=[4, 3, 2, 1], backward_input=[3, 2, 1, 3], backward_weight=[1, 2, 3, 2],
        activation=[8, 8, 6, 8], activation_after_input=[3, 0, 2, 3], activation_recomputed=[6, 0, 2, 8],
        recompute=[3, 1, 1, 0], offload=[4, 4, 3, 4], reload=[4, 4, 3, 4], static=[1, 6, 0], memory_limit=16,
    )  # fmt: skip
    problem = OrderProblem(
        placement=Placement.of((0, 1, 2, 1)), micro_batches=3, costs=costs, offload=True, recompute=True
    )
    model, effort = build(problem, horizon=60, ordered=True), Effort(60)
    solver = solver_of(effort)
    assert status_of(solver, model.cp, effort) == "OPTIMAL"
    assert solver.objective_value * model.unit == problem.value(schedule_of(model, solver.value)) == 46
