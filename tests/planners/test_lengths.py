from dataclasses import replace
from functools import partial
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs import model_units
from debubble.costs.lengths import MicroBatchSize, orders_of
from debubble.costs.partition import Partition
from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import InfeasibleError, InputError, Placement, RunOptions
from debubble.planners import ModelUnits, Problem, planners
from debubble.planners.bounds.proven import lower_bound
from debubble.planners.micro_batch_order import with_lengths
from debubble.schedules import schedules
from debubble.simulator import simulate
from debubble.views.scene import Scene

LAYER = Unit(
    type="dense", layer=0, forward=4, backward_input=5, backward_weight=3, static=10,
    attention_forward=1, attention_backward=2,
    strategies={"none": Strategy(8), "cmb": Strategy(6, 1), "mlp": Strategy(4, 3), "full": Strategy(1, 4, attention=1)},
)  # fmt: skip
UNITS = Units(units=(LAYER,) * 8, communication=1, offload_bandwidth=4, memory_limit=(200,))
PROBLEM = Problem(workload=ModelUnits(UNITS), devices=4, micro_batches=5, effort=0.05, deadline=1e6)


REFUSALS = {"milp": "The MILP has micro-batches of one length; 'optpipe' orders those of several."}
"""Planners without support for lengths, and their messages."""


SCALES = [0.125, 0.25, 0.5, 0.75, 1.0]


def sizes_of(scales: list[float]) -> list[MicroBatchSize]:
    """Sizes of micro-batches of one sequence."""
    return [MicroBatchSize(scale, scale) for scale in scales]


def lengths_of(problem: Problem) -> tuple[float, ...]:
    assert isinstance(problem.workload, ModelUnits)
    return tuple(map(float, problem.workload.units.micro_batch_scale or ()))


def one_f_one_b(order: tuple[float, ...]) -> float:
    units = replace(UNITS.of_lengths(order, order), memory_limit=None)
    costs = units.stage_costs(Partition.cut(units, [2, 2, 2, 2]), Placement.linear(4))
    return float(simulate(schedules["1f1b"](devices=4, micro_batches=len(order)), costs).makespan)


@given(scales=st.lists(st.sampled_from(SCALES), min_size=5, max_size=5))
@settings(max_examples=6)
def test_the_order_of_few_micro_batches_is_optimal(scales: list[float]) -> None:
    order = lengths_of(with_lengths(PROBLEM, sizes_of(scales)))
    assert sorted(order) == sorted(scales)
    best = min(one_f_one_b(other) for other in set(permutations(scales)))
    assert one_f_one_b(order) == pytest.approx(best)


def test_the_bound_counts_micro_batches_by_their_tokens() -> None:
    problem = with_lengths(PROBLEM, [MicroBatchSize(0.25)] * 5)
    assert lower_bound(problem) == pytest.approx(0.25 * float(lower_bound(PROBLEM)))


@pytest.mark.parametrize("name", sorted(planners))
def test_every_planner_supports_lengths_or_refuses_them(name: str) -> None:
    problem = with_lengths(PROBLEM, sizes_of([1.0, 0.5, 0.5, 0.25, 0.25]))
    assert isinstance(problem.workload, ModelUnits)
    messages: list[str] = []
    try:
        result = planners[name](problem)
    except InfeasibleError as error:
        messages.append(str(error))
    if messages:
        assert messages == [REFUSALS[name]]
        return
    assert result.solution.costs.micro_batch_scale == problem.workload.units.micro_batch_scale
    assert result.lower_bound <= result.time
    assert result.time == simulate(result.solution.schedule, result.solution.costs).makespan


def test_a_plan_for_lengths_says_what_is_approximate() -> None:
    model, cluster = db.models["llama3-8b"], db.Cluster.parse("4xA100-80GB")
    ask = partial(db.plan, model, cluster, micro_batches=4, planner="dapple", sequence_length=1024)
    full, short = ask(), ask(lengths={1024: 1, 512: 3})
    assert sorted(map(float, short.costs.micro_batch_scale or ())) == [0.5, 0.5, 0.5, 1]
    assert short.simulate().makespan < full.simulate().makespan
    assert any("attention within a window" in remark for remark in Scene.predicted(short).remarks)


@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v2-lite"])
def test_short_sequences_cost_as_much_as_in_a_short_job(model: str) -> None:
    """Matrix products of fewer tokens are slightly slower."""
    cluster = db.Cluster.parse("1xH100-80GB")
    run = RunOptions(sequence_length=65_536, micro_batch_size=1)
    long = model_units(db.models[model], cluster, run).units[1]
    short = model_units(db.models[model], cluster, replace(run, sequence_length=16_384)).units[1]
    assert long.with_keys(0.25, long.strategies).forward / 4 == pytest.approx(short.forward, rel=0.03)


def test_packed_short_sequences_take_less_time_than_one_long_one() -> None:
    ask = partial(db.plan, "llama3-8b", "4xH100-80GB", planner="megatron-even", micro_batches=4, sequence_length=65_536)
    ask = partial(ask, micro_batch_size=1)
    steps = [ask(lengths={length: 1}, tensor=4).simulate().makespan for length in (65_536, 32_768)]
    assert steps[1] < 0.45 * steps[0]


@pytest.mark.parametrize(
    ("options", "message"), [({"global_batch": 8}, "global batch"), ({"target": "megatron"}, "target")]
)
def test_lengths_with_a_global_batch_or_target_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        db.plan(db.models["llama3-8b"], db.Cluster.parse("4xA100-80GB"), lengths={512: 1}, **options)


@given(scales=st.lists(st.sampled_from(SCALES), min_size=8, max_size=8))
@settings(max_examples=4)
def test_the_order_of_many_beats_every_simple_order(scales: list[float]) -> None:
    order = lengths_of(with_lengths(replace(PROBLEM, micro_batches=8), sizes_of(scales)))
    assert sorted(order) == sorted(scales)
    simple = [tuple(size.tokens for size in sizes) for sizes in orders_of(sizes_of(scales))]
    assert one_f_one_b(order) <= min(map(one_f_one_b, simple)) + 1e-9
