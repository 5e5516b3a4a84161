"""Moving averages of sharded weights match torch's AveragedModel in one process."""

from typing import Any

import pytest
import torch
from torch.optim import swa_utils

import debubble as db
from debubble.ir import InputError
from debubble.runtime import Pipeline
from debubble.runtime.models.units import MicroBatch
from tests.runtime.test_pipeline import ADAMW, device_stepped, host_stepped, schedule_1f1b
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import plan_of, rows_of, run_threads, tokens_of, train
from tests.support.tiny_models import LLAMA

DECAY, STEPS, ROWS = 0.7, 4, 4
GATHERED = db.StageCosts.of(stages=2, gathered=1, static=1)


def plan_for(**options: Any) -> Any:
    schedule = db.schedules["1f1b"](devices=2, micro_batches=4 // options.get("data", 1))
    return plan_of(schedule, LLAMA, costs=GATHERED if options.get("zero") == 3 else None, **options)


def loss_of(model: Any, tokens: Any) -> Any:
    targets = tokens[:, 1:].contiguous()
    micro_batch = MicroBatch(targets=targets, scale=1 / targets.numel())
    return model(tokens[:, :-1].contiguous(), micro_batch)


@pytest.fixture(scope="module")
def averaged_model() -> Any:
    """Averages of one process after all steps."""
    model = ReferenceModel(LLAMA, dtype=torch.float64)
    optimizer = ADAMW(list(model.parameters()))
    averages = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(DECAY))
    for step in range(STEPS):
        loss_of(model, tokens_of(LLAMA, rows=ROWS, seed=step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update_parameters(model)
    return averages.module


def take_steps(pipeline: Any) -> None:
    train(pipeline, [tokens_of(LLAMA, rows=ROWS, seed=step) for step in range(STEPS)])


def take_steps_ahead(pipeline: Any) -> None:
    for step in range(STEPS):
        pipeline.post_validated_step(rows_of(pipeline, tokens_of(LLAMA, rows=ROWS, seed=step)))


@pytest.mark.parametrize(
    ("plan", "take"),
    [
        (plan_for(data=2, zero=3), take_steps),
        (plan_for(tensor=2), take_steps),
        (plan_for(data=2, zero=1), take_steps_ahead),
        (plan_of(host_stepped(schedule_1f1b()), LLAMA), take_steps_ahead),
        (plan_of(device_stepped(schedule_1f1b()), LLAMA), take_steps_ahead),
    ],
    ids=["zero-3", "tensor", "ahead", "host ahead", "device ahead"],
)
def test_averages_match_a_single_process(averaged_model: Any, plan: Any, take: Any) -> None:
    tokens = tokens_of(LLAMA, rows=plan.micro_batches, seed=9)

    def one(pipeline: Any) -> Any:
        take(pipeline)
        before = {name: p.clone() for name, p in pipeline.state_dict().items()}
        with pipeline.averaged():
            averages = {name: p.clone() for name, p in pipeline.state_dict().items()}
            loss = pipeline.evaluate([tokens])
        for name, parameter in pipeline.state_dict().items():
            assert torch.equal(parameter, before[name]), name
        return averages, loss

    answers = run_threads(plan, one, optimizer=ADAMW, ema_decay=DECAY)
    actual = {name: p for averages, _ in answers for name, p in averages.items()}
    for name, expected in averaged_model.hf_parameters().items():
        torch.testing.assert_close(actual[name], expected.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(answers[0][1], loss_of(averaged_model, tokens).detach(), rtol=1e-9, atol=0)


def test_skipped_step_does_not_change_averages() -> None:
    def one(pipeline: Any) -> Any:
        take_steps(pipeline)
        old = [pipeline.averages.get(p).clone() for p in pipeline.parameters()]
        for parameter in pipeline.parameters():
            parameter.grad = torch.full_like(parameter, float("nan"))
        pipeline.optimizer_step(max_norm=1.0)
        return all(torch.equal(pipeline.averages.get(p), a) for p, a in zip(pipeline.parameters(), old, strict=True))

    assert all(run_threads(plan_for(), one, optimizer=ADAMW, ema_decay=DECAY))


def test_averages_count_as_static_memory() -> None:
    def one(pipeline: Any) -> Any:
        take_steps(pipeline)
        return pipeline.measured.static_bytes

    plain = run_threads(plan_for(), one, optimizer=ADAMW)
    averaged = run_threads(plan_for(), one, optimizer=ADAMW, ema_decay=DECAY)
    sizes = run_threads(plan_for(), lambda pipeline: sum(p.nbytes for p in pipeline.parameters()))
    assert [a - b for a, b in zip(averaged, plain, strict=True)] == sizes


def test_averages_require_the_pipelines_optimizer() -> None:
    with pytest.raises(InputError, match="Averages of the weights follow `optimizer_step`"):
        run_threads(plan_for(), lambda _: None, ema_decay=DECAY)


def test_averaged_needs_averages() -> None:
    def one(pipeline: Pipeline) -> None:
        with pipeline.averaged():
            pass

    with pytest.raises(InputError, match="There are no averages of the weights"):
        run_threads(plan_for(), one, optimizer=ADAMW)
