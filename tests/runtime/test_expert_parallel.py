"""Expert parallelism: ranks that divide a layer's experts train as one process does, under every other division."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import debubble as db
from debubble.ir import InputError
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.plans import Plan
from debubble.runtime.distributed.expert_parallel import ExpertGroup
from debubble.runtime.distributed.transport import Threads
from tests.support import gloo_ranks
from tests.support.runtime_cases import (
    LLAMA,
    MIXTRAL,
    QWEN3_MOE,
    assert_gradients,
    gradient_of,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
)

FOUR = {**MIXTRAL, "num_local_experts": 4, "vocab_size": 62}
"""Mixtral with experts that 2 and 4 ranks can divide."""


def plan_for(
    config: Any = FOUR, name: str = "1f1b", *, devices: int = 2, strategy: str = "none", **options: Any
) -> Plan:
    schedule = db.schedules[name](devices=devices, micro_batches=2)
    return plan_of(schedule, config, strategy=strategy, **{"data": 2, "expert": 2, "sequence_length": 12, **options})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def step(plan: Plan, tokens: Tensor, **arguments: Any) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Loss, whole gradients and their norm, read off a step of SGD at rate 1."""

    def one(pipeline: Any) -> Any:
        before = {name: value.clone() for name, value in pipeline.state_dict().items()}
        loss = pipeline.step(tokens.chunk(plan.options.data)[pipeline.ranks.replica])
        norm = pipeline.optimizer_step(float("inf"))
        after = pipeline.state_dict()
        return loss, {name: before[name] - after[name] for name in before}, norm

    answers = run_threads(plan, one, optimizer=sgd, **arguments)
    return answers[0][0], {name: g for _, part, _ in answers for name, g in part.items()}, answers[0][2]


def assert_trains_as_one_process(plan: Plan, config: Any = FOUR) -> None:
    micro_batches = plan.micro_batches * plan.options.data
    tokens = tokens_of(config, rows=micro_batches)
    loss, gradients, norm = step(plan, tokens)
    expected_loss, expected = reference_gradients(config, tokens, micro_batches=micro_batches)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    squares = sum(float(g.square().sum()) for g in expected.values() if g is not None)
    assert float(norm) == pytest.approx(squares**0.5, rel=1e-10)
    for name, gradient in gradients.items():
        # The difference of parameters before and after the step has their rounding.
        assert (gradient - expected[name]).abs().max() <= 1e-11 * max(1.0, float(expected[name].abs().max())), name


@pytest.mark.parametrize("config", [FOUR, QWEN3_MOE], ids=["mixtral", "qwen3-moe"])
@pytest.mark.parametrize(("name", "strategy"), [("1f1b", "none"), ("zb-v", "full"), ("pipeoffload", "activation")])
def test_two_ranks_of_experts_train_as_one_process(config: Any, name: str, strategy: str) -> None:
    assert_trains_as_one_process(plan_for(config, name, strategy=strategy), config)


@pytest.mark.parametrize(
    "options",
    [
        {"devices": 1},
        {"data": 4, "expert": 4},
        {"data": 4, "expert": 2},
        {"data": 4, "expert": 2, "zero": 2},
        {"data": 2, "expert": 2, "zero": 1},
        {"tensor": 2},
        {"tensor": 2, "zero": 2},
        {"context": 2, "data": 1, "expert": 2},
        {"context": 2, "data": 2, "expert": 4},
    ],
)
def test_expert_parallelism_goes_with_tensor_data_and_context_parallelism_and_zero(options: Any) -> None:
    assert_trains_as_one_process(plan_for(**options))


def test_a_rank_has_its_experts_alone() -> None:
    def parameters(pipeline: Any) -> Any:
        return {name: tuple(p.shape) for name, p in pipeline.named_parameters() if "experts" in name}

    for found in run_threads(plan_for(devices=1), parameters):
        assert found["model.layers.0.mlp.experts.gate_up_proj"] == (2, 96, 32)
        assert found["model.layers.0.mlp.experts.down_proj"] == (2, 32, 48)


@pytest.mark.parametrize("strategy", ["none", "full"])
def test_a_rank_whose_experts_nobody_chooses_meets_the_others(strategy: str) -> None:
    """The routers choose the first two experts for every token, which are one rank's."""
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

    answers = run_threads(plan_for(strategy=strategy), one)
    assert len({loss for losses, _ in answers for loss in losses}) == 1
    of_experts = [largest for _, gradients in answers for largest in gradients]
    assert max(of_experts) > 0
    assert min(of_experts) == 0


def test_rows_travel_to_their_experts_and_back() -> None:
    """Rank 0 has a row for each of three experts, rank 1 two rows for the last."""
    chosen = [[0, 1, 2], [2, 2]]

    def one(transport: Any) -> Any:
        choices = torch.bincount(torch.tensor(chosen[transport.rank]), minlength=4)
        exchange = ExpertGroup(transport, (0, 1)).exchange(choices)
        rows = torch.tensor([[10.0 * transport.rank + e] for e in chosen[transport.rank]], requires_grad=True)
        arrived = exchange.there(rows, *exchange.order)
        returned = exchange.back(2 * arrived, *exchange.order)
        returned.sum().backward()
        return exchange.sizes, arrived.flatten().tolist(), returned.flatten().tolist(), rows.grad

    first, second = Threads.run(2, one)
    assert first[:3] == ([1, 1], [0, 1], [0, 2, 4])
    assert second[:3] == ([3, 0], [2, 12, 12], [24, 24])
    for *_, gradient in (first, second):
        assert torch.equal(gradient, torch.full_like(gradient, 2))


def test_every_step_equals_that_of_undivided_experts() -> None:
    """Clipping, AdamW, ZeRO and the routers' auxiliary loss included."""
    config = {**FOUR, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    batches = [tokens_of(config, rows=8, seed=seed) for seed in range(3)]

    def train(plan: Plan) -> Any:
        def one(pipeline: Any) -> Any:
            losses = []
            for tokens in batches:
                losses.append(float(pipeline.step(tokens.chunk(4)[pipeline.ranks.replica])))
                losses.append(float(pipeline.optimizer_step(1.0)))
            return losses

        return run_threads(plan, one, optimizer=partial(torch.optim.AdamW, lr=3e-3))[0]

    whole = train(plan_for(config, devices=1, data=4, expert=1))
    for zero in (0, 2):
        assert train(plan_for(config, devices=1, data=4, expert=2, zero=zero)) == pytest.approx(whole, rel=1e-10)


def test_the_auxiliary_loss_is_that_of_transformers() -> None:
    pytest.importorskip("transformers")
    from tests.support.hf_reference import hf_model, loss_of

    config = {**FOUR, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    model, tokens = hf_model(config), tokens_of(FOUR, rows=4)
    plan = plan_for(model.config.to_dict())
    expected_loss = loss_of(model, tokens, micro_batches=4)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    def one(transport: Any) -> Any:
        pipeline = db.Pipeline(copy.deepcopy(model), plan, transport=transport)
        loss = pipeline.step(tokens.chunk(2)[pipeline.ranks.replica])
        with torch.no_grad():
            for parameter in pipeline.parameters():
                parameter.copy_(gradient_of(parameter))
        return loss, pipeline.state_dict()

    answers = Threads.run(plan.ranks, one)
    for loss, state in answers:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
        assert_gradients(state, expected)


def test_four_gloo_ranks_equal_one_process(tmp_path: Path) -> None:
    plan = plan_for(name="zb-h1", strategy="full")
    plan.save(tmp_path / "plan.json")
    tokens = tokens_of(FOUR, rows=2)
    # The replicas have the same rows: the mean over both is that over one.
    answers = gloo_ranks.spawn(4, gloo_ranks.loss_and_norm, tmp_path / "plan.json", tokens)
    loss, gradients = reference_gradients(FOUR, tokens, micro_batches=2)
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
    for rank in range(4):
        told = torch.load(answers / f"rank{rank}.pt")
        torch.testing.assert_close(torch.stack(told), torch.stack([loss, norm]), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA, {}, "divides the experts of its own units alone"),
        ({**LLAMA, "model_type": "qwen2_moe"}, {}, "divides the experts of its own units alone"),
        (MIXTRAL, {}, "5 experts cannot be divided among 2 expert-parallel ranks"),
        (FOUR, {"data": 1}, "2 expert-parallel ranks are no part of the 1 x 1 data-"),
        (FOUR, {"tensor": 2, "expert_tensor": 1}, "make the plan with --expert-tensor 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(config: Any, options: Any, message: str) -> None:
    plan = plan_for(config, **options)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda _: None)


def test_a_plan_that_divides_experts_is_not_refused() -> None:
    assert beyond_runtime(plan_for().options, ModelConfig.from_hf(FOUR)) is None
