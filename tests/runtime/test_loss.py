"""A loss of the user's own: its gradients are those of the whole model in one process, for every kind of model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.runtime.distributed.transport import Threads
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import GPT2, LLAMA, MIXTRAL, plan_of, run_threads, tokens_of

pytest.importorskip("transformers", minversion="5")

from tests.support.hf_reference import exactly, hf_model


def smoothed(logits: Any, targets: Any) -> Any:
    """Label smoothing and a z-loss, summed over the targets that count."""
    flat, targets = logits.flatten(0, 1), targets.flatten()
    smooth = functional.cross_entropy(flat, targets, label_smoothing=0.1, reduction="sum")
    return smooth + 1e-2 * (flat.logsumexp(-1).square() * (targets != -100)).sum()


def batch_of(config: Any, *, rows: Any) -> Any:
    """Rows with different numbers of targets."""
    tokens = tokens_of(config, rows=rows)
    targets = tokens[:, 1:].clone()
    targets[1, 3:] = -100
    return {"input_ids": tokens[:, :-1], "targets": targets}


@pytest.mark.parametrize("strategy", ["none", "full"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL, GENERIC["olmo2"], GENERIC["cohere"]])
def test_gradients_are_those_of_one_process(config: Any, schedule: str, strategy: str) -> None:
    made = db.schedules[schedule](devices=2, micro_batches=4)
    check(config, plan_of(made, config, strategy=strategy))


def test_replicas_are_averaged_by_their_numbers_of_targets() -> None:
    check(LLAMA, plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), LLAMA, data=2))


def check(config: Any, plan: Any) -> None:
    """Loss and gradients of the pipeline on the model's own parameters, against the model alone."""
    model, data = hf_model(config), plan.options.data
    batch = batch_of(config, rows=4)
    with exactly():
        loss = smoothed(model(batch["input_ids"]).logits, batch["targets"]) / (batch["targets"] != -100).sum()
        loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def one(transport: Any) -> Any:
        pipeline = Pipeline(copy.deepcopy(model), plan, transport=transport, loss=smoothed)
        own = {name: entry.chunk(data)[pipeline.ranks.replica] for name, entry in batch.items()}
        with exactly():
            loss = pipeline.step(own)
        return loss, {name: p.grad for name, p in pipeline.named_parameters()}

    answers = Threads.run(plan.ranks, one)
    torch.testing.assert_close(answers[0][0], loss.detach(), rtol=1e-12, atol=0)
    found = {name: gradient for _, part in answers for name, gradient in part.items()}
    for name, reference in expected.items():
        assert (found[name] - reference).abs().max() <= 1e-12 * reference.abs().max(), name


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, logits: Any, targets: Any) -> Any:
        return self.weight * functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda logits, targets: logits.sum(-1), r"one number, summed over the targets, but has shape \[1, 12\]"),
        (lambda logits, targets: logits.detach().sum(), "The loss has no gradient"),
        (Weighted(), "The loss has parameters to train"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, message: str) -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda pipeline: pipeline.step(tokens_of(LLAMA, rows=4)), loss=loss)


def test_a_loss_of_ones_own_is_refused_where_logits_are_divided() -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA, tensor=2)
    with pytest.raises(InputError, match="plan with --tensor 1"):
        run_threads(plan, lambda _: None, ranks=4, loss=smoothed)
