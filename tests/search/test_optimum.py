import itertools
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from ortools.math_opt.python import mathopt

from debubble.ir import DebubbleError, Kind, Number, Op, Placement, StageCosts
from debubble.ir.stage_costs import HostLink
from debubble.papers.optpipe.program.milp import milp_incumbents, solve_milp
from debubble.papers.optpipe.program.milp_model import MilpModel, Reductions
from debubble.schedules import schedules
from debubble.search.annealing.search import search
from debubble.search.bounds import lower_bound
from debubble.search.effort import Effort, solver_of, status_of
from debubble.search.exact.cp_model import build, schedule_of
from debubble.search.exact.cp_sat import solve
from debubble.search.optimize import optimize
from debubble.search.problem import Incumbent, Objective, OrderProblem
from debubble.simulator import simulate
from tests.search.orders import offload_problems, uniform

HALF = Fraction(1, 2)
PAGE = (Path(__file__).parents[2] / "docs/notes/optpipe.md").read_text()


def instance(
    p: int, m: int, times: tuple[Number, Number, Number], communication: Number, offload: Number | None, limit: Number,
    *, host_link: HostLink = "full-duplex", objective: Objective = "makespan",
) -> OrderProblem:  # fmt: skip
    forward, backward_input, backward_weight = times
    costs = StageCosts.of(
        stages=p, forward=forward, backward_input=backward_input, backward_weight=backward_weight, activation=1,
        activation_after_input=HALF, communication=communication, offload=offload, memory_limit=limit,
        host_link=host_link,
    )  # fmt: skip
    return OrderProblem(
        placement=Placement.linear(p), micro_batches=m, costs=costs, offload=offload is not None, objective=objective
    )


def proven(problem: OrderProblem) -> Incumbent:
    *_, best = search(problem, steps=4000)
    if not best.optimal:
        *_, best = solve(problem, best, effort=Effort(60))
    return best


ONE = (1, 1, 1)


@pytest.mark.parametrize(
    ("p", "m", "times", "communication", "offload", "limit", "host_link", "optimum"),
    [
        (3, 4, (2, 2, 2), 0, 1, 2, "half-duplex", 28),
        (3, 3, (5, 5, 5), 1, 5, 3 * HALF, "full-duplex", 77),
        (2, 5, (2, 3, 1), 0, 2, 2, "half-duplex", 33),
        (3, 3, ONE, Fraction(1, 5), 1, 3 * HALF, "full-duplex", Fraction(77, 5)),
        # The example of OptPipe, figure 4.
        (4, 4, ONE, 0, 1, 3, "full-duplex", 15),
        (4, 8, ONE, 0, 1, 3, "full-duplex", 27),
    ],
)
def test_offload_instances_are_proven_optimal(
    p: int, m: int, times: tuple[int, int, int], communication: Number, offload: int, limit: Number,
    host_link: HostLink, optimum: Number,
) -> None:  # fmt: skip
    best = proven(instance(p, m, times, communication, offload, limit, host_link=host_link))
    assert best.optimal
    assert best.value == optimum


@pytest.mark.parametrize(
    ("p", "m", "optima"),
    [
        (4, 5, [(45, 45), (27, 27), (21, 21), (18, 18), (18, 17)]),
        (3, 4, [(28, 28), (17, 17), (14, 14), (14, 13), (14, 13), (14, 13)]),
    ],
)
def test_without_offload_every_limit_is_proven_optimal(p: int, m: int, optima: list[tuple[int, int]]) -> None:
    for limit, (makespan, span) in enumerate(optima, start=1):
        assert proven(instance(p, m, ONE, 0, None, limit)).value == makespan
        best = proven(instance(p, m, ONE, 0, None, limit, objective="span"))
        assert (best.value, best.optimal) == (span, True)


@pytest.mark.parametrize(
    ("micro_batches", "time", "communication", "limit", "offload", "link", "optimum"),
    [(4, 2, 0, 2, 1, "full-duplex", 28), (3, 5, 1, 3 * HALF, 5, "half-duplex", 77)],
)
def test_the_order_on_a_shared_link_is_proven_optimal(
    micro_batches: int, time: int, communication: int, limit: Number, offload: int, link: HostLink, optimum: int
) -> None:
    problem = on_one_switch(3, micro_batches, (time, time, time), communication, offload, limit, link)
    *_, best = optimize(problem, effort=6.0)
    row = f"| 3, {micro_batches} | {time}, {communication} | {float(limit):g} | {offload} | {link.replace('-', ' ')} |"
    assert (best.bound, best.value) == (optimum, optimum)
    assert f"{row} {optimum} | {optimum} |" in PAGE


def linear_extensions(chains: list[list[Op]]) -> Iterator[tuple[Op, ...]]:
    """Every merge of the chains."""
    if not any(chains):
        yield ()
    for index, chain in enumerate(chains):
        if chain:
            for rest in linear_extensions([*chains[:index], chain[1:], *chains[index + 1 :]]):
                yield (chain[0], *rest)


def lists(stage: int, offloaded: set[int]) -> list[tuple[Op, ...]]:
    kinds = {True: (Kind.F, Kind.O, Kind.L, Kind.I, Kind.W), False: (Kind.F, Kind.I, Kind.W)}
    return list(linear_extensions([[Op(k, stage, j) for k in kinds[j in offloaded]] for j in range(2)]))


def test_brute_force_finds_the_same_optimum() -> None:
    base = instance(2, 2, (2, 3, 1), 1, 2, 9)
    problem = OrderProblem(placement=base.placement, micro_batches=2, costs=base.costs.with_limit((1, 2)), offload=True)
    best: Number | None = None
    # The last device never gains from offload, as its backward can follow its forward.
    # Micro-batches are equal, so that the first forward may be that of 0.
    firsts = [order for offloaded in (set(), {0}, {1}) for order in lists(0, offloaded) if order[0].micro_batch == 0]
    for orders in itertools.product(firsts, lists(1, set())):
        try:
            value = simulate(problem.schedule(orders), problem.costs).makespan
        except DebubbleError:
            continue
        best = value if best is None or value < best else best
    incumbent = proven(problem)
    assert incumbent.optimal
    assert best is not None
    assert incumbent.value <= best
    moved = set(incumbent.schedule.offloaded)
    if not moved & {(1, 0), (1, 1)} and moved != {(0, 0), (0, 1)}:
        assert incumbent.value == best


@pytest.mark.parametrize(
    "reductions",
    [
        Reductions(),
        Reductions(one_direction=False),
        Reductions(transitive=False),
        Reductions(triangles="eager"),
        Reductions(triangles="lazy"),
    ],
    ids=["all", "both-directions", "no-transitivity", "eager-triangles", "lazy-triangles"],
)
def test_the_milp_has_the_same_optimum_without_a_reduction(reductions: Reductions) -> None:
    answer = solve_milp(MilpModel(instance(3, 3, ONE, 0, None, 2), reductions), effort=Effort(60))
    assert answer.incumbent is not None
    assert answer.incumbent.value == proven(instance(3, 3, ONE, 0, None, 2)).value
    assert answer.bound == pytest.approx(float(answer.incumbent.value), rel=1e-5)


def test_the_milp_begins_at_its_start_and_ends_optimal() -> None:
    problem = instance(3, 3, ONE, 0, 1, 2)
    start = schedules["adaoffload"](devices=3, micro_batches=3, costs=problem.costs)
    first, *_, last = milp_incumbents(MilpModel(problem), effort=Effort(60), start=start)
    assert (first.schedule, first.value) == (start, problem.value(start))
    assert (last.value, last.optimal) == (12, True)
    assert last.bound == pytest.approx(12)


def test_a_given_schedule_is_a_solution_of_the_milp() -> None:
    problem = instance(4, 8, (10, 10, 10), 1, 10, 3)
    start = schedules["adaoffload"](devices=4, micro_batches=8, costs=problem.costs)
    model = MilpModel(problem)
    hint = model.hint(start)
    for variable, value in hint.variable_values.items():
        if variable.integer:
            variable.lower_bound = variable.upper_bound = value
    result = mathopt.solve(model.model, mathopt.SolverType.GSCIP)
    assert result.has_primal_feasible_solution()
    assert result.objective_value() <= hint.variable_values[model.span] * (1 + 1e-9)


def test_transitivity_and_one_direction_make_the_milp_smaller() -> None:
    problem = instance(3, 3, ONE, 0, None, 3)
    sizes = [
        MilpModel(problem, reductions).binaries
        for reductions in (Reductions(), Reductions(transitive=False), Reductions(one_direction=False))
    ]
    # Pairs of a later micro-batch and an earlier kind are 3 x 3 per stage; with the opposite pairs, twice that.
    assert sizes == [27, 54, 54]


def on_one_switch(
    p: int, m: int, times: tuple[int, int, int], communication: int, offload: int, limit: Number, host_link: HostLink
) -> OrderProblem:
    plain = instance(p, m, times, communication, offload, limit, host_link=host_link)
    return replace(plain, costs=plain.costs.replace(link_groups=[tuple(range(p))]))


def exact(problem: OrderProblem) -> Number:
    """The optimum of CP-SAT's model, in which transfers of a shared link may have any order."""
    model = build(problem, horizon=200)
    solver = solver_of(Effort(120))
    assert status_of(solver, model.cp, Effort(120)) == "OPTIMAL"
    proven: Number = round(solver.objective_value) * model.unit
    return proven


def test_link_order_by_arrival_is_kept_if_optimal() -> None:
    problem = on_one_switch(3, 2, (1, 2, 2), 1, 2, 1, "full-duplex")
    best = proven(problem)
    starts = {operation.op: operation.start for operation in simulate(best.schedule, problem.costs).operations}
    assert problem.with_link_orders(best.schedule, starts) == best.schedule


@pytest.mark.parametrize(("host_link", "optimum"), [("full-duplex", 23), ("half-duplex", 24)])
def test_milp_and_cp_sat_agree_on_a_shared_link(host_link: HostLink, optimum: int) -> None:
    problem = on_one_switch(3, 2, (1, 2, 2), 1, 2, 1, host_link)
    assert exact(problem) == optimum
    answer = solve_milp(MilpModel(problem), effort=Effort(60))
    assert answer.bound == pytest.approx(optimum, rel=1e-5)
    assert answer.incumbent is not None
    assert answer.incumbent.value == optimum


@pytest.mark.slow
@pytest.mark.parametrize("host_link", ["full-duplex", "half-duplex"])
def test_the_milp_proves_the_order_on_a_shared_link(host_link: HostLink) -> None:
    problem = on_one_switch(3, 3, (5, 5, 5), 1, 5, 3 * HALF, host_link)
    answer = solve_milp(MilpModel(problem, Reductions(triangles="lazy")), effort=Effort(60))
    assert answer.incumbent is not None
    assert (answer.incumbent.value, answer.incumbent.optimal) == (77, True)


def streaming(problem: OrderProblem, overlap: Number) -> OrderProblem:
    return replace(problem, costs=problem.costs.replace(offload_overlap=overlap, reload_overlap=overlap))


@given(problem=offload_problems(micro_batches=3))
@settings(max_examples=5)
def test_no_bound_is_above_the_optimum_of_the_exact_model(problem: OrderProblem) -> None:
    problem = replace(problem, costs=problem.costs.replace(communication_model="latency"))
    *_, start = search(problem, steps=200)
    model = build(problem, horizon=start.value)
    effort = Effort(20)
    solver = solver_of(effort)
    if status_of(solver, model.cp, effort) == "OPTIMAL":
        optimum = round(solver.objective_value) * model.unit
        # With offload fractions, the time unit of the model is a float.
        assert lower_bound(problem) <= optimum * (1 + 1e-5)
        assert optimum <= problem.value(schedule_of(model, solver.value)) * (1 + 1e-5)
        assert optimum <= start.value * (1 + 1e-5)


@pytest.mark.parametrize(("overlap", "host_link"), [(Fraction(1, 2), "half-duplex"), (1, "full-duplex")])
def test_the_exact_models_agree(overlap: Number, host_link: HostLink) -> None:
    problem = streaming(uniform(2, 3, offload=20, limit=2, communication=0, host_link=host_link), overlap)
    *_, incumbent = optimize(problem, effort=5)
    if not incumbent.optimal:
        *_, incumbent = solve(problem, incumbent, effort=Effort(60))
    answer = solve_milp(MilpModel(problem), effort=Effort(60))
    assert incumbent.optimal
    assert answer.bound == pytest.approx(float(incumbent.value), rel=1e-5)


def test_overlapped_transfers_shorten_the_optimum() -> None:
    waiting = uniform(2, 3, offload=20, limit=2, communication=0)
    times = []
    for problem in (waiting, streaming(waiting, 1)):
        *_, incumbent = optimize(problem, effort=5)
        assert incumbent.optimal
        times.append(incumbent.value)
    assert times == [150, 120]


def test_a_backward_that_may_be_fused_has_the_longer_lead() -> None:
    costs = StageCosts.of(stages=1, offload=8, backward_input=1, backward_weight=3, reload_overlap=Fraction(1, 2))
    problem = OrderProblem(placement=Placement.linear(1), micro_batches=1, costs=costs, offload=True)
    backward = Op(Kind.I, 0, 0)
    assert problem.op_costs.lead(backward) == Fraction(1, 2)
    assert problem.backward_lead(0) == problem.op_costs.lead(backward._replace(kind=Kind.B)) == 2
