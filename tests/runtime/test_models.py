"""The units are Hugging Face's models: same names, same logits, same gradients."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError, PlannedUnit
from debubble.models import ModelConfig
from debubble.models.runtime_limits import check_units
from debubble.runtime.models.build import build_stage
from debubble.runtime.models.units import MicroBatch
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import (
    FAMILIES,
    GPT2,
    LLAMA,
    LLAMA3_ROPE,
    MISTRAL,
    QWEN2,
    QWEN3,
    plan_of,
    reference_gradients,
    run_threads,
    tokens_of,
)

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, LLAMA3_ROPE, MISTRAL, QWEN2, QWEN3, GPT2],
    ids=["llama", "llama-tied", "llama3-rope", "mistral", "qwen2", "qwen3", "gpt2"],
)  # fmt: skip
def test_logits_and_gradients_equal_transformers(config: Any) -> None:
    hf_config = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(1)
    reference = transformers.AutoModelForCausalLM.from_config(hf_config).double()
    for parameter in reference.parameters():  # biases and norms too, so that each is seen
        torch.nn.init.normal_(parameter, 0.5, 0.1)
    ours = ReferenceModel(hf_config.to_dict(), dtype=torch.float64)
    state = reference.state_dict()
    with torch.no_grad():
        for name, parameter in ours.hf_parameters().items():
            parameter.copy_(state[name])
    tokens = torch.randint(0, config["vocab_size"], (2, 24))
    torch.testing.assert_close(ours(tokens), reference(tokens).logits, rtol=1e-6, atol=1e-6)

    targets = torch.randint(0, config["vocab_size"], (2, 24))
    ours(tokens, MicroBatch(targets, 1 / targets.numel())).backward()
    torch.nn.functional.cross_entropy(reference(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in ours.hf_parameters().items():
        if name in gradients:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_parameter_names_are_those_of_transformers(config: Any) -> None:
    reference = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    assert set(ReferenceModel(config).hf_parameters()) == set(reference.state_dict())


def test_a_unit_has_the_same_weights_alone_as_in_the_model() -> None:
    whole = ReferenceModel(LLAMA, seed=3).hf_parameters()
    (alone,) = build_stage(LLAMA, [PlannedUnit("mlp", 2)], seed=3)
    for name, parameter in alone.hf_parameters().items():
        assert torch.equal(parameter, whole[name])


def test_the_row_of_the_padding_token_starts_at_zero() -> None:
    (embedding,) = build_stage({**LLAMA, "pad_token_id": 5}, [PlannedUnit("embedding", None)], seed=0)
    (table,) = embedding.parameters()
    assert (table == 0).all(dim=1).nonzero().flatten().tolist() == [5]


def test_seeds_give_different_weights() -> None:
    one, two = (build_stage(LLAMA, [PlannedUnit("head", None)], seed=s)[0].hf_parameters() for s in (0, 1))
    assert not torch.equal(one["lm_head.weight"], two["lm_head.weight"])


def test_units_are_two_per_layer_with_embedding_and_head() -> None:
    assert [u.type for u in ModelConfig.from_hf(GPT2).units] == ["embedding", *["attention", "mlp"] * 4, "head"]


def test_an_unknown_family_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match="no half-layers for the model type 'mine'"):
        check_units(ModelConfig.from_hf({**LLAMA, "model_type": "mine"}))


def test_a_missing_entry_is_named() -> None:
    with pytest.raises(InputError, match="no `num_hidden_layers`, which a llama model needs"):
        ReferenceModel({k: v for k, v in LLAMA.items() if k != "num_hidden_layers"})


def test_a_unit_that_is_no_part_of_the_model_is_refused() -> None:
    with pytest.raises(InputError, match="layer 9, but the model has 4 layers"):
        build_stage(LLAMA, [PlannedUnit("mlp", 9)])
    with pytest.raises(InputError, match="cannot build a unit of type 'dense'"):
        build_stage(LLAMA, [PlannedUnit("dense", 0)])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_autocast_changes_units_in_a_pipeline_as_it_does_in_one_process(family: str) -> None:
    config = FAMILIES[family]
    batch = tokens_of(config, rows=4)

    def one(pipeline: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipeline.step(batch)
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    plan = plan_of(db.schedules["zb-h1"](devices=2, micro_batches=4), config, dtype="fp32")
    answers = run_threads(plan, one)
    with torch.autocast("cpu", torch.bfloat16):
        expected_loss, expected = reference_gradients(config, batch, micro_batches=4, dtype=torch.float32)
    torch.testing.assert_close(answers[0][0], expected_loss.float(), rtol=1e-6, atol=0)
    for _, gradients in answers:
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            if name != "lm_head.weight":  # a tied table goes by the embedding's name
                assert (gradient - expected[name]).norm() <= 1e-2 * expected[name].norm(), name
