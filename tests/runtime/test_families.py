"""Every family of models: a pipeline's loss and gradients are those of transformers' own model in one process."""

import copy
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import FAMILIES, LLAMA, plan_of, tokens_of

pytest.importorskip("transformers")

from tests.support.hf_reference import hf_model, loss_of


def check(config: Any, schedule: Any, *, strategy: str = "none") -> None:
    """Loss and gradients of the pipeline on the model's own parameters, against the model alone."""
    model = hf_model(config)
    tokens = tokens_of(config, rows=schedule.micro_batches)
    expected_loss = loss_of(model, tokens, micro_batches=schedule.micro_batches)
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    plan = plan_of(schedule, model.config.to_dict(), strategy=strategy)

    def one(transport: Any) -> Any:
        pipeline = Pipeline(copy.deepcopy(model), plan, transport=transport)
        loss = pipeline.step(tokens)
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    answers = Threads.run(plan.devices, one)
    torch.testing.assert_close(answers[0][0], expected_loss, rtol=1e-12, atol=0)
    found = {name: gradient for _, part in answers for name, gradient in part.items()}
    assert expected.keys() <= found.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() <= 1e-12 * gradient.abs().max(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_split_backwards_give_transformers_gradients(family: Any) -> None:
    check(FAMILIES[family], db.schedules["zb-h1"](devices=3, micro_batches=4))


@pytest.mark.parametrize("strategy", ["full", "norm+activation+multiply", "mlp", "core"])
@pytest.mark.parametrize("family", ["gemma2", "mixtral", "qwen3-moe"])
def test_recomputation_gives_transformers_gradients(family: str, strategy: str) -> None:
    check(FAMILIES[family], db.schedules["1f1b"](devices=2, micro_batches=2), strategy=strategy)


def test_attention_that_is_not_causal_is_refused() -> None:
    with pytest.raises(InputError, match="causal attention alone"):
        ReferenceModel({**LLAMA, "model_type": "gemma", "use_bidirectional_attention": True})
