from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

import debubble as db
from debubble.costs import model_units
from debubble.ir import InfeasibleError, InputError, Kind, Op, RunOptions
from debubble.ir.lowering.op_costs import OpCosts
from debubble.planners import FixedStages, Problem, planners

LONG = {"micro_batches": 1, "sequence_length": 131_072, "effort": 0.2}


def planned(**options: Any) -> db.Plan:
    return db.plan("llama3-8b", "8xH100-80GB", **{**LONG, **options})


@pytest.mark.slow
def test_slices_fill_the_pipeline_with_one_long_sequence() -> None:
    few, plan = (planned(slices=slices) for slices in (4, 8))
    assert few.simulate().makespan > 1.6 * plan.simulate().makespan
    assert [candidate.planner for candidate in plan.candidates] == ["seq1f1b"]
    assert (plan.schedule.slices, plan.micro_batches) == (8, 1)
    assert plan.lower_bound <= plan.simulate().makespan
    tokens = plan.slice_tokens(131_072)
    assert list(tokens) == sorted(tokens, reverse=True)
    assert (tokens[0] > tokens[-1], sum(tokens)) == (True, 131_072)


def test_slices_of_equal_work_take_equally_long() -> None:
    run = RunOptions(sequence_length=2**19, slices=8)
    units = model_units(db.models["llama3-8b"], db.Cluster.parse("8xH100-80GB"), run)
    unequal = units.of_slices(units.cuts_of_equal_work(), sequences=1)

    def times(tokens: Any, keys: Any) -> list[float]:
        return [
            sum(float(n * unit.with_keys(seen, unit.strategies).work) for unit in units.units)
            for n, seen in zip(tokens, keys, strict=True)
        ]

    work = times(unequal.micro_batch_scale, unequal.attention_scale)
    assert max(work) <= 1.02 * min(work)
    assert sum(work) == pytest.approx(sum(times((1,) * 8, units.attention_scale)))


@pytest.mark.slow
def test_hosts_step_optimizers_that_do_not_fit() -> None:
    options: dict[str, Any] = {**LONG, "tensor": 2, "slices": 32}
    plan = db.plan("llama3-8b", "8xRTX4090-24GB", planner="seq1f1b", **options)
    assert plan.schedule.host_steps
    with pytest.raises(InfeasibleError):
        db.plan("llama3-8b", "8xRTX4090-24GB", planner="seq1f1b", swap="none", **options)


def test_other_planners_refuse_slices() -> None:
    with pytest.raises(InputError, match="The planner 'joint' does not cut sequences into slices; seq1f1b and auto do"):
        planned(slices=8, planner="joint")


def test_undivided_sequences_are_planned_as_one_slice() -> None:
    plan = planned(planner="seq1f1b", sequence_length=8192, micro_batches=8)
    assert (plan.schedule.slices, plan.schedule.micro_batches) == (1, 8)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"slices": 3}, "131072 tokens cannot be cut into 3 equal slices"),
        ({"slices": 2, "context": 2, "pipeline": 4}, "not planned together with context-parallel ranks"),
    ],
)
def test_unequal_slices_and_context_ranks_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        planned(**options)


@pytest.mark.slow
def test_a_search_of_degrees_plans_many_slices() -> None:
    plan = db.plan(
        "llama3-8b", "8xH100-80GB", global_batch=2, sequence_length=131_072, context=1, pipeline=8, effort=0.3
    )
    assert plan.schedule.slices > 8
    assert plan.degrees.slices == plan.schedule.slices


def test_models_without_plain_keys_and_values_are_refused() -> None:
    with pytest.raises(InputError, match="only layers of causal attention with keys and values of their own"):
        db.plan("deepseek-v3", "8xH100-80GB", slices=2)


@pytest.mark.parametrize("slices", [2, 32])
def test_slices_take_about_as_long_as_the_full_sequence(slices: int) -> None:
    """Slices add kernel launches and matrix products of fewer tokens."""
    cluster, run = db.Cluster.parse("8xH100-80GB"), RunOptions(sequence_length=131_072)
    undivided = model_units(db.models["llama3-8b"], cluster, run).units[1]
    cut = model_units(db.models["llama3-8b"], cluster, RunOptions(sequence_length=131_072, slices=slices))
    unit, pattern = cut.units[1], cut.attention_scale or ()
    forward = sum(unit.forward + (scale - 1) * unit.attention_forward for scale in pattern)
    assert forward == pytest.approx(undivided.forward, rel=0.02)
    assert len(pattern) * unit.keys_and_values == 2 * 2 * 131_072 * 1024


@st.composite
def small_problems(draw: Any) -> Problem:
    """Fixed stages with any times, and few slices."""
    p, m, n = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 4))

    def times(low: int, high: int) -> list[int]:
        numbers: list[int] = draw(st.lists(st.integers(low, high), min_size=p, max_size=p))
        return numbers

    costs = db.StageCosts.of(
        stages=p, forward=times(4, 8), backward_input=times(4, 9), backward_weight=times(3, 6),
        communication=draw(st.integers(0, 2)), slices=n, attention_scale=tuple(2 * i + 1 for i in range(n)),
        attention_forward=times(0, 4), attention_backward=times(0, 8),
    )  # fmt: skip
    return Problem(workload=FixedStages(costs), devices=p, micro_batches=m * n, effort=20.0)


@settings(max_examples=6)
@given(small_problems())
def test_few_slices_are_planned_to_the_optimum(problem: Problem) -> None:
    assert planners["seq1f1b"](problem).makespan == shortest_makespan(problem)


def shortest_makespan(problem: Problem) -> int:
    """The optimum over all orders, by an independent CP-SAT model."""
    assert isinstance(problem.entries, db.StageCosts)
    model, op_costs = cp_model.CpModel(), OpCosts(costs=problem.entries)
    p, items, n = problem.devices, problem.micro_batches, problem.slices
    spans: dict[tuple[Kind, int, int], tuple[Any, Any]] = {}
    horizon = 10_000
    for stage in range(p):
        lane = []
        for kind, j in product((Kind.F, Kind.I, Kind.W), range(items)):
            start, time = model.new_int_var(0, horizon, ""), int(op_costs.time(Op(kind, stage, j)))
            spans[kind, stage, j] = start, start + time
            lane.append(model.new_fixed_size_interval_var(start, time, ""))
        model.add_no_overlap(lane)

    def follows(after: tuple[Kind, int, int], before: tuple[Kind, int, int], delay: int = 0) -> None:
        model.add(spans[after][0] >= spans[before][1] + delay)

    message = int(problem.entries.communication[0])
    for stage, j in product(range(p), range(items)):
        follows((Kind.W, stage, j), (Kind.I, stage, j))
        if stage:
            follows((Kind.F, stage, j), (Kind.F, stage - 1, j), message)
            follows((Kind.I, stage - 1, j), (Kind.I, stage, j), message)
        if stage == p - 1:
            follows((Kind.I, stage, j), (Kind.F, stage, j))
        if j % n:
            follows((Kind.F, stage, j), (Kind.F, stage, j - 1))
            follows((Kind.I, stage, j - 1), (Kind.I, stage, j))
    makespan = model.new_int_var(0, horizon, "")
    model.add_max_equality(makespan, [end for _, end in spans.values()])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    assert solver.solve(model) == cp_model.OPTIMAL
    return round(solver.objective_value)
