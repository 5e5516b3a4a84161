"""Every family of models: a pipeline's loss and gradients are those of transformers' own model in one process."""

from typing import Any

import pytest

import debubble as db
from tests.support.runtime_cases import FAMILIES, plan_of, tokens_of

pytest.importorskip("transformers")

from tests.support.hf_reference import assert_trains_as_alone, hf_model


def check(config: Any, schedule: Any, *, strategy: str = "none") -> None:
    model = hf_model(config)
    plan = plan_of(schedule, model.config.to_dict(), strategy=strategy)
    assert_trains_as_alone(model, plan, tokens_of(config, rows=schedule.micro_batches))


@pytest.mark.parametrize("family", FAMILIES)
def test_split_backwards_give_transformers_gradients(family: Any) -> None:
    check(FAMILIES[family], db.schedules["zb-h1"](devices=3, micro_batches=4))


@pytest.mark.parametrize("strategy", ["full", "norm+activation+multiply", "mlp", "core"])
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3-moe"])
def test_recomputation_gives_transformers_gradients(family: str, strategy: str) -> None:
    check(FAMILIES[family], db.schedules["1f1b"](devices=2, micro_batches=2), strategy=strategy)
