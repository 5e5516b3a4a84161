"""Sliced sequences have the losses and gradients of full sequences in one process."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import debubble as db
from debubble.ir import InputError, Schedule
from debubble.plans import Plan
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import (
    assert_as_alone,
    assert_same_gradients,
    masked_batch,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
)
from tests.support.schedule_cases import explicit, offloading
from tests.support.tiny_models import FAMILIES, LLAMA, MIXTRAL

ORDERS: dict[str, dict[str, Any]] = {"seq1f1b": {}, "seq1f1b-zb": {}, "seq1f1b-interleaved": {"chunks": 2}}
LENGTH = 13
"""Tokens of a sequence: a prime, which no number of slices divides."""


def sliced(name: str = "seq1f1b", *, slices: int, devices: int = 2, micro_batches: int = 2) -> Schedule:
    return db.schedules[name](devices=devices, micro_batches=micro_batches, slices=slices, **ORDERS[name])


def plan_for(schedule: Schedule, config: Any, *, strategy: str = "none", **options: Any) -> Plan:
    return plan_of(schedule, config, strategy=strategy, sequence_length=LENGTH, slices=schedule.slices, **options)


def batch_of(config: Any, *, rows: int = 2, packed: bool = False) -> dict[str, Tensor]:
    return masked_batch(config, rows=rows, length=LENGTH, packed=packed)


def assert_as_whole(plan: Plan, config: Any, *, packed: bool = False) -> None:
    assert_same_gradients(plan, config, batch_of(config, packed=packed))


@pytest.mark.parametrize(("name", "slices"), [("seq1f1b", 8), ("seq1f1b-zb", 3), ("seq1f1b-interleaved", 1)])
def test_sliced_gradients_match_full_sequences(name: str, slices: int) -> None:
    assert_as_whole(plan_for(sliced(name, slices=slices), LLAMA), LLAMA)


def test_slices_may_differ_in_length() -> None:
    plan, tokens = plan_for(sliced(slices=3), LLAMA), (1, 1, 9)
    costs = plan.costs.replace(micro_batch_scale=tokens * 2, attention_scale=(1, 1, 1), slices=3)
    unequal = replace(plan, costs=costs)
    assert unequal.slice_tokens(66) == tuple(66 * length // sum(tokens) for length in tokens)
    assert_as_whole(unequal, LLAMA)


@pytest.mark.parametrize(
    ("family", "packed"),
    [("llama-tied", True), ("gemma2", False), ("gemma3", True), ("gpt2", True), ("mixtral", False)],
)
def test_every_family_trains_in_slices(family: str, packed: bool) -> None:
    config = FAMILIES[family]
    assert_as_whole(plan_for(sliced(slices=3), config), config, packed=packed)


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [
        (sliced(slices=3), "projections"),
        (sliced("seq1f1b-zb", slices=3), "core"),
        (sliced("seq1f1b-interleaved", slices=3), "full"),
        (explicit(sliced(slices=3)), "full"),
    ],
    ids=["projections", "split", "interleaved", "explicit"],
)
def test_recomputation_uses_the_keys_of_earlier_slices(schedule: Schedule, strategy: str) -> None:
    assert_as_whole(plan_for(schedule, LLAMA, strategy=strategy), LLAMA)


def test_slices_are_offloaded_without_their_keys() -> None:
    moved = replace(offloading(sliced(slices=3)), offload_fraction={0: 0.5, 1: 1.0})
    assert_as_whole(plan_for(moved, LLAMA), LLAMA)


@pytest.mark.parametrize(("options", "hosted"), [({"tensor": 2}, {0, 1}), ({"data": 2, "zero": 2}, set())], ids=str)
def test_sliced_steps_change_parameters_as_full_ones(options: dict[str, Any], hosted: set[int]) -> None:
    plan = plan_for(sliced(slices=3).with_host_steps(hosted), LLAMA, **options)
    assert_as_alone(plan, LLAMA, batch_of(LLAMA, rows=2 * plan.options.data))


def test_bf16_slices_sum_the_gradients_of_keys_in_fp32() -> None:
    batch = batch_of(LLAMA)
    plan = plan_for(sliced(slices=3), LLAMA, dtype="bf16")
    answers = run_threads(plan, lambda pipeline: pipeline.step(batch))
    loss, _ = reference_gradients(LLAMA, batch, micro_batches=2)
    torch.testing.assert_close(answers[0].double(), loss, rtol=2e-2, atol=0)


def test_evaluation_and_generation_use_full_sequences() -> None:
    plan, unsliced = plan_for(sliced(slices=3), LLAMA), plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), LLAMA)
    batch, prompts = batch_of(LLAMA), tokens_of(LLAMA, rows=3, length=2)

    def one(pipeline: Any) -> Any:
        return pipeline.evaluate([batch]), pipeline.generate(prompts, new_tokens=3)

    (loss, tokens), *_ = run_threads(plan, one)
    (expected_loss, expected), *_ = run_threads(unsliced, one)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert torch.equal(tokens, expected)


def test_fewer_tokens_than_slices_are_refused() -> None:
    plan = plan_for(sliced(slices=8), LLAMA)
    batch = {name: entry[:, :5] for name, entry in batch_of(LLAMA).items()}
    with pytest.raises(InputError, match="Sequences of 5 tokens cannot be cut into the plan's 8 slices"):
        run_threads(plan, lambda pipeline: pipeline.step(batch))


def test_loss_with_custom_entries_is_refused() -> None:
    def custom_loss(logits: Tensor, targets: Tensor, *, weights: Tensor) -> Tensor:
        return logits.square().sum()

    with pytest.raises(InputError, match="The loss asks for 'weights', which is of whole sequences"):
        run_threads(plan_for(sliced(slices=2), LLAMA), lambda pipeline: None, loss=custom_loss)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**MIXTRAL, "output_router_logits": True}, "auxiliary loss is one over whole sequences"),
        (GENERIC["olmo2"], "cuts the sequences of its own units alone"),
    ],
    ids=["router", "transformers"],
)
def test_models_that_cannot_be_cut_are_refused(config: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        run_threads(plan_for(sliced(slices=2), config), lambda pipeline: None)
