"""Ranks that shard sequences train as one process does, in combination with all other parallelism."""

from typing import Any

import pytest
import torch
from torch import Tensor

import debubble as db
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.plans import Plan
from debubble.runtime import Pipeline
from tests.support import gloo_ranks
from tests.support.runtime_cases import (
    assert_as_alone,
    masked_batch,
    peaks_of,
    plan_of,
    run_threads,
    tokens_of,
)
from tests.support.tiny_models import FAMILIES, GPT2, LLAMA, LLAMA_TIED, MIXTRAL


def plan_for(config: Any, name: str = "1f1b", *, strategy: str = "none", **options: Any) -> Plan:
    schedule = db.schedules[name](devices=2, micro_batches=4)
    return plan_of(schedule, config, strategy=strategy, sequence_length=16, **options)


def batch_of(config: Any, *, rows: int = 4, packed: bool = False) -> dict[str, Tensor]:
    return masked_batch(config, rows=rows, length=16, packed=packed)


@pytest.mark.parametrize(("family", "packed"), [("mistral", True), ("gpt2", True), ("mixtral", False)])
def test_two_context_ranks_train_as_one(family: str, packed: bool) -> None:
    config = FAMILIES[family]
    assert_as_alone(plan_for(config, context=2), config, batch_of(config, packed=packed))


@pytest.mark.parametrize(
    "options",
    [{"context": 4, "zero": 2}, pytest.param({"context": 2, "tensor": 2, "data": 2}, marks=pytest.mark.slow)],
    ids=str,
)
def test_context_parallelism_combines_with_other_kinds(options: Any) -> None:
    plan = plan_for(LLAMA_TIED, **options)
    assert_as_alone(plan, LLAMA_TIED, batch_of(LLAMA_TIED, rows=4 * plan.options.data))


@pytest.mark.parametrize(("name", "strategy"), [("zb-h1", "core"), ("pipeoffload", "full")])
def test_context_parallelism_combines_with_every_schedule(name: str, strategy: str) -> None:
    plan = plan_for(LLAMA, name, strategy=strategy, context=2)
    assert_as_alone(plan, LLAMA, batch_of(LLAMA, packed=True))


def test_gradients_are_summed_during_attention() -> None:
    schedule = db.schedules["chronos-zero2"](devices=2, micro_batches=4, group=2)
    plan = plan_of(schedule, LLAMA, sequence_length=16, context=2, zero=2)
    assert_as_alone(plan, LLAMA, batch_of(LLAMA))


def test_context_rank_keeps_half_of_the_activations() -> None:
    undivided, divided = (peaks_of(plan_for(LLAMA, context=context), batch_of(LLAMA)) for context in (1, 2))
    # The loss is one number on every rank.
    assert divided == [pytest.approx(0.5 * undivided[rank % 2], abs=8) for rank in range(4)]


def test_all_context_ranks_evaluate_full_sequences() -> None:
    batch = batch_of(GPT2)
    losses = [run_threads(plan_for(GPT2, context=c), lambda p: float(p.evaluate([batch])))[0] for c in (1, 2)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.slow
def test_context_parallelism_runs_over_gloo(tmp_path: Any) -> None:
    tokens = tokens_of(LLAMA, rows=4, length=16)
    gloo_ranks.assert_gradients_over_gloo([plan_for(LLAMA, context=2)], [tokens], tmp_path)


def test_a_length_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(
        InputError, match="A sequence of 14 tokens cannot be cut into 4 equal parts, 2 for each of the 2"
    ):
        run_threads(plan_for(LLAMA, context=2), lambda pipeline: pipeline.step(tokens_of(LLAMA, rows=4, length=14)))


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ({**GPT2, "resid_pdrop": 0.1}, {}, "context parallelism has no dropout"),
        ({**MIXTRAL, "output_router_logits": True}, {}, "the routers' auxiliary loss is one over whole sequences"),
        (
            {**LLAMA, "model_type": "olmo2"},
            {},
            "it has context parallelism for its own units alone, and 'olmo2' runs with transformers' modules",
        ),
        (LLAMA, {"sequence_length": 18}, "18 tokens cannot be cut into 2 x 2 equal parts"),
    ],
)
def test_indivisible_context_is_refused_when_planned(config: Any, options: Any, reason: str) -> None:
    run = db.ir.RunOptions(**{"sequence_length": 16, "context": 2, **options})
    refusal = beyond_runtime(run, ModelConfig.from_hf(config))
    assert refusal == f"The runtime cannot run this plan, because {reason}: make the plan with context 1 to train it."


def test_generation_is_refused() -> None:
    def generate(pipeline: Pipeline) -> Tensor:
        return pipeline.generate(torch.zeros(1, 4, dtype=torch.int64), new_tokens=1)

    with pytest.raises(InputError, match="generate with a plan of context 1"):
        run_threads(plan_for(LLAMA, context=2), generate)
