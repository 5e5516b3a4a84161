"""Adapters: loss, gradients, training and files of a pipeline match peft in one process."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from tests.support.runtime_cases import plan_of, run_threads, tokens_of, train
from tests.support.tiny_models import FAMILIES, GPT2, LLAMA, LLAMA_TIED, MIXTRAL

pytest.importorskip("transformers")
pytest.importorskip("peft")

import peft

from tests.support.hf_reference import assert_trains_as_alone, exactly, hf_model, loss_of, peft_model

# peft warns of names that transformers will change, and of what it derives from a config.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning", "RuntimeWarning")
]


def trained(pipeline: Any) -> Any:
    return {name: p for name, p in pipeline.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("family", "name"), [("llama-tied", "1f1b"), ("gemma2", "zb-h1"), ("gpt2", "zb-h1"), ("qwen3-moe", "1f1b")]
)
def test_only_adapters_have_gradients_and_they_match_peft(family: str, name: str) -> None:
    config = FAMILIES[family]
    # peft's "all-linear" includes the experts, which are no linear layers here.
    entries = {"target_modules": ["q_proj", "o_proj"]} if family in ("mixtral", "qwen3-moe") else {}
    model = peft_model(config, **entries)
    plan = plan_of(db.schedules[name](devices=3, micro_batches=4), model.config.to_dict(), lora=3)
    assert_trains_as_alone(model, plan, tokens_of(config, rows=4), only=True)


@pytest.mark.parametrize("entries", [
        {"target_modules": ["q_proj", "v_proj"]}, {"rank_pattern": {"q_proj": 2}},
        {"target_modules": ["o_proj"], "layers_to_transform": [1]}, {"use_rslora": True},
])  # fmt: skip
def test_adapters_have_the_names_and_scale_of_peft(entries: Any) -> None:
    model, tokens = peft_model(LLAMA, **entries), tokens_of(LLAMA, rows=2)
    expected = loss_of(model, tokens, micro_batches=2)
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), LLAMA, lora=3)
    answers = run_threads(plan, lambda p: (p.step(tokens), set(trained(p))), model=model)
    torch.testing.assert_close(answers[0][0], expected, rtol=1e-12, atol=0)
    adapters = {n.replace(".default", "") for n, p in model.named_parameters() if p.requires_grad}
    assert {f"base_model.model.{n}" for _, names in answers for n in names} == adapters


def test_losses_match_peft() -> None:
    model = peft_model(LLAMA)
    plan = plan_of(db.schedules["zb-h1"](devices=2, micro_batches=4), LLAMA, lora=3)
    batches = [tokens_of(LLAMA, rows=4)] * 8
    make = partial(torch.optim.AdamW, lr=1e-2)
    actual = run_threads(plan, lambda pipeline: train(pipeline, batches), model=model, optimizer=make)[0]
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    expected = []
    for tokens in batches:
        expected.append(float(loss_of(model, tokens, micro_batches=1)))
        optimizer.step()
        optimizer.zero_grad()
    assert actual == pytest.approx(expected, rel=1e-10)
    assert expected[-1] < expected[0]


def test_adapters_made_by_the_pipeline_load_in_peft(tmp_path: Path) -> None:
    config = GPT2
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), config, dtype="fp32", lora=4)
    tokens = tokens_of(config, rows=2)

    def one(pipeline: Any) -> Any:
        first = pipeline.step(tokens)
        pipeline.optimizer_step()
        pipeline.save_pretrained(tmp_path / "adapters")
        return first, pipeline.step(tokens), {n: p.detach().clone() for n, p in pipeline.named_parameters()}

    answers = run_threads(plan, one, optimizer=partial(torch.optim.SGD, lr=1.0))
    assert answers[0][1] < answers[0][0]
    state = {name: tensor for *_, tensors in answers for name, tensor in tensors.items()}

    base = hf_model(config).float()
    base.load_state_dict({name: state[name] for name in base.state_dict() if name in state}, strict=False)
    opened = peft.PeftModel.from_pretrained(base, tmp_path / "adapters")
    with exactly():
        logits = opened(tokens[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(answers[0][1], expected.detach(), rtol=1e-5, atol=0)

    def load(pipeline: Any) -> Any:
        pipeline.load_pretrained(tmp_path / "adapters")
        return pipeline.step(tokens)

    assert run_threads(plan, load)[0] == answers[0][1]


def test_new_adapters_change_nothing_before_they_are_trained() -> None:
    tokens = tokens_of(LLAMA, rows=2)
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)
    losses = [run_threads(plan_of(schedule, LLAMA, lora=r), lambda p: p.step(tokens))[0] for r in (0, 8)]
    assert losses[0] == losses[1]


def test_experts_and_routers_get_no_adapters() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), MIXTRAL, lora=2)
    names = {n for trained_names in run_threads(plan, lambda p: set(trained(p))) for n in trained_names}
    assert {n.split(".")[4] for n in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_frozen_layers_save_adapter_inputs_and_no_states() -> None:
    """The input of a frozen expert or router is not saved; only adapters have fp32 masters."""
    schedule = db.schedules["1f1b"](devices=1, micro_batches=1)

    def one(pipeline: Any) -> Any:
        pipeline.step(tokens_of(MIXTRAL, rows=1))
        return (
            pipeline.measured.peak_activation,
            pipeline.measured.static_bytes,
            [p.numel() for p in trained(pipeline).values()],
        )

    full, lora = (run_threads(plan_of(schedule, MIXTRAL, dtype="bf16", lora=r), one)[0] for r in (0, 2))
    parameters = sum(full[2])
    assert lora[0] < full[0]
    assert full[1] == parameters * (2 + 4 + 4)
    assert lora[1] == parameters * 2 + sum(lora[2]) * (2 + 4 + 4)


def test_replicas_with_zero_train_the_same_adapters() -> None:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=2)

    batches = [tokens_of(LLAMA_TIED, rows=4, seed=seed) for seed in range(2)]
    make = partial(torch.optim.AdamW, lr=1e-2)
    plans = [plan_of(schedule, LLAMA_TIED, lora=4, data=2, zero=zero) for zero in (0, 1)]
    full, divided = (run_threads(plan, lambda p: train(p, batches, max_norm=1.0), optimizer=make)[0] for plan in plans)
    assert divided == pytest.approx(full, rel=1e-12)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"lora_dropout": 0.1}, "leave out 'lora_dropout'"),
        ({"use_dora": True}, "leave out 'use_dora'"),
        ({"bias": "all"}, "leave out 'bias'"),
        ({"target_modules": ["embed_tokens"]}, "'model.embed_tokens' is no linear layer"),
        ({"target_modules": [], "target_parameters": ["mlp.gate_proj.weight"]}, "leave out 'target_parameters'"),
        ({"r": 4}, "made for LoRA adapters of rank 3 .* but the model has rank 4"),
    ],
)
def test_unsupported_adapters_are_refused(entries: Any, message: str) -> None:
    plan = plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), LLAMA, lora=3)
    with pytest.raises(InputError, match=message):
        Pipeline(peft_model(LLAMA, **entries), plan)


def test_adapters_need_a_plan_that_trains_them(tmp_path: Path) -> None:
    peft_model(LLAMA).save_pretrained(tmp_path)
    plan = plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), LLAMA)
    with pytest.raises(InputError, match="make the plan with `--lora`"):
        Pipeline(None, plan).load_pretrained(tmp_path)


def test_saved_adapters_on_unexpected_layers_are_refused(tmp_path: Path) -> None:
    peft_model(LLAMA, lora_alpha=6).save_pretrained(tmp_path)
    config = {**LLAMA, "model_type": "llama"}
    plan = plan_of(db.schedules["1f1b"](devices=1, micro_batches=1), config, lora=3)
    model = peft_model(config, lora_alpha=6, target_modules=["q_proj"])
    with pytest.raises(InputError, match=r"have one on 'model.layers.0.mlp.down_proj', where the plan has none"):
        Pipeline(model, plan).load_pretrained(tmp_path)
