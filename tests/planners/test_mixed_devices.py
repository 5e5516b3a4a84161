import pytest

import debubble as db
from debubble.costs import model_units
from debubble.costs.partition import Partition
from debubble.ir import Placement, RunOptions
from debubble.planners.bounds.proven import lower_bound
from debubble.planners.degrees.estimate import quick_bound, quick_step
from debubble.planners.degrees.search import search_degrees
from debubble.planners.degrees.space import Job, configurations
from debubble.planners.model_problem import problem_of
from debubble.planners.problem import Problem

LLAMA = db.models["llama2-7b"]
MIXED = db.Cluster.parse("2xH100-80GB+2xA100-80GB")
FAST, SLOW = db.Cluster.parse("4xH100-80GB"), db.Cluster.parse("4xA100-80GB")
OPTIONS = RunOptions(sequence_length=2048)


def problem(cluster: db.Cluster = MIXED, *, micro_batches: int = 8, pipeline: int = 4, data: int = 1) -> Problem:
    options = RunOptions(sequence_length=2048, data=data, zero=1 if data > 1 else 0)
    return problem_of(LLAMA, cluster, options, micro_batches=micro_batches, pipeline=pipeline)


def test_a_stage_takes_the_time_of_its_device() -> None:
    mixed, fast, slow = (model_units(LLAMA, cluster, OPTIONS, pipeline=4) for cluster in (MIXED, FAST, SLOW))
    partition = Partition.cut(mixed, [16, 17, 16, 17], strategy="full")
    costs, of_fast, of_slow = (
        units.stage_costs(partition, Placement.linear(4)) for units in (mixed, fast, slow)
    )  # fmt: skip
    assert costs.forward == (*of_fast.forward[:2], *of_slow.forward[2:])
    assert costs.backward_weight == (*of_fast.backward_weight[:2], *of_slow.backward_weight[2:])
    assert costs.recompute == (*of_fast.recompute[:2], *of_slow.recompute[2:])
    assert costs.activation == of_slow.activation


def test_the_fastest_units_are_those_of_the_fastest_device() -> None:
    units = model_units(LLAMA, MIXED, OPTIONS, pipeline=4).of_lengths((1.0, 0.25), (1.0, 0.25))
    for fastest, *by_device in zip(units.units, *units.on_devices, strict=True):
        assert fastest.forward == min(unit.forward for unit in by_device)
        recompute = {name: min(unit.strategies[name].recompute for unit in by_device) for name in fastest.strategies}
        assert {name: strategy.recompute for name, strategy in fastest.strategies.items()} == recompute


def test_a_pipeline_device_has_the_pace_of_its_slowest_rank() -> None:
    across = db.Cluster.parse("1xH100-80GB+3xA100-80GB")
    units = model_units(LLAMA, across, RunOptions(sequence_length=2048, data=2), pipeline=2)
    assert not units.on_devices


@pytest.mark.parametrize("planner", ["pipedream", "joint"])
def test_planners_give_faster_devices_more_layers(planner: str) -> None:
    plan = db.plan(LLAMA, MIXED, micro_batches=8, sequence_length=2048, planner=planner, effort=0.2)
    counts = [sum(len(plan.partition[s]) for s in stages) for stages in plan.schedule.placement.stages_of]
    assert min(counts[:2]) > 1.5 * max(counts[2:])
    one_type = db.plan(LLAMA, SLOW, micro_batches=8, sequence_length=2048, planner=planner, effort=0.2)
    assert float(plan.simulate().makespan) < 0.8 * float(one_type.simulate().makespan)


def test_the_bound_counts_the_paces_of_all_devices() -> None:
    mixed, fast, slow = (float(lower_bound(problem(cluster))) for cluster in (MIXED, FAST, SLOW))
    assert fast < mixed < slow


@pytest.mark.slow
def test_the_search_of_degrees_takes_mixed_devices() -> None:
    job = Job(model=LLAMA, cluster=MIXED, global_batch=8, options=OPTIONS, effort=0.5)
    assert len(configurations(job)) > 10
    best = search_degrees(job, planner="pipedream")
    assert best.degrees.devices == 4
    assert float(best.result.time) >= best.result.lower_bound


def test_a_target_refuses_mixed_devices() -> None:
    with pytest.raises(db.InputError, match="without a profile and without --for"):
        db.plan(LLAMA, MIXED, micro_batches=8, planner="dapple", target="megatron")


def test_bounds_are_below_every_quick_plan() -> None:
    for asked in (problem(), problem(micro_batches=32), problem(pipeline=2, data=2)):
        step, plan = quick_step(asked)
        assert quick_bound(asked) <= step
        assert float(lower_bound(asked)) <= step
        assert plan.partition is not None
