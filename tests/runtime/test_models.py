"""Units match Hugging Face's models in names, logits and gradients."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError, PlannedUnit
from debubble.models import ModelConfig
from debubble.models.runtime_limits import check_units
from debubble.runtime.models.build import build_stage
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import loss_and_gradients, plan_of, reference_gradients, run_threads, tokens_of
from tests.support.tiny_models import FAMILIES, LLAMA


def test_a_unit_has_the_same_weights_alone_as_in_the_model() -> None:
    parameters = ReferenceModel(LLAMA, seed=3).hf_parameters()
    (alone,) = build_stage(LLAMA, [PlannedUnit("mlp", 2)], seed=3)
    for name, parameter in alone.hf_parameters().items():
        assert torch.equal(parameter, parameters[name])


def test_the_row_of_the_padding_token_starts_at_zero() -> None:
    (embedding,) = build_stage({**LLAMA, "pad_token_id": 5}, [PlannedUnit("embedding", None)], seed=0)
    (table,) = embedding.parameters()
    assert (table == 0).all(dim=1).nonzero().flatten().tolist() == [5]


def test_an_unknown_family_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="no half-layers for the model type 'mine'"):
        check_units(ModelConfig.from_hf({**LLAMA, "model_type": "mine"}))


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(InputError, match="no `num_hidden_layers`, which a llama model needs"):
        ReferenceModel({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


def test_unit_outside_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="layer 9, but the model has 4 layers"):
        build_stage(LLAMA, [PlannedUnit("mlp", 9)])
    with pytest.raises(InputError, match="cannot build a unit of type 'dense'"):
        build_stage(LLAMA, [PlannedUnit("dense", 0)])


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_autocast_matches_a_single_process(family: str) -> None:
    config = FAMILIES[family]
    batch = tokens_of(config, rows=4)

    def one(pipeline: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_and_gradients(pipeline, batch)

    plan = plan_of(db.schedules["zb-h1"](devices=2, micro_batches=4), config, dtype="fp32")
    answers = run_threads(plan, one)
    with torch.autocast("cpu", torch.bfloat16):
        expected_loss, expected = reference_gradients(config, batch, micro_batches=4, dtype=torch.float32)
    torch.testing.assert_close(answers[0][0], expected_loss.float(), rtol=1e-6, atol=0)
    for _, gradients in answers:
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            if name != "lm_head.weight":  # a tied table has the embedding's name
                assert (gradient - expected[name]).norm() <= 1e-2 * expected[name].norm(), name
