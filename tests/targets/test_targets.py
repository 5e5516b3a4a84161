"""Every target runs the plans that are made for it, and agrees with its exporter on others."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import debubble as db
from debubble.errors import UnsupportedError
from debubble.exports import exports
from debubble.ir import ExportError, InfeasibleError, InputError, RunOptions
from debubble.models import Model, models
from debubble.planners.analysis.nearest_plans import plan_runs_in
from debubble.plans import Plan
from debubble.targets import targets
from debubble.targets.target import runs_in
from tests.exports.hand_plans import LLAMA, MIXTRAL, Strategy, full, plain, priced

FRAMEWORKS = [name for name in targets if name != "debubble"]


def accepted(plan: Plan, target: str) -> bool:
    """Whether the export is neither refused nor slower than planned."""
    try:
        losses = exports[target](plan).losses
    except ExportError:
        return False
    return not any("times as long" in loss or "do not say" in loss for loss in losses)


JOBS: dict[str, dict[str, Any]] = {
    "llama3-8b": {"memory_limit": "50GiB"},
    "mixtral-8x7b": {"data": 4, "zero": 1, "expert": 4},
}
FAST = (("llama3-8b", "deepspeed"), ("mixtral-8x7b", "megatron"), ("llama3-8b", "torchtitan"))
PAIRS = [(model, target) for model in JOBS for target in FRAMEWORKS if (model, target) != ("mixtral-8x7b", "deepspeed")]


@pytest.mark.parametrize(
    ("model", "target"), [pytest.param(*pair, marks=[] if pair in FAST else pytest.mark.slow) for pair in PAIRS]
)
def test_a_target_runs_the_plan_that_was_made_for_it(model: str, target: str) -> None:
    plan = db.plan(
        db.models[model], db.Cluster.parse(f"{4 * JOBS[model].get('data', 1)}xA100-80GB"), micro_batches=8,
        sequence_length=4096, planner="portfolio", effort=0.3, target=target, **JOBS[model],
    )  # fmt: skip

    assert plan.target == target
    assert target in plan_runs_in(plan)
    assert accepted(plan, target)


STRATEGIES: dict[str, Strategy] = {
    "none": plain,
    "first": full(0, 2),
    "two": full(0, 1),
    "last": full(1, 3),
    "all": full(0, 1, 2, 3),
    "core": lambda layer: ("core", "none"),
    "norm": lambda layer: ("norm", "norm"),
    "mlp": lambda layer: ("none", "norm+mlp"),
    "one norm": lambda layer: ("norm", "none") if layer == 0 else ("none", "none"),
}
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v")


@pytest.mark.parametrize(
    ("strategy", "config"),
    [pytest.param(strategy, LLAMA, id=f"dense, {strategy}") for strategy in STRATEGIES]
    + [pytest.param(strategy, MIXTRAL, id=f"sparse, {strategy}") for strategy in ("mlp", "norm", "first")],
)
def test_targets_run_what_their_exporters_take_unchanged(strategy: str, config: dict[str, Any]) -> None:
    for name in SCHEDULES:
        chunks = db.schedules[name].default_chunks
        schedule = db.schedules[name](devices=4 // chunks, micro_batches=8)
        plan = priced(STRATEGIES[strategy], layers=(1, 1, 1, 1), config=config, schedule=schedule)
        if chunks == 1 and name == "1f1b":
            plan = priced(STRATEGIES[strategy], config=config)

        known = {target: target in runnable_in(plan) for target in FRAMEWORKS if target != "torch"}

        assert known == {target: accepted(plan, target) for target in known}, name


def test_an_mlp_without_a_gate_recomputes_by_the_same_pattern() -> None:
    config = {
        "model_type": "gpt2", "n_embd": 1024, "n_layer": 4, "n_head": 8, "vocab_size": 16384, "n_positions": 4096,
    }  # fmt: skip
    plan = priced(lambda layer: ("none", "norm+activation"), config=config)

    assert "mindformers" in runnable_in(plan)
    assert accepted(plan, "mindformers")


def runnable_in(plan: Plan) -> tuple[str, ...]:
    """The targets that run a plan unchanged, on any device."""
    assert plan.model is not None
    return runs_in(plan.schedule, plan.partition, plan.options, plan.model)


def test_ascend_targets_are_not_offered_for_known_devices() -> None:
    entries = {"memory": "64GiB", "flops": 3e14, "memory_bandwidth": 1e12, "link_bandwidth": 1e11}
    assert not targets["mindformers"].runs_on("A100-80GB")
    cluster = db.Cluster.from_dict({"devices": "8xMine", "hardware": {"Mine": entries}})
    assert targets["mindformers"].runs_on(cluster.slowest.name)


CHOICES: dict[str, tuple[Any, ...]] = {
    "tensor": (1, 2),
    "context": (1, 2),
    "expert": (1, 2),
    "optimizer": ("adamw", "adam", "adamw-8bit", "lion", "muon", "momentum", "sgd"),
    "dtype": ("bf16", "fp16", "fp32"),
    "host_optimizer": (0.0, 0.5),
}


@pytest.mark.parametrize(("target", "zero", "runs"), [("torchtitan", 3, False), ("megatron", 1, True), (None, 3, True)])
def test_debubble_runs_no_plan_that_gathers_unit_by_unit(target: str | None, zero: int, runs: bool) -> None:
    plan = db.plan(
        db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB"), micro_batches=4, pipeline=1, data=2, zero=zero,
        planner="dapple", target=target, sequence_length=128,
    )  # fmt: skip

    assert ("debubble" in plan_runs_in(plan)) == runs


@pytest.mark.parametrize("target", FRAMEWORKS)
@pytest.mark.parametrize("option", list(CHOICES))
def test_options_are_refused_with_the_message_of_the_export(option: str, target: str) -> None:
    for value, zero in product(CHOICES[option], (0, 1)):
        options = RunOptions(**{"data": 2, "zero": zero, option: value})
        config = MIXTRAL if option == "expert" else LLAMA
        model = Model.from_hf(config)
        plan = replace(priced(config=config, data=2, zero=zero, tensor=2), options=options)
        refusal = targets[target].refusal(options, model, pipeline=2)

        if refusal is None:
            assert exports[target](replace(plan, profile=None)).files
            targets[target].check(options, model, pipeline=2)
        else:
            with pytest.raises(ExportError) as of_export:
                exports[target](plan)
            with pytest.raises(InputError) as of_plan:
                targets[target].check(options, model, pipeline=2)
            assert str(of_export.value) == str(of_plan.value) == refusal


def test_a_higher_zero_level_is_refused_before_planning() -> None:
    with pytest.raises(InputError, match=r"DeepSpeed does not divide .* as ZeRO-2 over a pipeline; .* --zero 1"):
        db.plan(
            db.models["llama-tiny"], db.Cluster.parse("4xA100-80GB"), data=2, zero=2, planner="adapipe",
            target="deepspeed",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"zero": 2, "optimizer": "lion"}, r"Megatron-FSDP\) for adam and sgd alone, not for 'lion'; plan again"),
        ({"host_optimizer": 0.5}, "to hosts for a distributed Adam alone; plan again with --zero 1"),
        ({"host_optimizer": 0.5, "zero": 1, "optimizer": "sgd"}, "to hosts for a distributed Adam alone"),
        ({"expert_overlap": True}, "what expert-parallel ranks exchange; plan again with --expert 2"),
    ],
)
def test_targets_refuse_unsupported_combinations(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        targets["megatron"].check(RunOptions(data=2, **changes), db.models["mixtral-8x7b"], pipeline=2)
    with pytest.raises(InputError, match="The runtime cannot run this plan, because it computes in"):
        targets["debubble"].check(RunOptions(dtype="fp8"), db.models["llama-tiny"], pipeline=2)


def test_a_search_of_degrees_has_only_those_of_the_target() -> None:
    plan = db.plan(
        db.models["llama3.2-1b"], db.Cluster.parse("4xA100-80GB"), global_batch=8, sequence_length=1024,
        planner="adapipe", target="deepspeed", effort=0.5,
    )  # fmt: skip
    assert plan.degree_search is not None

    degrees = [choice.degrees for choice in plan.degree_search.configurations]
    assert {(choice.tensor, choice.context, choice.expert) for choice in degrees} == {(1, 1, 1)}
    assert {choice.zero for choice in degrees if choice.pipeline > 1} <= {0, 1}
    assert {choice.zero for choice in degrees if choice.pipeline == 1} == {1, 2, 3}
    assert accepted(plan, "deepspeed")


def test_every_target_but_the_runtime_has_an_exporter() -> None:
    assert set(targets) - {"debubble"} == set(exports)


def test_a_plan_file_keeps_the_target(tmp_path: Any) -> None:
    plan = db.plan(
        db.models["llama-tiny"], db.Cluster.parse("2xA100-80GB"), micro_batches=4, planner="adapipe", target="torch"
    )
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json").target == "torch"


@pytest.mark.parametrize("target", ["torchtitan", "automodel", "deepspeed"])
def test_a_plan_without_a_pipeline_may_have_zero_3(target: str) -> None:
    plan = priced(layers=(4,), data=2, zero=3)

    assert plan.model is not None
    assert targets[target].runs(plan.schedule, plan.partition, plan.options, plan.model)
    assert not any("ZeRO" in loss for loss in exports[target](plan).losses)


def test_the_nearest_zero_level_divides_no_less_if_possible() -> None:
    torchtitan = targets["torchtitan"]

    assert [torchtitan.nearest_zero(level, pipeline=1) for level in range(4)] == [0, 2, 2, 3]
    assert [torchtitan.nearest_zero(level, pipeline=2) for level in range(4)] == [0, 1, 1, 1]


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed"])
def test_a_plan_without_a_pipeline_has_one_stage(target: str) -> None:
    plan = db.plan("llama-tiny", "2xA100-80GB", data=2, zero=3, micro_batches=4, target=target, effort=0.1)

    assert (plan.schedule.stages, plan.schedule.name) == (1, "1f1b")


def test_a_refusal_names_the_logits_that_automodel_keeps() -> None:
    """The last stage keeps the logits of 63 more micro-batches of 8192 tokens x 128256 entries of 2 bytes."""
    with pytest.raises(db.InfeasibleError, match=r"123\.29 GiB are logits, .* take fewer of them"):
        db.plan("llama3-8b", "4xA100-80GB", micro_batches=64, sequence_length=8192, target="automodel", effort=0.02)


@pytest.mark.parametrize("target", ["megatron", "primus", "torchtitan", "mindformers"])
def test_4_bit_weights_are_refused_by_targets_without_them(target: str) -> None:
    options = RunOptions(lora=8, quantize="nf4", data=2)

    with pytest.raises(InputError, match="has no frozen weights in 4 bits; plan again without --quantize"):
        targets[target].check(options, models["llama3-8b"], pipeline=1)


def test_a_refusal_of_chunks_names_the_micro_batches_they_need() -> None:
    cluster, model = db.Cluster.parse("4xA100-80GB"), db.models["llama3.2-1b"]
    words = "with chunks only for multiples of 4 micro-batches"
    with pytest.raises(InfeasibleError, match=words) as error:
        db.plan(model, cluster, micro_batches=6, chunks=2, target="megatron", effort=0.01)
    assert not isinstance(error.value, UnsupportedError)


def test_a_planner_of_other_orders_is_unsupported() -> None:
    with pytest.raises(UnsupportedError, match="runs its own 1f1b or interleaved order, not 'zb"):
        db.plan("llama3.2-1b", "4xA100-80GB", micro_batches=8, planner="zero-bubble", target="megatron", effort=0.01)
