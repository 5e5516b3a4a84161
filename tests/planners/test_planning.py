import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import debubble as db
from debubble.costs.partition import Partition
from debubble.costs.units import Units
from debubble.ir import Placement, StageCosts
from debubble.planners import FixedStages, ModelUnits, Problem
from debubble.planners.bounds.proven import lower_bound
from debubble.planners.partitioning.recomputation import cheapest_stages, cheapest_strategies
from debubble.simulator import Repricer
from tests.strategies import model_units


def problem(units: Units, *, devices: int, micro_batches: int, chunks: int | None = 1) -> Problem:
    return Problem(devices=devices, micro_batches=micro_batches, workload=ModelUnits(units), chunks=chunks, effort=0.01)


CHUNKS = st.one_of(st.none(), st.integers(1, 5))
"""Stages per device; None lets the planner choose."""


@pytest.mark.parametrize("name", [name for name in db.planners if name != "auto"])
@given(units=model_units(limit=True), devices=st.integers(1, 3), micro_batches=st.integers(1, 6), chunks=CHUNKS)
@settings(max_examples=4)
def test_a_plan_is_within_the_memory_limit_and_the_bound(
    name: str, units: Units, devices: int, micro_batches: int, chunks: int | None
) -> None:
    try:
        asked = problem(units, devices=devices, micro_batches=micro_batches, chunks=chunks)
        result = db.planners[name](asked)
    except (db.InfeasibleError, db.InputError):
        return
    partition = result.solution.partition
    assert partition is not None
    assert [index for stage in partition for index, _ in stage] == list(range(len(units.units)))
    assert max(result.timeline.peak_memory) <= asked.limits[0]
    assert lower_bound(asked) <= result.makespan


@given(units=model_units(max_layers=2, limit=True), micro_batches=st.integers(1, 4))
@settings(max_examples=8)
def test_the_chosen_recomputation_is_close_to_the_cheapest(units: Units, micro_batches: int) -> None:
    """Per device, the greedy choice differs from the exact knapsack by at most the recomputation of one unit."""
    counts = [len(units.units) // 2, len(units.units) - len(units.units) // 2]
    repricer = Repricer(db.schedules["1f1b"](devices=2, micro_batches=micro_batches))
    feasible = [
        _recompute_time(units, partition)
        for partition in _all_partitions(units, counts)
        if _fits(units, repricer, partition)
    ]
    try:
        chosen = cheapest_strategies(repricer, units, counts)
    except db.InfeasibleError:
        # Bisection assumes that more recomputation never needs more memory, which a unit's workspace may violate.
        return
    assert _fits(units, repricer, chosen)
    largest = max(float(s.recompute) for u in units.units for s in u.strategies.values())
    assert _recompute_time(units, chosen) <= min(feasible) + 2 * largest


def _all_partitions(units: Units, counts: list[int]) -> list[Partition]:
    names = ("none", "selective", "full")
    return [
        Partition([list(enumerate(choice))[: counts[0]], list(enumerate(choice))[counts[0] :]])
        for choice in itertools.product(names, repeat=len(units.units))
    ]


def _fits(units: Units, repricer: Repricer, partition: Partition) -> bool:
    costs = units.stage_costs(partition, Placement.linear(2))
    peaks = repricer.peak_memory(costs, fused_recompute=partition.recomputing)
    assert units.memory_limit is not None
    return max(peaks) <= units.memory_limit[0]


def _recompute_time(units: Units, partition: Partition) -> float:
    return sum(float(units.units[i].strategies[s].recompute) for stage in partition for i, s in stage)


def test_fixed_stages_recompute_only_if_the_limit_demands_it() -> None:
    costs = StageCosts.of(stages=4, memory_limit=3)
    assert cheapest_stages(Repricer(db.schedules["1f1b"](devices=4, micro_batches=8)), costs) == {0}


def test_a_limit_that_nothing_meets_names_the_device() -> None:
    costs = StageCosts.of(stages=4, activation_recomputed=0.9, memory_limit=2)
    with pytest.raises(db.InfeasibleError, match=r"Device 0 needs .* even if everything recomputes"):
        cheapest_stages(Repricer(db.schedules["1f1b"](devices=4, micro_batches=8)), costs)


@pytest.mark.parametrize("compare", [False, True])
def test_auto_is_the_fastest_of_its_candidates(compare: bool) -> None:
    costs = StageCosts.of(stages=4, memory_limit=3)
    problem = Problem(devices=4, micro_batches=8, workload=FixedStages(costs), effort=0.05, compare=compare)
    result = db.planners["auto"](problem)
    assert max(result.timeline.peak_memory) <= 3
    assert result.lower_bound <= result.makespan
    candidates = result.solution.candidates
    asked = set(db.planners) - {"auto"} if compare else {"joint", "portfolio", "optpipe"}
    assert {c.planner for c in candidates} == asked
    assert result.makespan == min(c.makespan for c in candidates if c.makespan is not None)
    assert all((c.rejected is None) == (c.makespan is not None) for c in candidates)


def test_model_and_cluster_may_be_names_or_files(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(db.models["llama-tiny"].config)))
    (tmp_path / "cluster.yaml").write_text("devices: 2xL40S-48GB")
    asked: dict[str, Any] = {"planner": "adapipe", "micro_batches": 4, "sequence_length": 128}
    by_objects = db.plan(db.models["llama-tiny"], db.Cluster.parse("2xL40S-48GB"), **asked)
    for model, cluster in (("llama-tiny", "2xL40S-48GB"), (config, tmp_path / "cluster.yaml")):
        assert db.plan(model, cluster, **asked).simulate().makespan == by_objects.simulate().makespan


@pytest.mark.parametrize(
    ("model", "cluster", "message"),
    [
        ("no-such-model", "2xL40S-48GB", "There is no model or file 'no-such-model'"),
        (8, "2xL40S-48GB", "A model is db.models[NAME], db.Model.from_hf(FILE), a name or a file, not int."),
        ("llama-tiny", 8, "A cluster is a db.Cluster, a text such as '8xA100-80GB' or a file, not 8."),
    ],
)
def test_invalid_models_and_clusters_are_refused(model: Any, cluster: Any, message: str) -> None:
    with pytest.raises(db.DebubbleError, match=re.escape(message)):
        db.plan(model, cluster)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batches": "8"}, "micro_batches must be a whole number, not '8'."),
        ({"pipeline": 1.5}, "pipeline must be a whole number, not 1.5."),
        ({"image_patches": "784"}, "image_patches must be a whole number, not '784'."),
        ({"sequence_lenght": 128}, "There is no option of a run 'sequence_lenght'; did you mean 'sequence_length'"),
        ({"planner": 3}, "planner must be a text, not 3."),
        ({"swap": "disk"}, "Activations may go to host, peer, none, not to 'disk'."),
        ({"lengths": {0: 1}}, "Lengths are a file, or a number of sequences for each number of tokens"),
        ({"lengths": {"a": 1}}, "Lengths are a file, or a number of sequences for each number of tokens"),
        ({"lengths": {}}, "Lengths are a file, or a number of sequences for each number of tokens"),
        ({"lengths": "missing.json"}, "The lengths file missing.json cannot be read"),
    ],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(db.InputError, match=re.escape(message)):
        db.plan("llama-tiny", "2xL40S-48GB", **{"planner": "dapple", **options})


MLP = {
    "type": "mlp", "forward": 1, "backward_input": 1, "backward_weight": 1, "strategies": {"none": {"activation": 9}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "reserve"), [({"unplanned_bytes": 3 * 2**30}, 80 * 2**30 - int(77 * 2**30 / 1.06)), ({}, 8 * 2**30)]
)
def test_the_reserve_is_that_of_the_profile(tmp_path: Path, measured: dict[str, int], reserve: int) -> None:
    model = db.models["llama-tiny"]
    source = {
        "model": model.config, "dtype": "bf16", "sequence_length": 128, "micro_batch_size": 1, "lora": 0,
        "device": "A100", **measured,
    }  # fmt: skip
    plan = db.plan(
        model, "4xA100-80GB", micro_batches=8, planner="merak", sequence_length=128,
        profile={"measured": source, "units": [MLP]},
    )  # fmt: skip
    plan.save(tmp_path / "plan.json")
    for read in (plan, db.Plan.load(tmp_path / "plan.json")):
        assert read.profile == plan.profile
        assert read.cluster is not None
        assert read.cluster.reserve == reserve
        assert read.costs.limit_of(0) == 80 * 2**30 - reserve


@pytest.mark.parametrize("planner", ["joint", "chronos", "portfolio"])
def test_hosts_step_no_stage_with_a_shared_embedding(planner: str) -> None:
    asked: dict[str, Any] = {"micro_batches": 8, "sequence_length": 1024, "effort": 0.3, "planner": planner}
    plan = db.plan("llama3.2-1b", "2xL4", memory_limit="11GiB", **asked)
    placement = plan.schedule.placement.device_of

    assert plan.schedule.host_steps
    assert placement[0] == placement[-1] or not plan.schedule.host_steps & {0, len(placement) - 1}


@pytest.mark.parametrize("options", [{"global_batch": 16}, {"micro_batches": 16, "target": "megatron"}])
def test_without_a_swap_nothing_leaves_the_devices(options: dict[str, Any]) -> None:
    plan = db.plan("llama2-13b", "8xA100-40GB", planner="adapipe", pipeline=8, swap="none", **options)
    assert not plan.schedule.offloaded
    assert not plan.schedule.host_steps


@pytest.mark.parametrize("options", [{"global_batch": 16}, {"target": "megatron"}])
def test_swap_to_peers_needs_given_degrees(options: dict[str, Any]) -> None:
    with pytest.raises(db.InputError, match="to peers"):
        db.plan("llama2-13b", "8xA100-40GB", swap="peer", **options)
