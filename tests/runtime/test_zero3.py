"""ZeRO-3: a replica keeps its rows of all parameters and gathers a stage's as the program says."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.runtime.models.build import build_stage
from tests.runtime.test_modules import plan_for, sequential, tokens
from tests.runtime.test_pipeline import ADAMW, host_stepped, schedule_1f1b
from tests.support.runtime_cases import (
    assert_as_alone,
    assert_gradients,
    gradients_alone,
    plan_of,
    rows_of,
    run_threads,
    tokens_of,
)
from tests.support.tiny_models import LLAMA, LLAMA_TIED, MIXTRAL, with_layers

EVEN = {**LLAMA, "vocab_size": 64}
"""A model whose rows two and four replicas share evenly."""
EXPERTS = {**MIXTRAL, "num_local_experts": 4}
SIZE = {"fp64": 8, "fp32": 4, "bf16": 2}


def zero3(schedule: Any, config: Any, *, dtype: str = "fp64", **options: Any) -> Any:
    """A plan whose costs have the bytes of its stages' parameters only."""
    plan = plan_of(schedule, config, dtype=dtype, zero=3, **options)
    gathered = [
        sum(p.numel() for unit in build_stage(config, units, seed=0) for p in unit.parameters()) * SIZE[dtype]
        // options.get("tensor", 1)
        for units in plan.partition
    ]  # fmt: skip
    costs = plan.costs.replace(gathered=gathered, parameter_gather=1, static=sum(gathered), offload=1)
    return replace(plan, costs=costs)


def interleaved(chunks: int = 2) -> Any:
    return db.schedules["interleaved"](devices=2, micro_batches=4, chunks=chunks)


def batch_of(pipeline: Any, config: Any, *, seed: int = 0) -> Any:
    """This replica's share of a batch that does not depend on the number of replicas."""
    return rows_of(pipeline, tokens_of(config, rows=8, seed=seed))


@pytest.mark.parametrize(
    ("schedule", "config", "options"),
    [
        (db.schedules["zb-v"](devices=2, micro_batches=4), LLAMA_TIED, {"data": 2}),
        (replace(interleaved(), fused_recompute=frozenset(range(4))), MIXTRAL, {"data": 2, "strategy": "full"}),
        (schedule_1f1b(), LLAMA, {"data": 2, "tensor": 2}),
        (schedule_1f1b(), LLAMA, {"context": 2}),
        (db.schedules["1f1b"](devices=1, micro_batches=2), EXPERTS, {"data": 4, "expert": 2}),
    ],
    ids=["tied", "recomputing experts", "tensor", "context", "divided experts"],
)
def test_losses_and_gradients_match_one_process(schedule: Any, config: Any, options: Any) -> None:
    plan = zero3(schedule, config, **options)
    assert_as_alone(plan, config, tokens_of(config, rows=8))


def test_custom_modules_are_sharded() -> None:
    """Plain autograd keeps views of their parameters from the forward to the backward."""
    plan = plan_for(interleaved(), [2, 2, 2, 2], data=2, zero=3)
    plan = replace(plan, costs=plan.costs.replace(gathered=1, static=2))
    model, batch = sequential(), tokens()

    def one(pipeline: Any) -> Any:
        loss, before = pipeline.step(batch), pipeline.state_dict()
        torch.optim.SGD(pipeline.parameters(), lr=1.0).step()
        return loss, {name: before[name] - after for name, after in pipeline.state_dict().items()}

    expected_loss, expected = gradients_alone(model, batch)
    for loss, gradients in run_threads(plan, one, model=model):
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        nothing = torch.zeros(())
        assert_gradients(gradients, {name: nothing if g is None else g for name, g in expected.items()})


def trained(plan: Any, *, max_norm: float | None = None) -> Any:
    """Losses of two steps with an evaluation between them, and the final parameters, by rank."""

    def one(pipeline: Any) -> Any:
        losses = []
        for step in range(2):
            losses.append(float(pipeline.step(batch_of(pipeline, plan.model, seed=step))))
            pipeline.optimizer_step(max_norm)
            losses.append(float(pipeline.evaluate([batch_of(pipeline, plan.model, seed=9)])))
        return losses, pipeline.state_dict()

    return run_threads(plan, one, optimizer=ADAMW)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        pytest.param(interleaved(), {"dtype": "fp32"}, id="fp32", marks=pytest.mark.slow),
        pytest.param(host_stepped(schedule_1f1b()), {"dtype": "bf16"}, id="host steps in bf16"),
        pytest.param(schedule_1f1b(), {"dtype": "bf16", "lora": 4}, id="LoRA", marks=pytest.mark.slow),
    ],
)
def test_sharding_parameters_changes_no_bit(schedule: Any, options: Any) -> None:
    divided = zero3(schedule, with_layers(LLAMA, 2), data=2, **options)
    undivided = replace(divided, options=replace(divided.options, zero=2))
    for (losses, state), (expected, parameters) in zip(trained(divided), trained(undivided), strict=True):
        assert losses == expected
        assert all(torch.equal(tensor, parameters[name]) for name, tensor in state.items())


@pytest.mark.slow
def test_rolled_back_step_gathers_parameters_again() -> None:
    plan = zero3(schedule_1f1b(), LLAMA, dtype="fp32", data=2)

    def ahead(pipeline: Any) -> Any:
        for step in range(3):
            pipeline.post_validated_step(batch_of(pipeline, LLAMA, seed=step), max_norm=0.5 if step == 1 else 1e9)
        pipeline.finish_update()
        return pipeline.state_dict()

    def synchronous(pipeline: Any) -> Any:
        for step in range(3):
            pipeline.step(batch_of(pipeline, LLAMA, seed=step))
            pipeline.optimizer_step(0.5 if step == 1 else 1e9)
        return pipeline.state_dict()

    states = run_threads(plan, ahead, optimizer=ADAMW), run_threads(plan, synchronous, optimizer=ADAMW)
    for state, expected in zip(*states, strict=True):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())


@pytest.mark.parametrize(("chunks", "dtype"), [(1, "fp32"), (4, "bf16")])
def test_counted_memory_matches_the_prediction(chunks: int, dtype: str) -> None:
    schedule = schedule_1f1b() if chunks == 1 else interleaved(chunks)
    plan = zero3(schedule, EVEN, dtype=dtype, data=2)
    nothing = plan.costs.replace(activation=0, activation_recomputed=0, activation_after_input=0)
    timeline = db.simulate(plan.schedule, nothing)
    parameters = [sum(plan.costs.gathered[s] for s in stages) // SIZE[dtype] for stages in schedule.placement.stages_of]

    def one(pipeline: Any) -> Any:
        pipeline.step(batch_of(pipeline, EVEN))
        pipeline.optimizer_step()
        pipeline.step(batch_of(pipeline, EVEN))
        return (
            pipeline.device,
            pipeline.measured.activations.gathered_peak,
            pipeline.measured.static_bytes,
            pipeline.measured.current_memory,
        )

    # fp32 masters, which are cast when gathered, gradients and two moments: half of each.
    states = 16
    for device, gathered, static, current in run_threads(plan, one, optimizer=ADAMW):
        assert gathered == timeline.peak_memory[device] - timeline.program.static[device]
        steps = 4 * len(names_of(plan, device))
        assert static - steps == parameters[device] * states // 2
        assert current == static


def names_of(plan: Any, device: int) -> list[str]:
    """Parameters of a device; Adam keeps a four-byte step count for each."""
    stages = plan.schedule.placement.stages_of[device]
    units = [unit for s in stages for unit in build_stage(plan.model.config, plan.partition[s], seed=0)]
    return [name for unit in units for name in unit.hf_parameters()]


def test_generation_matches_unsharded_parameters() -> None:
    plan = zero3(interleaved(), EVEN, dtype="fp32", data=2)

    def one(pipeline: Any) -> Any:
        return pipeline.generate(torch.tensor([[1, 2, 3]]), new_tokens=3)

    [expected] = run_threads(plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), EVEN, dtype="fp32"), one)
    assert all(torch.equal(tokens, expected) for tokens in run_threads(plan, one))


def test_plan_without_gathers_is_refused() -> None:
    with pytest.raises(InputError, match="stage by stage, and the plan's costs say nothing of that: plan again"):
        run_threads(plan_of(schedule_1f1b(), LLAMA, data=2, zero=3), lambda _: None)
