"""The routers' auxiliary loss is that of transformers over all layers, for any cut into stages."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.runtime.models.routing import Balance
from tests.support.runtime_cases import plan_of, run_threads, tokens_of
from tests.support.tiny_models import MIXTRAL, QWEN3_MOE

pytest.importorskip("transformers")

from tests.support.hf_reference import assert_trains_as_alone, hf_model

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
FAMILIES = {"mixtral": {**MIXTRAL, **BALANCED}, "qwen3-moe": {**QWEN3_MOE, **BALANCED}}


def check(config: Any, schedule: Any, **options: Any) -> None:
    """Compare loss and gradients with transformers in one process."""
    model = hf_model(config)
    plan = plan_of(schedule, model.config.to_dict(), **options)
    assert_trains_as_alone(model, plan, tokens_of(config, rows=schedule.micro_batches * plan.options.data))


@pytest.mark.parametrize(
    ("family", "name", "devices", "strategy"),
    [("mixtral", "1f1b", 3, "full"), ("qwen3-moe", "zb-h1", 4, "none"), ("qwen3-moe", "zb-v", 2, "full")],
)
def test_gradients_match_transformers_for_any_stage_cut(family: Any, name: str, devices: int, strategy: str) -> None:
    check(FAMILIES[family], db.schedules[name](devices=devices, micro_batches=4), strategy=strategy)


def test_sharded_ranks_and_replicas_match_transformers() -> None:
    check(FAMILIES["mixtral"], db.schedules["zb-h1"](devices=2, micro_batches=2), tensor=2, data=2, zero=2)


def test_offload_changes_nothing() -> None:
    check(FAMILIES["qwen3-moe"], db.schedules["pipeoffload"](devices=2, micro_batches=4))


def test_loss_includes_the_routers_term() -> None:
    """The term that `check` compares is nonzero and no sum of losses per layer."""
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    tokens = tokens_of(MIXTRAL, rows=2)
    without, with_it = (
        run_threads(plan_of(schedule, config), lambda p: p.step(tokens))[0] for config in (MIXTRAL, FAMILIES["mixtral"])
    )
    # Lower bound: coefficient x experts x sum over experts of (choices x probability) with even routing.
    assert with_it - without > 0.3 * 2 * 0.99


def test_bf16_messages_carry_the_sums_in_fp32() -> None:
    balance = Balance(0.1, 5, 4, hidden=8, dtype=torch.bfloat16)
    x, sums = torch.randn(2, 3, 8).bfloat16(), torch.rand(2, 5)
    message = balance.pack(x, sums)
    assert message.shape == balance.message(torch.Size([2, 3]))
    back, unpacked_sums = balance.unpack(message, torch.Size([2, 3]))
    assert torch.equal(back, x)
    assert torch.equal(unpacked_sums, sums)
