"""The auxiliary loss of routers: that of transformers over all layers, however these are cut into stages."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads
from debubble.runtime.models.routing import Balance
from tests.support.runtime_cases import (
    MIXTRAL,
    QWEN3_MOE,
    assert_gradients,
    gradient_of,
    plan_of,
    run_threads,
    tokens_of,
)

pytest.importorskip("transformers")

from tests.support.hf_reference import hf_model, loss_of

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
FAMILIES = {"mixtral": {**MIXTRAL, **BALANCED}, "qwen3-moe": {**QWEN3_MOE, **BALANCED}}


def check(config: Any, schedule: Any, *, rows: int = 1, **options: Any) -> None:
    """Loss and gradients against transformers' own, in one process, micro-batch by micro-batch."""
    model = hf_model(config)
    plan = plan_of(schedule, model.config.to_dict(), **options)
    micro_batches = schedule.micro_batches * plan.options.data
    tokens = tokens_of(config, rows=micro_batches * rows)
    expected_loss = loss_of(model, tokens, micro_batches=micro_batches)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    def one(transport: Any) -> Any:
        pipeline = Pipeline(copy.deepcopy(model), plan, transport=transport)
        loss = pipeline.step(tokens.chunk(plan.options.data)[pipeline.ranks.replica])
        with torch.no_grad():
            for parameter in pipeline.parameters():
                parameter.copy_(gradient_of(parameter))
        return loss, pipeline.state_dict()

    answers = Threads.run(plan.ranks, one)
    found = {name: gradient for _, part in answers for name, gradient in part.items()}
    for loss, _ in answers:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=0)
    assert_gradients({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("strategy", ["none", "full"])
@pytest.mark.parametrize(("name", "devices"), [("1f1b", 1), ("1f1b", 3), ("zb-h1", 4), ("zb-v", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut_into_stages_gives_transformers_gradients(
    family: Any, name: str, devices: int, strategy: str
) -> None:
    check(FAMILIES[family], db.schedules[name](devices=devices, micro_batches=4), strategy=strategy)


@pytest.mark.parametrize("options", [{"tensor": 2}, {"data": 2}, {"tensor": 2, "data": 2, "zero": 2}])
def test_divided_ranks_and_replicas_give_transformers_gradients(options: Any) -> None:
    check(FAMILIES["mixtral"], db.schedules["zb-h1"](devices=2, micro_batches=2), **options)


def test_offload_changes_nothing() -> None:
    check(FAMILIES["qwen3-moe"], db.schedules["pipeoffload"](devices=2, micro_batches=4))


def test_the_loss_has_a_part_of_its_own() -> None:
    """What `check` compares is not zero, and no sum of losses per layer."""
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    tokens = tokens_of(MIXTRAL, rows=2)
    without, with_it = (
        run_threads(plan_of(schedule, config), lambda p: p.step(tokens))[0] for config in (MIXTRAL, FAMILIES["mixtral"])
    )
    # At least: coefficient x experts x sum over experts of (choices x probability) where both are even.
    assert with_it - without > 0.3 * 2 * 0.99


def test_bf16_messages_carry_the_sums_in_fp32() -> None:
    balance = Balance(0.1, 5, 4, hidden=8, dtype=torch.bfloat16)
    x, sums = torch.randn(2, 3, 8).bfloat16(), torch.rand(2, 5)
    message = balance.pack(x, sums)
    assert message.shape == balance.message(torch.Size([2, 3]))
    back, told = balance.unpack(message, torch.Size([2, 3]))
    assert torch.equal(back, x)
    assert torch.equal(told, sums)


def test_training_ahead_of_the_norm_is_training(tmp_path: Path) -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4)
    batches = [tokens_of(MIXTRAL, rows=4)] * 4
    make = partial(torch.optim.AdamW, lr=1e-2)
    plan = plan_of(schedule, FAMILIES["mixtral"], dtype="bf16")

    def synchronously(pipeline: Any) -> Any:
        losses = []
        for tokens in batches:
            losses.append(float(pipeline.step(tokens)))
            pipeline.optimizer_step(0.5)
        return losses

    def ahead(pipeline: Any) -> Any:
        settled = [pipeline.post_validated_step(tokens, max_norm=0.5) for tokens in batches]
        return [float(s.loss) for s in (*settled[1:], pipeline.finish_update())]

    expected, found = (run_threads(plan, work, optimizer=make)[0] for work in (synchronously, ahead))
    assert found == expected
    assert expected[-1] < expected[0]
