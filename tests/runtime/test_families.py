"""Every family of models recomputes as it trains: with transformers' loss and gradients, in one process."""

from typing import Any

import pytest

import debubble as db
from tests.support.runtime_cases import plan_of, tokens_of
from tests.support.schedule_cases import explicit, fused
from tests.support.tiny_models import FAMILIES

pytest.importorskip("transformers")

from tests.support.hf_reference import assert_trains_as_alone, hf_model


@pytest.mark.parametrize(
    ("family", "strategy", "form"),
    [
        ("llama", "mlp", explicit),
        ("gpt2", "norm+activation+multiply", explicit),
        ("gemma2", "core", fused),
        ("mixtral", "mlp", fused),
        ("qwen3-moe", "norm+activation+multiply", fused),
    ],
)
def test_recomputation_gives_transformers_gradients(family: str, strategy: str, form: Any) -> None:
    model = hf_model(FAMILIES[family])
    schedule = form(db.schedules["zb-h1"](devices=2, micro_batches=2))
    plan = plan_of(schedule, model.config.to_dict(), strategy=strategy)
    assert_trains_as_alone(model, plan, tokens_of(FAMILIES[family], rows=2))
