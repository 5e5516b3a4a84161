"""Custom losses have the gradients of the full model in one process, for every kind of model."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from tests.support.generic_cases import GENERIC
from tests.support.runtime_cases import (
    assert_gradients,
    gradient_of,
    gradients_of,
    loss_and_gradients,
    plan_of,
    rows_of,
    run_threads,
    tokens_of,
)
from tests.support.tiny_models import GPT2, LLAMA, MIXTRAL

pytest.importorskip("transformers", minversion="5")

from tests.support.hf_reference import exactly, hf_model


def smoothed(logits: Any, targets: Any) -> Any:
    """Label smoothing and a z-loss, summed over valid targets."""
    flat, targets = logits.flatten(0, 1), targets.flatten()
    smooth = functional.cross_entropy(flat, targets, label_smoothing=0.1, reduction="sum")
    return smooth + 1e-2 * (flat.logsumexp(-1).square() * (targets != -100)).sum()


def batch_of(config: Any, *, rows: Any) -> Any:
    """Rows with different numbers of targets."""
    tokens = tokens_of(config, rows=rows)
    targets = tokens[:, 1:].clone()
    targets[1, 3:] = -100
    return {"input_ids": tokens[:, :-1], "targets": targets}


@pytest.mark.parametrize(
    ("config", "schedule", "strategy"),
    [(GPT2, "zb-v", "full"), (MIXTRAL, "1f1b", "none"), (GENERIC["olmo2"], "zb-v", "none")],
    ids=["gpt2", "mixtral", "olmo2"],
)
def test_gradients_match_a_single_process(config: Any, schedule: str, strategy: str) -> None:
    made = db.schedules[schedule](devices=2, micro_batches=4)
    check(config, plan_of(made, config, strategy=strategy))


def test_replicas_are_weighted_by_their_targets() -> None:
    check(LLAMA, plan_of(db.schedules["1f1b"](devices=2, micro_batches=2), LLAMA, data=2))


def check(config: Any, plan: Any) -> None:
    """Compare loss and gradients of a pipeline in place with those of the model alone."""
    model, batch = hf_model(config), batch_of(config, rows=4)
    with exactly():
        loss = smoothed(model(batch["input_ids"]).logits, batch["targets"]) / (batch["targets"] != -100).sum()
        loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def one(pipeline: Any) -> Any:
        with exactly():
            return loss_and_gradients(pipeline, rows_of(pipeline, batch))

    answers = run_threads(plan, one, model=model, loss=smoothed)
    torch.testing.assert_close(answers[0][0], loss.detach(), rtol=1e-12, atol=0)
    actual = {name: gradient for _, gradients in answers for name, gradient in gradients.items()}
    assert_gradients({name: actual[name] for name in expected}, expected)


def distilled(logits: Any, targets: Any, *, teacher: Any) -> Any:
    """Cross entropy plus divergence from a teacher's logits, summed over valid targets."""
    counted = (targets != -100).flatten()
    student, taught = (t.flatten(0, 1).log_softmax(-1) for t in (logits, teacher))
    divergence = functional.kl_div(student, taught, reduction="none", log_target=True).sum(-1)
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return flat + 0.5 * (divergence * counted).sum()


def test_teacher_logits_may_be_entries_of_the_batch() -> None:
    model = hf_model(LLAMA)
    batch = batch_of(LLAMA, rows=4)
    teacher = torch.randn(4, 12, LLAMA["vocab_size"], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with exactly():
        expected = distilled(model(batch["input_ids"]).logits, batch["targets"], teacher=teacher)
        expected = expected / (batch["targets"] != -100).sum()
        expected.backward()
    plan = plan_of(db.schedules["zb-v"](devices=2, micro_batches=4), LLAMA)

    model_gradients = {name: gradient_of(p).clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss, gradients = gradients_of(plan, {**batch, "teacher": teacher}, model=model, loss=distilled)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    assert_gradients(gradients, model_gradients)


def log_probabilities(logits: Any, targets: Any) -> Any:
    """The log-probability of each row's targets."""
    token_log_probabilities = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (token_log_probabilities * (targets != -100)).sum(-1)


def preference(logits: Any, targets: Any, *, reference: Any, scale: Any) -> Any:
    """DPO (Rafailov et al. 2023, eq. 7): every second row is the rejected answer to the row before it."""
    margin = log_probabilities(logits, targets) - reference
    return -(scale[::2] * functional.logsigmoid(0.1 * (margin[::2] - margin[1::2]))).sum()


def test_preferences_are_learned_in_two_passes() -> None:
    """The first pass evaluates the reference's log-probabilities; the second trains with them."""
    config, batch = LLAMA, batch_of(LLAMA, rows=8)
    model, before = hf_model(config), hf_model({**config, "initializer_range": 0.2})
    with exactly():
        reference = log_probabilities(before(batch["input_ids"]).logits, batch["targets"]).detach()
        logits = model(batch["input_ids"]).logits
        expected = preference(logits, batch["targets"], reference=reference, scale=torch.full((8,), 1 / 4))
        expected.backward()
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), config)
    targets = (batch["targets"] != -100).sum()

    def one(transport: Any) -> Any:
        reference = torch.zeros(8, dtype=torch.float64)

        def record(logits: Any, targets: Any, *, row: Any) -> Any:
            reference[row] = log_probabilities(logits, targets)
            return logits.new_zeros(())

        first = Pipeline(copy.deepcopy(before), plan, transport=transport, loss=record)
        first.evaluate([{**batch, "row": torch.arange(8)}])
        transport.all_reduce(reference, (0, 1))  # only the last stage has logits
        pipeline = Pipeline(copy.deepcopy(model), plan, transport=transport, loss=preference)
        # `step` divides by the number of targets; this loss is the mean over four pairs.
        scale = torch.full((8,), float(targets) / 4)
        return loss_and_gradients(pipeline, {**batch, "reference": reference, "scale": scale})

    answers = ThreadTransport.run(plan.ranks, one)
    torch.testing.assert_close(answers[0][0], expected.detach(), rtol=1e-12, atol=0)
    model_gradients = {name: gradient_of(p) for name, p in model.named_parameters()}
    for _, gradients in answers:
        assert_gradients(gradients, model_gradients)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "The loss asks for 'teacher', which the batch does not have"),
        ({"teacher": torch.zeros(3, 12)}, r"'teacher' must have 4 rows, as 'input_ids' has, not \[3, 12\]"),
        ({"teacher": torch.zeros(4), "pupil": torch.zeros(4)}, "an entry 'pupil'"),
    ],
)
def test_missing_loss_entries_are_refused(entries: Any, message: str) -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda p: p.step({**batch_of(LLAMA, rows=4), **entries}), loss=distilled)


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
def test_invalid_losses_are_refused(loss: Any, message: str) -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda pipeline: pipeline.step(tokens_of(LLAMA, rows=4)), loss=loss)


@pytest.mark.parametrize(
    ("options", "loss", "message"),
    [
        ({"context": 2, "sequence_length": 12}, distilled, "plan with --context 1"),
        ({"tensor": 2}, smoothed, "plan with --tensor 1"),
    ],
)
def test_loss_is_refused_where_its_inputs_are_sharded(options: Any, loss: Any, message: str) -> None:
    plan = plan_of(db.schedules["1f1b"](devices=2, micro_batches=4), LLAMA, **options)
    with pytest.raises(InputError, match=message):
        run_threads(plan, lambda _: None, loss=loss)
