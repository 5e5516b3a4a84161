from dataclasses import replace
from typing import Any

import pytest

import debubble as db
from debubble.ir import WhatIf
from debubble.planners.analysis.what_if import gains, possible, quick_what_ifs, what_if_lines, what_ifs
from debubble.planners.bounds.proven import proven_step_bound
from debubble.planners.model_problem import problem_of
from debubble.planners.plan_step import seconds_per_step
from debubble.planners.progress import Progress
from debubble.plans import Plan

HOW = "planned with a third of the effort"


def planned(planner: str = "adapipe", **options: Any) -> tuple[Plan, float]:
    plan = db.plan(
        db.models["llama3.2-1b"], db.Cluster.parse("2xA100-80GB"), planner=planner, micro_batches=4, **options
    )
    timeline = plan.simulate()
    return plan, seconds_per_step(plan, timeline)


@pytest.mark.slow
def test_every_change_is_planned_and_more_is_never_slower() -> None:
    plan, step = planned(memory_limit="17GiB")
    changes = {change.change: change for change in what_ifs(plan, step, effort=0.5)}
    assert changes["no recomputation"].lever
    for name in ("10% more memory", "links twice as fast"):
        faster = changes[name].step_time
        assert faster is not None
        assert faster <= step
    twice, half = changes["twice the micro-batches (a batch of 8)"], changes["half the micro-batches (a batch of 2)"]
    assert twice.seconds_per_sequence is not None
    assert half.seconds_per_sequence is not None
    same = changes["the same job again"].seconds_per_sequence
    assert same is not None
    assert same <= step / 4
    assert twice.seconds_per_sequence < same < half.seconds_per_sequence
    assert not twice.lever
    smaller = changes["--master-dtype bf16"].step_time
    assert smaller is not None
    assert smaller <= step


@pytest.mark.slow
def test_progress_reports_every_planned_change() -> None:
    reports: list[Progress] = []
    changes = what_ifs(*planned("dapple"), effort=1e-6, progress=reports.append)

    assert {report.stage for report in reports} == {change.change for change in changes}
    assert [(report.done, report.total) for report in reports] == [(n + 1, len(changes)) for n in range(len(changes))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster", "options", "deeper"),
    [
        ("llama3.2-1b", "2xRTX4090-24GB", {"planner": "dapple", "pipeline": 1, "tensor": 2, "micro_batches": 2}, False),
        ("qwen3-8b", "4xRTX4090-24GB", {"pipeline": 2, "tensor": 2, "micro_batches": 8, "effort": 0.1}, True),
    ],
)  # fmt: skip
def test_faster_links_speed_up_the_plan_itself(model: str, cluster: str, options: dict[str, Any], deeper: bool) -> None:
    plan = db.plan(db.models[model], db.Cluster.parse(cluster), **options)
    step = seconds_per_step(plan)
    changes = {change.change: change.step_time for change in what_ifs(plan, step, effort=1e-6)}
    assert any(unit.strategies[0] != unit.strategies[1] for stage in plan.partition for unit in stage) is deeper
    faster = changes["links twice as fast"]
    assert faster is not None
    assert faster < 0.98 * step


@pytest.mark.slow
def test_one_more_node_takes_less_time_per_sequence() -> None:
    cluster = db.Cluster.from_dict({"devices": "4xA100-80GB", "devices_per_node": 2})
    plan = db.plan(db.models["llama3.2-1b"], cluster, planner="dapple", micro_batches=4, pipeline=2, data=2, zero=1)
    step = seconds_per_step(plan)
    changes = {change.change: change for change in what_ifs(plan, step, effort=0.05)}
    node = changes["one more node (6 devices, a batch of 12)"]
    assert node.step_time is not None
    assert node.seconds_per_sequence == node.step_time / (3 * 4)
    assert node.seconds_per_sequence < step / (2 * 4)


def test_devices_double_if_a_node_cannot_divide_the_experts() -> None:
    cluster = db.Cluster.from_dict({"devices": "4xH100-80GB", "devices_per_node": 2})
    plan = db.plan(
        db.models["qwen3-30b-a3b"], cluster, planner="dapple", micro_batches=1, pipeline=1, data=4, expert=4, zero=2,
        sequence_length=128, optimizer="sgd", memory_limit="200GiB",
    )  # fmt: skip
    words = [change.change for change in quick_what_ifs(plan) if change.more_devices]
    assert words == ["twice the devices (8 devices, a batch of 8)"]


def test_quick_plans_are_compared_with_a_quick_plan() -> None:
    plan, _ = planned(memory_limit="17GiB")
    first, *changes = quick_what_ifs(plan)
    assert first.change == "the same job again"
    assert first.seconds_per_sequence is not None
    best = min(other.seconds_per_sequence or 1e9 for other in changes if not other.more_devices)
    [line] = what_if_lines(replace(plan, what_ifs=(first, *changes)), 1.0)
    assert f"{100 * (1 - best / first.seconds_per_sequence):.1f}% faster" in line


def test_abstract_costs_have_no_advice() -> None:
    costs = db.StageCosts.of(stages=2)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    plan = Plan(planner="none", schedule=schedule, costs=costs, lower_bound=0, partition=((), ()))
    assert quick_what_ifs(plan) == ()
    assert what_if_lines(plan, 1.0) == []
    with pytest.raises(db.InputError, match="for a MODEL on a --cluster"):
        what_ifs(plan, 1.0, effort=1.0)


def test_changes_are_reported_per_sequence() -> None:
    plan, step = planned("dapple")
    without = WhatIf(change="no offload", lever=True, step_time=None, seconds_per_sequence=None)
    twice = WhatIf(
        change="twice the micro-batches", lever=False, step_time=1.8 * step, seconds_per_sequence=0.9 * step / 4
    )
    lines = what_if_lines(replace(plan, what_ifs=(without, twice)), step)
    assert lines[0] == f"Without a lever ({HOW}): no offload: nothing fits."
    assert lines[1].endswith("10.0% faster per sequence.")
    assert lines[1].startswith(f"What would help ({HOW}): twice the micro-batches: ")


@pytest.mark.parametrize(
    ("ratio", "effect"),
    [
        (0.95, "at least 5.0% faster per sequence"),
        (0.985, "no difference beyond the search's own 2%"),
        (1.015, "no difference beyond the search's own 2%"),
        (1.05, "at most 5.0% slower per sequence"),
    ],
)
def test_a_difference_within_search_noise_is_no_gain(ratio: float, effect: str) -> None:
    plan, step = planned("dapple")
    sequence = ratio * step / plan.degrees.global_batch
    links = WhatIf(change="links twice as fast", lever=False, step_time=ratio * step, seconds_per_sequence=sequence)

    assert [gain.effect for gain in gains(plan, step, (links,))] == [effect]


def test_changes_without_a_difference_are_one_item() -> None:
    plan, step = planned("dapple")
    sequence = step / plan.degrees.global_batch
    changes = tuple(
        WhatIf(change=change, lever=False, step_time=ratio * step, seconds_per_sequence=ratio * sequence)
        for change, ratio in {"links twice as fast": 1.0, "10% more memory": 0.9, "--master-dtype bf16": 0.99}.items()
    )
    [line] = what_if_lines(replace(plan, what_ifs=changes), step)
    assert line.endswith(
        "10% more memory: at least 10.0% faster per sequence; "
        "no difference beyond the search's own 2%: links twice as fast, --master-dtype bf16."
    )


def test_more_devices_come_last_and_small_gains_are_omitted() -> None:
    plan, _ = planned("dapple")
    seconds = {"the same job again": 10.0, "twice the devices": 5.0, "10% more memory": 9.0, "faster links": 9.9}
    changes = tuple(
        WhatIf(
            change=change, lever=False, step_time=step, seconds_per_sequence=step, quick=True,
            more_devices="devices" in change,
        )
        for change, step in seconds.items()
    )  # fmt: skip
    # Ten seconds for each of four sequences, as by the quick plan.
    [line] = what_if_lines(replace(plan, what_ifs=changes), 40.0)
    assert line.endswith(": 10% more memory: at least 10.0% faster; twice the devices: 2.00 times the tokens/s.")


def test_a_faster_quick_plan_of_a_change_is_possible_help() -> None:
    seconds = {"the same job again": 10.0, "--lora 16": 9.9, "10% more memory": 9.5, "--master-dtype bf16": 9.0}
    changes = tuple(
        WhatIf(change=change, lever=False, step_time=step, seconds_per_sequence=step, quick=True)
        for change, step in seconds.items()
    )
    assert possible(changes) == ["--master-dtype bf16", "10% more memory"]


def test_quick_advice_promises_no_more_than_bounds_allow() -> None:
    plan = db.plan("llama3-8b", "4xL40S-48GB", micro_batches=16, sequence_length=2048, planner="adapipe")
    step = seconds_per_step(plan)
    shares = {gain.what_if.change: gain.share for gain in gains(plan, step, quick_what_ifs(plan))}
    described = plan.model_on_cluster
    assert described is not None
    model, cluster = described
    larger = cluster.with_limit(1.1 * min(cluster.memory_limits))
    bound = proven_step_bound(problem_of(model, larger, plan.options, micro_batches=16)).time
    assert (shares.get("10% more memory") or 0.0) >= float(bound) / step - 1 - 1e-3


def test_slices_are_advised_where_sequences_are_few_and_long() -> None:
    plan = db.plan("llama3-8b", "8xH100-80GB", micro_batches=2, sequence_length=16_384, planner="adapipe", effort=0.5)
    (slices,) = [change for change in quick_what_ifs(plan) if change.change == "--slices 4"]
    assert slices.step_time is not None
    assert slices.step_time < plan.simulate().makespan


def test_advised_overlaps_of_megatron_take_the_quoted_time() -> None:
    options: dict[str, Any] = {"tensor": 4, "data": 2, "zero": 1, "micro_batches": 4, "planner": "adapipe"}
    plan = db.plan("llama2-7b", "8xA100-80GB", target="megatron", **options)
    changes = [change for change in quick_what_ifs(plan) if change.change.startswith("--framework ")]
    framework = "megatron-lm,tensor_overlap=true,gradient_overlap=true"
    assert [change.change for change in changes] == [f"--framework {framework}"]
    overlapped = db.plan("llama2-7b", "8xA100-80GB", target="megatron", framework=framework, **options)
    assert changes[0].step_time == pytest.approx(overlapped.step_time, rel=1e-3)
    assert not any("--framework" in change.change for change in quick_what_ifs(overlapped))


def test_zero_is_advised_for_replicas_without_it() -> None:
    plan = db.plan("llama3-8b", "8xH100-80GB", data=8, micro_batches=4, planner="chronos", effort=0.2)
    assert {change.change for change in quick_what_ifs(plan)} >= {"--zero 1", "--zero 3"}


def test_mixed_devices_are_tried_in_reverse_order() -> None:
    """A 1F1B pipeline has most activations in its first stages."""
    model = db.models["llama3-8b"]
    plans = [
        db.plan(model, db.Cluster.parse(cluster), sequence_length=8192, micro_batches=16, planner="adapipe")
        for cluster in ("2xA100-40GB+2xA100-80GB", "2xA100-80GB+2xA100-40GB")
    ]
    steps = {change.change: change.step_time or 0.0 for change in quick_what_ifs(plans[0])}

    assert plans[1].cluster is not None
    assert plans[1].cluster.in_reverse() == plans[0].cluster
    gain = steps["devices the other way round (2xA100-80GB+2xA100-40GB)"]
    assert gain < 0.9 * steps["the same job again"]


def test_a_symmetric_list_of_devices_has_no_reverse() -> None:
    assert db.Cluster.parse("4xA100-80GB").in_reverse() is None
    assert db.Cluster.parse("1xA100-40GB+1xA100-80GB+1xA100-40GB").in_reverse() is None
