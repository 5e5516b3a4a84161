from dataclasses import replace
from typing import Any

import pytest
import torch

import debubble as db
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.sharding import TensorShard
from debubble.training.checkpoint.state import state_of
from debubble.training.optimizer import optimizer_maker
from tests.support.model_cases import on_cpus
from tests.support.runtime_cases import GPT2, MIXTRAL, plan_of, run_threads


def names(plan: db.Plan, *, tied: bool) -> list[set[str]]:
    """Names of the tensors that each rank saves."""
    assert plan.model is not None
    plan = replace(plan, model_on_cluster=on_cpus({**plan.model.config, "tie_word_embeddings": tied}))

    make = optimizer_maker("adamw", weight_decay=0.1)
    answers: list[set[str]] = run_threads(plan, lambda pipeline: set(state_of(pipeline)), optimizer=make)
    return answers


@pytest.mark.parametrize("tied", [False, True])
def test_two_devices_save_the_same_state_as_one(plan_file: Any, tied: bool) -> None:
    (alone,) = names(Plan.load(plan_file(1)), tied=tied)
    first, last = names(Plan.load(plan_file(2)), tied=tied)
    assert first | last == alone
    assert ("optimizer.lm_head.weight.exp_avg" in last) != tied
    assert first & last == ({f"{prefix}model.embed_tokens.weight{end}" for prefix, end in TABLE} if tied else set())


TABLE = [("model.", ""), *(("optimizer.", f".{state}") for state in ("step", "exp_avg", "exp_avg_sq"))]


EXPERTS = {**MIXTRAL, "num_local_experts": 6}


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (GPT2, {}),
        (MIXTRAL, {"data": 3, "zero": 2}),
        (EXPERTS, {"data": 2, "expert": 2, "zero": 1, "tensor": 1}),
        pytest.param(EXPERTS, {"data": 6, "expert": 2, "zero": 3}, marks=pytest.mark.slow),
        (GPT2, {"lora": 3, "data": 2, "zero": 3}),
        ({**GPT2, "n_embd": 128, "n_head": 2, "n_layer": 1}, {"lora": 3, "quantize": "nf4", "data": 2, "zero": 2}),
    ],
)
def test_blocks_of_two_devices_make_up_the_full_tensor(config: Any, options: Any) -> None:
    def state_dict(pipeline: Pipeline) -> dict[str, TensorShard]:
        return state_of(pipeline)

    gathered = db.StageCosts.of(stages=1, gathered=1, static=1)
    alone, divided = (
        plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), config, costs=gathered, **more)
        for more in ({n: v for n, v in options.items() if n in ("lora", "quantize")}, {"tensor": 2, **options})
    )
    make = optimizer_maker("adamw", weight_decay=0.1)
    (expected,) = run_threads(alone, state_dict, optimizer=make)
    ranks = run_threads(divided, state_dict, ranks=divided.ranks, optimizer=make)
    for name, piece in expected.items():
        actual = torch.full_like(piece.tensor, torch.nan if piece.tensor.is_floating_point() else 255)
        for state in ranks:
            for block in state[name].blocks:
                where = tuple(slice(i, i + size) for i, size in zip(block.offsets, block.size, strict=True))
                actual[where] = state[name].block_view(block)
        assert torch.equal(actual, piece.tensor), name
