"""Every target writes, refuses or reports every field of a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Any

import pytest

import debubble as db
from debubble.exports import exports
from debubble.ir import ExportError, Kind, Op, PlannedUnit, RunOptions, Schedule
from debubble.ir.ops import SCHEDULED
from debubble.plans import Plan
from debubble.targets import targets
from tests.exports.hand_plans import MIXTRAL, full, priced, with_operations

ONE_F_ONE_B = db.schedules["1f1b"](devices=2, micro_batches=8)


def outcome_of(plan: Plan, target: str) -> object:
    """All that a user learns of an export: files and losses, or the refusal."""
    try:
        return exports[target](plan)
    except ExportError as error:
        return str(error)


OPTIONS: Mapping[str, tuple[dict[str, Any], Any]] = {
    "micro_batch_size": ({}, 2),
    "sequence_length": ({}, 1024),
    "tensor": ({}, 2),
    "data": ({}, 2),
    "context": ({}, 2),
    "expert": ({"data": 2}, 2),
    "expert_tensor": ({"tensor": 2}, 1),
    "zero": ({"data": 2}, 1),
    "optimizer": ({}, "sgd"),
    "dtype": ({}, "fp32"),
    "lora": ({}, 8),
    "quantize": ({"lora": 8}, "nf4"),
    "post_validation": ({}, True),
    "host_optimizer": ({"data": 2, "zero": 1}, 0.5),
    "expert_overlap": ({}, True),
    "slices": ({}, 2),
    "gradient_dtype": ({}, "bf16"),
    "moment_dtype": ({"data": 2, "zero": 1}, "bf16"),
    "master_dtype": ({}, "bf16"),
    "sequence_parallel": ({"tensor": 2}, False),
    "flash_attention": ({}, False),
    "image_patches": ({}, 1024),
    "images": ({}, 2),
    "freeze": ({}, "vision"),
    "framework": ({}, "torchtitan@2024.06"),
}
"""Option -> options that it needs, and a value other than its default."""


IMPLIED = {("expert_tensor", "deepspeed"), ("sequence_parallel", "deepspeed")}
"""Options with a single valid value unless the target runs the options that they need: here tensor parallelism."""


OF_IMAGES = ("image_patches", "images", "freeze")


@pytest.mark.parametrize("target", sorted(exports.keys() - {"torch"}))
def test_images_are_refused_with_the_vision_tower_that_sees_them(target: str) -> None:
    assert "vision tower" in str(targets[target].refusal(RunOptions(), db.models["qwen2.5-vl-7b"], pipeline=2))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (field.name, target)
        for field in fields(RunOptions)
        for target in exports
        if (field.name, target) not in IMPLIED and field.name not in OF_IMAGES
    ],
)
def test_a_run_option_is_written_refused_or_reported(name: str, target: str) -> None:
    alongside, value = OPTIONS[name]
    plain = outcome_of(priced(config=MIXTRAL, **alongside), target)
    changed = outcome_of(priced(config=MIXTRAL, **alongside, **{name: value}), target)

    assert not isinstance(plain, str)
    assert changed != plain


@pytest.mark.parametrize("target", list(exports))
def test_zero_2_is_reported_where_it_is_not_needed_to_fit(target: str) -> None:
    reported = outcome_of(priced(data=2, zero=2), target)

    assert not isinstance(reported, str)
    assert reported != outcome_of(priced(data=2, zero=1), target)


def split(schedule: Schedule) -> Schedule:
    """The same plan with every backward as I and W."""
    orders = [
        [name for op in order for name in ([f"{op.stage}I{op.micro_batch}", f"{op.stage}W{op.micro_batch}"]
         if op.kind is Kind.B else [op.name])]
        for order in schedule.orders
    ]  # fmt: skip
    return Schedule.of(schedule.name, schedule.placement, schedule.micro_batches, orders)


def offloading(**changes: Any) -> Plan:
    return priced(schedule=replace(with_operations(ONE_F_ONE_B, ("0O0", "0F1"), ("0L0", "0B0")), **changes))


def on_host() -> Plan:
    operations = with_operations(ONE_F_ONE_B, ("0P0", "0F0"), ("0D7", ""), ("0S7", ""))
    return priced(schedule=operations, on_host=[0])


KINDS: Mapping[Kind, Callable[[], Plan]] = {
    Kind.F: lambda: priced(schedule=db.schedules["gpipe"](devices=2, micro_batches=8)),
    Kind.B: lambda: priced(schedule=db.schedules["gpipe"](devices=2, micro_batches=8)),
    Kind.I: lambda: priced(schedule=split(ONE_F_ONE_B)),
    Kind.W: lambda: priced(schedule=split(ONE_F_ONE_B)),
    Kind.R: lambda: priced(
        full(0, 1), schedule=with_operations(ONE_F_ONE_B, *((f"0R{j}", f"0B{j}") for j in range(8)))
    ),
    Kind.O: offloading,
    Kind.L: offloading,
    Kind.G: lambda: priced(schedule=with_operations(ONE_F_ONE_B, ("0G7", ""))),
    Kind.S: lambda: priced(schedule=with_operations(ONE_F_ONE_B, ("0S7", ""))),
    Kind.D: on_host,
    Kind.P: on_host,
}
"""Kind of operation -> a plan that has it, unlike 1F1B."""


@pytest.mark.parametrize("target", list(exports))
@pytest.mark.parametrize("kind", SCHEDULED)
def test_an_operation_is_written_refused_or_reported(kind: Kind, target: str) -> None:
    before = full(0, 1) if kind is Kind.R else full()

    assert outcome_of(KINDS[kind](), target) != outcome_of(priced(before), target)


def blocking(plan: Plan) -> Plan:
    return replace(plan, costs=plan.costs.replace(communication_model="blocking"))


def recomputing_deeper(pairs: Collection[tuple[int, int]] = ()) -> Plan:
    plan = KINDS[Kind.R]()
    schedule = replace(plan.schedule, deeper=frozenset(pairs))
    return replace(plan, schedule=schedule, costs=plan.costs.replace(recompute_deeper=1, activation_deeper=0))


SCHEDULE: Mapping[str, tuple[Plan, Plan]] = {
    "placement": (
        priced(schedule=db.schedules["interleaved"](devices=2, micro_batches=8), layers=(1, 1, 1, 1)),
        priced(schedule=db.schedules["dualpipe-v"](devices=2, micro_batches=8), layers=(1, 1, 1, 1)),
    ),
    "micro_batches": (priced(), priced(schedule=db.schedules["1f1b"](devices=2, micro_batches=6))),
    "orders": (priced(), priced(schedule=db.schedules["gpipe"](devices=2, micro_batches=8))),
    "fused_recompute": (priced(), priced(full(0))),
    "recompute_fraction": (
        priced(full(0, 1)),
        priced(full(0, 1), schedule=replace(ONE_F_ONE_B, recompute_fraction={0: 0.5})),
    ),
    "offload_fraction": (priced(), offloading(offload_fraction={0: 0.5})),
    "deeper": (recomputing_deeper(), recomputing_deeper({(0, 0)})),
    "peers": (offloading(), offloading(peers={0: 1})),
    "link_orders": (offloading(), offloading(link_orders=((Op.parse("0O0"), Op.parse("0L0")),))),
    "slices": (priced(), priced(schedule=db.schedules["seq1f1b"](devices=2, micro_batches=4, slices=2), slices=2)),
    "asynchronous": (blocking(priced()), blocking(priced(schedule=replace(ONE_F_ONE_B, asynchronous=frozenset({0}))))),
}
"""Field of a schedule -> two plans that differ in it."""


@pytest.mark.parametrize("target", list(exports))
def test_fraction_of_one_micro_batch_is_written_or_reported(target: str) -> None:
    schedule = replace(ONE_F_ONE_B, recompute_fraction={0: (0.5, *[1] * 7)})

    assert outcome_of(priced(full(0, 1), schedule=schedule), target) != outcome_of(priced(full(0, 1)), target)


@pytest.mark.parametrize("target", list(exports))
@pytest.mark.parametrize("name", sorted({field.name for field in fields(Schedule)} - {"name"}))
def test_a_field_of_the_schedule_is_written_refused_or_reported(name: str, target: str) -> None:
    plain, changed = SCHEDULE[name]

    assert outcome_of(changed, target) != outcome_of(plain, target)


def mtp() -> Plan:
    plan = priced()
    *layers, head = plan.partition[1]
    return replace(plan, partition=(plan.partition[0], (*layers, PlannedUnit("mtp", 0), head)))


PLAN: Mapping[str, Plan] = {
    "schedule": priced(schedule=db.schedules["gpipe"](devices=2, micro_batches=8)),
    "costs": replace(priced(), costs=priced().costs.replace(micro_batch_scale=[1] * 7 + [2])),
    "partition": priced(layers=(3, 1)),
    "options": priced(micro_batch_size=2),
}
"""Field of a plan -> a plan that differs in it."""

DESCRIPTIONS = {
    "planner", "lower_bound", "bound_argument", "solve_seconds", "candidates", "timeline", "profile",
    "model_on_cluster", "degree_search", "target", "origin", "what_ifs", "measured", "other_targets",
}  # fmt: skip
"""Fields that say how a plan was found; the user brings the model."""


@pytest.mark.parametrize("target", list(exports))
@pytest.mark.parametrize("name", sorted({field.name for field in fields(Plan)} - DESCRIPTIONS))
def test_a_field_of_the_plan_is_written_refused_or_reported(name: str, target: str) -> None:
    assert outcome_of(PLAN[name], target) != outcome_of(priced(), target)


@pytest.mark.parametrize("target", list(exports))
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(mtp(), id="mtp"),
        pytest.param(priced(head="full"), id="head"),
        pytest.param(priced(lambda layer: ("norm", "none")), id="norm"),
        pytest.param(priced(lambda layer: ("none", "norm+mlp")), id="mlp"),
        pytest.param(priced(full(0, 3)), id="full"),
    ],
)
def test_a_unit_is_written_refused_or_reported(changed: Plan, target: str) -> None:
    assert outcome_of(changed, target) != outcome_of(priced(), target)


def test_exports_of_a_plain_plan_report_required_settings() -> None:
    reported = {target: exports[target](priced()).losses for target in exports}

    silent = [target for target, losses in reported.items() if not losses]
    assert silent == ["megatron", "mindformers", "primus", "torchtitan"]
