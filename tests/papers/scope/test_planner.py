import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs import Cluster, StepTail
from debubble.costs.partition import Partition
from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import Placement, RunOptions
from debubble.models import models
from debubble.papers.scope.instance import in_flight_rows, layer_types
from debubble.papers.scope.integer_program import solve
from debubble.papers.scope.planner import BASELINES, scope
from debubble.planners import ModelUnits, Problem
from debubble.planners.baselines.even_splits import megatron_schedule
from debubble.search.effort import Effort
from debubble.simulator import Repricer
from tests.strategies import model_units


def layer(kind: str, time: int, *, activation: int = 4, static: int = 1) -> Unit:
    return Unit(
        type=kind, layer=None, forward=time, backward_input=time, backward_weight=time, static=static,
        strategies={"none": Strategy(activation), "full": Strategy(1, time)},
    )  # fmt: skip


def asked(units: Units, *, devices: int, micro_batches: int, chunks: int = 1, effort: float = 3.0) -> Problem:
    return Problem(
        devices=devices, micro_batches=micro_batches, workload=ModelUnits(units), chunks=chunks, effort=effort
    )


def test_repeated_patterns_of_units_are_one_layer_type() -> None:
    pair = (layer("attention", 1), layer("mlp", 2))
    units = Units(units=(layer("embedding", 1), *pair * 5, layer("head", 3)))
    assert [(run.first, run.size, run.count) for run in layer_types(units)] == [(0, 1, 1), (1, 2, 5), (11, 1, 1)]


def test_consecutive_types_are_separate_runs() -> None:
    units = Units(units=(*[layer("vision", 1)] * 3, *[layer("dense", 2)] * 2, *[layer("moe", 3)] * 4))
    assert [run.count for run in layer_types(units)] == [3, 2, 4]


@pytest.mark.parametrize(
    ("devices", "chunks", "counts"), [(4, 2, [(7, 4), (8, 3)]), (8, 2, [(15, 8), (16, 7)]), (4, 1, [(4,)])]
)
def test_in_flight_counts_are_those_of_the_order(devices: int, chunks: int, counts: list[tuple[int, ...]]) -> None:
    problem = asked(Units(units=(layer("dense", 1),) * 16), devices=devices, micro_batches=32, chunks=chunks)
    assert in_flight_rows(megatron_schedule(problem, chunks))[0] == counts


@given(times=st.lists(st.integers(1, 9), min_size=2, max_size=6), m=st.integers(1, 8))
def test_the_formula_is_never_below_the_simulation(times: list[int], m: int) -> None:
    """T = sum T_x + (m - 1) max T_x, with backwards of twice the forward."""
    costs = db.StageCosts.of(forward=times, backward_input=times, backward_weight=times)
    makespan = db.simulate(db.schedules["1f1b"](devices=len(times), micro_batches=m), costs).makespan
    formula = 3 * (sum(times) + (m - 1) * max(times))
    assert makespan <= formula
    if len(set(times)) == 1:
        assert makespan == formula


@pytest.mark.parametrize("chunks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_integer_program_is_solved_to_its_optimum(chunks: int) -> None:
    units = Units(units=(layer("embedding", 1), *[layer("dense", 3)] * 7, layer("head", 5)), memory_limit=(36,))
    problem = asked(units, devices=2, micro_batches=6, chunks=chunks)
    schedule = megatron_schedule(problem, chunks)
    answer = solve(layer_types(units), schedule, limits=problem.limits, static=0.0, effort=Effort(10), seed=0)
    assert answer.formula == pytest.approx(answer.bound, rel=1e-5)
    assert answer.formula == pytest.approx(min(_formulas(problem, units, chunks)), rel=1e-4)


def _formulas(problem: Problem, units: Units, chunks: int) -> Iterator[float]:
    """(m - 1/C) max T + sum T / C of every assignment that fits."""
    schedule = megatron_schedule(problem, chunks)
    repricer = Repricer(schedule)
    for partition in _assignments(units, schedule.stages):
        costs = units.stage_costs(partition, schedule.placement)
        fused = partition.recomputing
        if max(repricer.peak_memory(costs, fused_recompute=fused)) > problem.limits[0]:
            continue
        device_times = [
            sum(float(costs.work(s)) + float(costs.recompute[s]) for s in stages)
            for stages in schedule.placement.stages_of
        ]
        yield (problem.micro_batches - 1 / chunks) * max(device_times) + sum(device_times) / chunks


def _assignments(units: Units, stages: int) -> Iterator[Partition]:
    """Every split, and every number of recomputed layers per stage; the dense layers, which are equal, come first."""
    count = len(units.units)
    for cuts in itertools.combinations(range(1, count), stages - 1):
        bounds = list(itertools.pairwise((0, *cuts, count)))
        dense = [[i for i in range(a, b) if units.units[i].type == "dense"] for a, b in bounds]
        ends = [[i for i in range(a, b) if units.units[i].type != "dense"] for a, b in bounds]
        for numbers in itertools.product(*[range(len(d) + 1) for d in dense]):
            for recomputed_ends in itertools.product(*[[False, True] if e else [False] for e in ends]):
                chosen = {i for d, n in zip(dense, numbers, strict=True) for i in d[:n]}
                chosen |= {i for e, r in zip(ends, recomputed_ends, strict=True) if r for i in e}
                yield Partition([(i, "full" if i in chosen else "none") for i in range(a, b)] for a, b in bounds)


@pytest.mark.slow
@given(units=model_units(max_layers=2, limit=True), micro_batches=st.integers(2, 5))
@settings(max_examples=3)
def test_scope_is_optimal_on_small_instances(units: Units, micro_batches: int) -> None:
    problem = asked(units, devices=2, micro_batches=micro_batches, effort=0.1)
    repricer = Repricer(megatron_schedule(problem, 1))
    best = min(_simulated(problem, units, repricer), default=None)
    if best is None:
        with pytest.raises(db.InfeasibleError):
            scope(problem)
        return
    solution = scope(problem)
    timeline = db.simulate(solution.schedule, solution.costs)
    assert best <= float(timeline.makespan) <= best * (1 + 1e-9)


def _simulated(problem: Problem, units: Units, repricer: Repricer) -> Iterator[float]:
    count = len(units.units)
    for choice in itertools.product(("none", "selective", "full"), repeat=count):
        for cut in range(1, count):
            partition = Partition([list(enumerate(choice))[:cut], list(enumerate(choice))[cut:]])
            costs = units.stage_costs(partition, Placement.linear(2))
            price = repricer.price(costs, fused_recompute=partition.recomputing)
            if max(price.peak_memory) <= problem.limits[0]:
                yield price.makespan


@pytest.mark.slow
@given(units=model_units(limit=True), devices=st.integers(1, 3), micro_batches=st.integers(1, 8))
@settings(max_examples=3)
def test_scope_is_never_worse_than_its_baselines(units: Units, devices: int, micro_batches: int) -> None:
    problem = asked(units, devices=devices, micro_batches=micro_batches)
    best = float("inf")
    for name in BASELINES:
        try:
            best = min(best, float(db.planners[name](problem).makespan))
        except db.InfeasibleError:
            continue
    if best < float("inf"):
        assert db.planners["scope"](problem).makespan <= best


@given(units=model_units(limit=True), micro_batches=st.integers(1, 8))
@settings(max_examples=10)
def test_without_effort_the_fastest_baseline_is_the_answer(units: Units, micro_batches: int) -> None:
    tail = StepTail(model=models["llama2-7b"], cluster=Cluster.parse("3xCPU"), options=RunOptions())
    problem = replace(asked(units, devices=3, micro_batches=micro_batches, effort=0.0), tail=tail)
    try:
        baseline = db.planners["adapipe"](problem)
    except db.InfeasibleError:
        assume(False)
    assert db.planners["scope"](problem).time <= baseline.time


def test_scope_states_the_gap_of_its_program() -> None:
    units = Units(units=(layer("embedding", 1), *[layer("dense", 3)] * 7, layer("head", 5)), memory_limit=(36,))
    answer = scope(asked(units, devices=2, micro_batches=6, chunks=1))
    assert answer.remark == "its integer program is solved to within 0.00% with 1 chunk"


def test_scope_says_that_its_program_has_no_answer() -> None:
    units = replace(Units(units=(layer("dense", 1),) * 8), memory_limit=(20,))
    answer = scope(asked(units, devices=2, micro_batches=4, effort=0.0))
    assert answer.remark == (
        "its integer program has no answer.  No assignment of layers to stages was found with that effort; raise"
        " --effort."
    )
