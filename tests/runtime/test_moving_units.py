"""Units move between the devices of a running pipeline, which continues as if they had always been there."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import AdamW

import debubble as db
from debubble.ir import InputError, StageCosts
from debubble.runtime.launch.failures import MoveMemoryError
from tests.support import gloo_ranks, tiny_models
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import assert_same_run, plan_of, run_threads, tokens_of
from tests.support.tiny_models import with_layers

LLAMA, LLAMA_TIED, GPT2, MIXTRAL = (
    with_layers(tiny_models.FAMILIES[family], 2) for family in ("llama", "llama-tied", "gpt2", "mixtral")
)
STEPS = 3
COUNTS = {2: ([2, 4], [5, 1]), 4: ([2, 2, 1, 1], [1, 1, 3, 1])}
"""Units per stage, before and after the move."""


def schedule_for(devices: int, name: str = "1f1b") -> Any:
    return db.schedules[name](devices=devices, micro_batches=4)


def divisions(devices: int, config: Any = LLAMA, *, schedule: Any = None, **options: Any) -> Any:
    """Two plans that differ only in the units of their stages."""
    schedule = schedule or schedule_for(devices)
    return [plan_of(schedule, config, counts=counts, **options) for counts in COUNTS[devices]]


def state_dict(pipeline: Any) -> Any:
    return {name: p.clone() for name, p in pipeline.state_dict().items()}


def trained(plan: Any, *next_plans: Any, steps: int = STEPS, state_of: Any = state_dict, **arguments: Any) -> Any:
    """Losses and parameters of a run that switches to the next plan after each step."""

    def one(pipeline: Any) -> Any:
        losses = []
        for step in range(max(steps, 1 + len(next_plans))):
            if 0 < step <= len(next_plans):
                pipeline.switch_plan(next_plans[step - 1])
            tokens = tokens_of(plan.model, rows=4, seed=step + 10 * pipeline.ranks.replica)
            losses.append(pipeline.step(tokens).item())
            pipeline.optimizer_step(1.0)
        return losses, state_of(pipeline)

    answers = run_threads(plan, one, **{"optimizer": partial(AdamW, lr=0.01), **arguments})
    return answers[0][0], {name: p for _, state in answers for name, p in state.items()}


def assert_goes_on_alike(before: Any, after: Any, **arguments: Any) -> None:
    """A run that switches to the other plan and back matches a run of the first plan."""
    assert_same_run(trained(before, after, before, **arguments), trained(before, **arguments))


@pytest.mark.parametrize(("devices", "dtype"), [(2, "bf16"), (4, "fp32")])
def test_moved_units_continue_as_if_always_there(devices: int, dtype: str) -> None:
    assert_goes_on_alike(*divisions(devices, dtype=dtype))


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GPT2, {}),
        (MIXTRAL, {"data": 2, "expert": 1}),
        (LLAMA, {"lora": 4}),
        (LLAMA, {"data": 2, "zero": 2}),
        (LLAMA, {"tensor": 2}),
        pytest.param(LLAMA, {"tensor": 2, "data": 2, "zero": 1}, marks=pytest.mark.slow),
        pytest.param(LLAMA, {"context": 2}, marks=pytest.mark.slow),
    ],
    ids=["tied", "experts", "lora", "zero-2", "tensor", "tensor-zero", "context"],
)
def test_moved_units_continue_in_every_kind_of_run(config: Any, options: Any) -> None:
    assert_goes_on_alike(*divisions(2, config, dtype="fp32", **options))


@pytest.mark.slow
def test_sharded_parameters_move_as_shards() -> None:
    costs = StageCosts.of(stages=2, offload=1, parameter_gather=1, gathered=1, static=2)
    assert_goes_on_alike(*divisions(2, dtype="fp32", data=2, zero=3, costs=costs))


def test_two_chunks_of_a_device_exchange_units() -> None:
    before, after = divisions(4, LLAMA_TIED, schedule=schedule_for(2, "zb-v"), dtype="fp32")
    assert_goes_on_alike(before, after)


def test_host_stepped_stage_exchanges_units() -> None:
    hosted = schedule_for(2).with_host_steps({0})
    assert_goes_on_alike(*divisions(2, schedule=hosted, dtype="bf16"))


@pytest.mark.slow
def test_modules_of_transformers_move() -> None:
    config = GENERIC["deepseek_v3"]
    plans = [plan_of(schedule_for(2), config, counts=counts, dtype="bf16") for counts in ([2, 4], [4, 2])]
    assert sum(plans[0].lengths) == 6
    assert_goes_on_alike(*plans)


def test_averages_of_the_weights_move_with_them() -> None:
    def averages(pipeline: Any) -> Any:
        with pipeline.averaged():
            return state_dict(pipeline)

    assert_goes_on_alike(*divisions(2, dtype="fp32"), state_of=averages, ema_decay=0.9)


def test_pending_update_is_finished_before_a_move() -> None:
    before, after = divisions(2, dtype="fp32")

    def one(pipeline: Any) -> Any:
        results = []
        for step in range(STEPS):
            if step == 2:
                pipeline.switch_plan(after)
            results.append(pipeline.post_validated_step(tokens_of(LLAMA, rows=4, seed=step), max_norm=1.0))
        return [r.loss for r in (*results, pipeline.finish_update()) if r is not None], pipeline.state_dict()

    losses, expected = trained(after)
    answers = run_threads(before, one, optimizer=partial(AdamW, lr=0.01))
    # The switch waits for the result of the second step.
    assert answers[0][0] == [loss for step, loss in enumerate(losses) if step != 1]
    assert [n for _, state in answers for n, p in state.items() if not torch.equal(p, expected[n])] == []


def test_accumulated_gradients_move() -> None:
    before, after = divisions(2, dtype="fp32")

    def gradients(plan: Any, *next_plans: Any) -> Any:
        def one(pipeline: Any) -> Any:
            for step, other in enumerate([None, *next_plans]):
                if other is not None:
                    pipeline.switch_plan(other)
                pipeline.step(tokens_of(LLAMA, rows=4, seed=step))
            return {name: p.grad for name, p in pipeline.named_parameters()}

        answers = run_threads(plan, one, optimizer=partial(AdamW, lr=0.01))
        return {name: gradient for gradients in answers for name, gradient in gradients.items()}

    expected, moved = gradients(after, after), gradients(before, after)
    assert [name for name in expected if not torch.equal(moved[name], expected[name])] == []


def test_learning_rate_schedule_keeps_its_optimizers() -> None:
    before, after = divisions(2, dtype="fp32")

    def one(pipeline: Any) -> Any:
        (optimizer,) = pipeline.optimizers
        rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        pipeline.step(tokens_of(LLAMA, rows=4))
        pipeline.optimizer_step()
        rate.step()
        pipeline.switch_plan(after)
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert pipeline.optimizers == [optimizer]
        assert stepped == set(map(id, pipeline.parameters()))
        return optimizer.param_groups[0]["lr"]

    assert run_threads(before, one, optimizer=partial(AdamW, lr=0.01)) == [0.005, 0.005]


def test_memory_after_a_move_is_that_of_the_new_plan() -> None:
    before, after = divisions(2, dtype="bf16")

    def memory(*next_plans: Any) -> Any:
        def one(pipeline: Any) -> Any:
            for other in (None, *next_plans):
                if other is not None:
                    pipeline.switch_plan(other)
                pipeline.step(tokens_of(LLAMA, rows=4))
                pipeline.optimizer_step(1.0)
            return (
                pipeline.measured.peak_activation,
                pipeline.measured.static_bytes,
                pipeline.evaluate([tokens_of(LLAMA, rows=4)]),
            )

        return one

    make = partial(AdamW, lr=0.01)
    moved = run_threads(before, memory(after, before, after), optimizer=make)
    assert moved == run_threads(after, memory(after, after, after), optimizer=make)


class Eight(torch.Tensor):
    """An 8-bit state as a tensor subclass, as in torchao."""

    codes: torch.Tensor

    @staticmethod
    def from_codes(codes: torch.Tensor) -> "Eight":
        state = codes.float().as_subclass(Eight)
        state.codes = codes
        return state

    def detach(self) -> "Eight":
        return self

    def __tensor_flatten__(self) -> Any:
        return ["codes"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> "Eight":
        return Eight.from_codes(inner["codes"])


class Signs(torch.optim.Optimizer):
    """Steps by the sign of the gradient, and counts positive gradients in 8 bits."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for parameter in (p for group in self.param_groups for p in group["params"]):
            state = self.state[parameter]
            codes = state["count"].codes if state else torch.zeros(parameter.shape, dtype=torch.uint8)
            state["count"] = Eight.from_codes(codes + (parameter.grad > 0))
            parameter.data.sub_(0.01 * parameter.grad.sign() + 0.001 * state["count"].codes)


def test_states_of_a_tensor_subclass_move() -> None:
    assert_goes_on_alike(*divisions(2, dtype="fp32"), optimizer=Signs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"tensor": 2}], ids=["pipeline", "dtensors"])
def test_units_move_between_four_gloo_ranks(options: Any, tmp_path: Path) -> None:
    plans = divisions(4 // options.get("tensor", 1), dtype="fp32", **options)
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    for plan, path in zip(plans, (before, after), strict=True):
        plan.save(path)
    batches = [tokens_of(LLAMA, rows=4, seed=step) for step in range(STEPS)]
    answers = gloo_ranks.spawn(4, gloo_ranks.moved, [[before, after, before], [before] * STEPS], batches)
    for rank in range(4):
        assert_same_run(*torch.load(answers / f"rank{rank}.pt"))


def test_move_without_memory_is_reported() -> None:
    before, after = divisions(2, dtype="fp32")
    made: list[AdamW] = []

    def make(parameters: Any) -> AdamW:
        if len(made) == 2:  # one for each rank when it starts
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        made.append(AdamW(parameters))
        return made[-1]

    with pytest.raises(
        MoveMemoryError, match=r"ran out of memory while units moved to it.* Tried to allocate 2\.00 GiB"
    ):
        run_threads(before, lambda pipeline: pipeline.switch_plan(after), optimizer=make)


def test_user_models_and_optimizers_cannot_move() -> None:
    before, after = divisions(2, dtype="fp32")
    model = pytest.importorskip("tests.support.hf_reference").hf_model(LLAMA).float()
    for arguments in ({}, {"model": model, "optimizer": partial(AdamW, lr=0.01)}):
        with pytest.raises(InputError, match="units move between devices only where Pipeline builds them"):
            run_threads(before, lambda pipeline: pipeline.switch_plan(after), **arguments)


def test_a_device_without_the_embedding_it_needs_is_refused() -> None:
    before, _ = divisions(2, dtype="fp32")
    empty = replace(before, partition=((), before.partition[0] + before.partition[1]))
    with pytest.raises(InputError, match="first stage must hold the embedding"):
        run_threads(before, lambda pipeline: pipeline.switch_plan(empty), optimizer=partial(AdamW, lr=0.01))
