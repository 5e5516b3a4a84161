from typing import Any

import pytest

import debubble as db
from debubble.ir import InputError, Lane
from debubble.planners.fixed_plan import fixed_plan

MODEL, CLUSTER = db.models["llama2-7b"], db.Cluster.parse("4xA100-80GB")


def configuration(
    schedule: str, *, recompute: str | None = "full", **options: Any
) -> tuple[db.Schedule, db.StageCosts]:
    plan = fixed_plan(
        MODEL, CLUSTER, schedule=schedule, micro_batches=13, recompute=recompute, schedule_options=options
    )
    return plan.schedule, plan.costs


def recompute_per_device(schedule: str, *, recompute: str | None = "full", **options: Any) -> list[bool]:
    built, costs = configuration(schedule, recompute=recompute, **options)
    return [time > 0 for time in db.simulate(built, costs).recompute]


@pytest.mark.parametrize(
    ("schedule", "option", "count"),
    [
        ("1f1b", "recomputed_stages", 3), ("strawman", "adjusted_stages", 1),
        ("dependency-relaxed", "adjusted_stages", 1), ("obscura", "adjusted_stages", 0),
        ("obscura-minimal", "adjusted_stages", 3),
    ],
)  # fmt: skip
def test_exactly_the_stages_that_the_schedule_names_recompute(schedule: str, option: str, count: int) -> None:
    choice: dict[str, Any] = {option: count}
    assert recompute_per_device(schedule, **choice) == [device < count for device in range(4)]


def test_a_stage_without_recomputation_has_plain_costs() -> None:
    plain, full = configuration("1f1b", recompute="none")[1], configuration("1f1b")[1]
    mixed = configuration("1f1b", recomputed_stages=1)[1]
    for entry in ("recompute", "activation_recomputed", "recompute_workspace", "static"):
        assert getattr(mixed, entry) == (getattr(full, entry)[0], *getattr(plain, entry)[1:])


def test_exactly_the_chunks_of_chronos_recompute() -> None:
    schedule, costs = configuration("chronos-recomp")
    assert {stage for stage, _ in schedule.explicit_recompute} == {0, 1, 2, 3}
    assert [time > 0 for time in costs.recompute] == [True] * 4 + [False] * 4
    assert not schedule.fused_recompute


def test_chosen_stages_recompute_in_full_by_default() -> None:
    assert configuration("strawman", recompute=None, adjusted_stages=2) == configuration("strawman", adjusted_stages=2)
    assert recompute_per_device("1f1b", recompute=None) == [False] * 4
    assert recompute_per_device("1f1b") == [True] * 4


def test_recomputed_stages_without_recomputation_are_refused() -> None:
    with pytest.raises(db.InputError, match="is to recompute 2 of its 4 stages, but --recompute none leaves nothing"):
        configuration("1f1b", recompute="none", recomputed_stages=2)


def test_more_recomputed_stages_than_stages_are_refused() -> None:
    with pytest.raises(db.InputError, match="recomputed_stages must be between 0 and 4"):
        configuration("1f1b", recomputed_stages=5)


def test_only_combined_1f1b_overlaps_expert_communication() -> None:
    def price(schedule: str) -> None:
        fixed_plan(
            db.models["mixtral-8x7b"], db.Cluster.parse("16xH100-80GB"), schedule=schedule, micro_batches=8, data=2,
            expert=2, expert_overlap=True,
        )  # fmt: skip

    price("interleaved-combined")
    with pytest.raises(InputError, match="priced for the schedule 'interleaved-combined' alone, not for '1f1b'"):
        price("1f1b")


@pytest.mark.parametrize(
    "schedule",
    [
        name if name in ("1f1b", "zb-v", "pipeoffload") else pytest.param(name, marks=pytest.mark.slow)
        for name in db.schedules
        if name != "interleaved-combined"
    ],
)
def test_the_host_steps_the_last_chunk_of_every_schedule(schedule: str) -> None:
    entry = db.schedules[schedule]
    first, second = (
        fixed_plan(MODEL, CLUSTER.with_limit("200GiB"), schedule=schedule, micro_batches=8, host_chunks=number)
        for number in (0, 1)
    )
    (plain, costs), (hosted, with_host) = (first.schedule, first.costs), (second.schedule, second.costs)
    deep = {stages[-1] for stages in plain.placement.stages_of}
    assert plain.host_steps == frozenset()
    assert hosted.host_steps == deep
    timeline = db.simulate(hosted, with_host)
    assert {o.op.stage for o in timeline.operations if o.lane is Lane.HOST} == deep
    assert entry.default_chunks == plain.placement.chunks
    assert all(after < before for after, before in zip(with_host.static, costs.static, strict=True))


def test_more_host_chunks_than_chunks_are_refused() -> None:
    with pytest.raises(InputError, match=r"^The last 2 chunks of each device are asked for, but there are 1\.$"):
        fixed_plan(MODEL, CLUSTER, schedule="1f1b", micro_batches=8, host_chunks=2)


def test_host_chunks_with_a_host_optimizer_are_refused() -> None:
    with pytest.raises(InputError, match=r"no --host-optimizer\.$"):
        fixed_plan(MODEL, CLUSTER, schedule="1f1b", micro_batches=8, host_chunks=1, host_optimizer=0.5)


@pytest.mark.parametrize(("searched", "fixed"), [("zb", "1f1b"), ("zb-v", "interleaved"), ("hanayo", "interleaved")])
def test_a_searched_order_accounts_for_recomputation(searched: str, fixed: str) -> None:
    model, cluster = db.models["llama2-13b"], db.Cluster.parse("8xA100-40GB")
    steps = []
    for name in (searched, fixed):
        plan = fixed_plan(model, cluster, schedule=name, micro_batches=16, recompute="full")
        steps.append(db.simulate(plan.schedule, plan.costs).makespan)
    assert steps[0] <= steps[1]


def test_a_searched_order_of_given_layers_fits_their_memory() -> None:
    model, cluster = db.models["llama2-13b"], db.Cluster.parse("8xA100-40GB")
    plan = fixed_plan(model, cluster, schedule="zb", micro_batches=16, recompute="full", layers=[5] * 8)
    limits = [plan.costs.limit_of(d) for d in range(8)]
    peaks = db.simulate(plan.schedule, plan.costs.with_limit(None)).peak_memory
    assert all(limit is not None and peak <= limit for limit, peak in zip(limits, peaks, strict=True))


def test_full_recomputation_leaves_out_embedding_and_head() -> None:
    plan = fixed_plan(MODEL, CLUSTER, schedule="1f1b", micro_batches=8, recompute="full")
    units = [unit for stage in plan.partition for unit in stage]
    assert [unit.type for unit in units if unit.strategy == "none"] == ["embedding", "head"]
