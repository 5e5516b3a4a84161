"""Ranks that shard experts train as one process does, in combination with all other parallelism."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.plans import Plan
from debubble.runtime.distributed.expert_parallel import ExpertGroup
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.support import gloo_ranks
from tests.support.runtime_cases import (
    assert_as_alone,
    plan_of,
    run_threads,
    tokens_of,
    train,
)
from tests.support.tiny_models import LLAMA, MIXTRAL, QWEN3_MOE

FOUR = {**MIXTRAL, "num_local_experts": 4, "vocab_size": 62}
"""Mixtral with an expert count that 2 and 4 ranks divide."""


def plan_for(
    config: Any = FOUR, name: str = "1f1b", *, devices: int = 2, strategy: str = "none", **options: Any
) -> Plan:
    schedule = db.schedules[name](devices=devices, micro_batches=2)
    return plan_of(schedule, config, strategy=strategy, **{"data": 2, "expert": 2, "sequence_length": 12, **options})


@pytest.mark.parametrize(
    ("config", "name", "strategy"), [(FOUR, "zb-v", "full"), (QWEN3_MOE, "pipeoffload", "activation")]
)
def test_two_expert_ranks_train_as_one_process(config: Any, name: str, strategy: str) -> None:
    plan = plan_for(config, name, strategy=strategy)
    assert_as_alone(plan, config, tokens_of(config, rows=4))


@pytest.mark.parametrize(
    "options",
    [
        {"data": 4, "expert": 2, "zero": 2, "devices": 1},
        {"tensor": 2, "zero": 1},
        {"context": 2, "data": 2, "expert": 4, "devices": 1},
    ],
    ids=str,
)
def test_expert_parallelism_combines_with_other_kinds(options: Any) -> None:
    plan = plan_for(**options)
    assert_as_alone(plan, FOUR, tokens_of(FOUR, rows=2 * plan.options.data))


def test_rank_holds_only_its_experts() -> None:
    def parameters(pipeline: Any) -> Any:
        return {name: tuple(p.shape) for name, p in pipeline.named_parameters() if "experts" in name}

    for shapes in run_threads(plan_for(devices=1), parameters):
        assert shapes["model.layers.0.mlp.experts.gate_up_proj"] == (2, 96, 32)
        assert shapes["model.layers.0.mlp.experts.down_proj"] == (2, 32, 48)


def test_rank_with_unused_experts_still_communicates() -> None:
    """The routers send every token to the first two experts, which are on one rank."""
    tokens = tokens_of(FOUR, rows=4)

    def one(pipeline: Any) -> Any:
        with torch.no_grad():
            for name, parameter in pipeline.named_parameters():
                if name.endswith("mlp.gate.weight"):
                    parameter[:2], parameter[2:] = 1.0, -1.0
                if name.endswith("post_attention_layernorm.weight"):
                    parameter.fill_(0.0)[0] = 1.0
                if name == "model.embed_tokens.weight":
                    parameter[:, 0] = 100.0
        losses = []
        for _ in range(2):
            losses.append(float(pipeline.step(tokens.chunk(2)[pipeline.ranks.replica])))
        return losses, [float(p.grad.abs().max()) for n, p in pipeline.named_parameters() if "experts.down" in n]

    answers = run_threads(plan_for(strategy="full"), one)
    assert len({loss for losses, _ in answers for loss in losses}) == 1
    of_experts = [largest for _, gradients in answers for largest in gradients]
    assert max(of_experts) > 0
    assert min(of_experts) == 0


def test_rows_travel_to_their_experts_and_back() -> None:
    """Rank 0 has one row for each of three experts, and rank 1 two rows for the last."""
    chosen = [[0, 1, 2], [2, 2]]

    def one(transport: Any) -> Any:
        choices = torch.bincount(torch.tensor(chosen[transport.rank]), minlength=4)
        exchange = ExpertGroup(transport, (0, 1)).exchange(choices)
        rows = torch.tensor([[10.0 * transport.rank + e] for e in chosen[transport.rank]], requires_grad=True)
        arrived = exchange.dispatch(rows, *exchange.order)
        returned = exchange.combine(2 * arrived, *exchange.order)
        returned.sum().backward()
        return exchange.sizes, arrived.flatten().tolist(), returned.flatten().tolist(), rows.grad

    first, second = ThreadTransport.run(2, one)
    assert first[:3] == ([1, 1], [0, 1], [0, 2, 4])
    assert second[:3] == ([3, 0], [2, 12, 12], [24, 24])
    for *_, gradient in (first, second):
        assert torch.equal(gradient, torch.full_like(gradient, 2))


@pytest.mark.slow
def test_steps_match_unsharded_experts() -> None:
    """With clipping, AdamW, ZeRO and the routers' auxiliary loss."""
    config = {**FOUR, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    batches = [tokens_of(config, rows=8, seed=seed) for seed in range(3)]

    def losses(plan: Plan) -> Any:
        make = partial(torch.optim.AdamW, lr=3e-3)
        return run_threads(plan, lambda pipeline: train(pipeline, batches, max_norm=1.0), optimizer=make)[0]

    undivided = losses(plan_for(config, devices=1, data=4, expert=1))
    assert losses(plan_for(config, devices=1, data=4, expert=2, zero=2)) == pytest.approx(undivided, rel=1e-10)


def test_the_auxiliary_loss_is_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    from tests.support.hf_reference import assert_trains_as_alone, hf_model

    model = hf_model({**FOUR, "output_router_logits": True, "router_aux_loss_coef": 0.3})
    assert_trains_as_alone(model, plan_for(model.config.to_dict()), tokens_of(FOUR, rows=4))


@pytest.mark.slow
def test_four_gloo_ranks_match_one_process(tmp_path: Path) -> None:
    plan = plan_for(name="zb-h1", strategy="full")
    gloo_ranks.assert_norm_over_gloo(plan, tokens_of(FOUR, rows=2), tmp_path)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA, {}, "divides the experts of its own units alone"),
        ({**LLAMA, "model_type": "qwen2_moe"}, {}, "divides the experts of its own units alone"),
        (MIXTRAL, {}, "5 experts cannot be divided among 2 expert-parallel ranks"),
        (FOUR, {"data": 1}, "2 expert-parallel ranks are no part of the 1 x 1 data-"),
        (FOUR, {"tensor": 2, "expert_tensor": 1}, "make the plan with --tensor 2 --expert-tensor 2"),
    ],
)
def test_indivisible_experts_are_refused(config: Any, options: Any, message: str) -> None:
    plan = plan_for(config, **options)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda _: None)


def test_a_plan_that_divides_experts_is_not_refused() -> None:
    assert beyond_runtime(plan_for().options, ModelConfig.from_hf(FOUR)) is None
