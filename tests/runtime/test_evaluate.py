"""Evaluation runs only a plan's forwards: it gives transformers' loss in evaluation mode and changes nothing."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import debubble as db
from debubble.ir import InputError, PlannedUnit, RunOptions
from debubble.plans import Plan
from debubble.runtime import Pipeline
from debubble.runtime.distributed.thread_transport import ThreadTransport
from debubble.runtime.distributed.transport import Transport
from tests.runtime.test_pipeline import ADAMW, host_stepped, schedule_1f1b
from tests.support.hf_reference import exactly, hf_model
from tests.support.runtime_cases import plan_of, rows_of, run_threads, tokens_of
from tests.support.tiny_models import FAMILIES, GPT2, LLAMA, LLAMA_TIED

DROPPING = {**GPT2, "attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3}


def batches_of(config: Any, *, rows: int, count: int = 2) -> list[dict[str, Tensor]]:
    """Batches with decreasing numbers of targets."""
    batches = []
    for number in range(count):
        tokens = tokens_of(config, rows=rows, seed=number)
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        targets[: number * rows // 2] = -100
        batches.append({"input_ids": inputs, "targets": targets})
    return batches


def reference(model: nn.Module, batches: list[dict[str, Tensor]]) -> float:
    """Mean loss over all targets, of the model in one process."""
    total, targets = 0.0, 0
    with exactly(), torch.no_grad():
        for batch in batches:
            logits = model(batch["input_ids"]).logits.flatten(0, 1)
            total += float(nn.functional.cross_entropy(logits, batch["targets"].flatten(), reduction="sum"))
            targets += int((batch["targets"] != -100).sum())
    return total / targets


def schedule(name: str, devices: int) -> Any:
    return db.schedules[name](devices=devices, micro_batches=4)


@pytest.mark.parametrize(("name", "devices"), [("zb-v", 2), ("pipeoffload", 4)])
def test_loss_matches_transformers_in_evaluation_mode(name: str, devices: int) -> None:
    model, batches = hf_model(DROPPING), batches_of(DROPPING, rows=4)
    plan = plan_of(schedule(name, devices), DROPPING)
    losses = run_threads(plan, lambda pipeline: float(pipeline.evaluate(batches)), model=model)
    assert losses == [pytest.approx(reference(model.eval(), batches), rel=1e-12)] * devices


@pytest.mark.parametrize("options", [{"data": 2, "zero": 2}, {"tensor": 2}])
def test_replicas_and_tensor_ranks_evaluate_all_batches(options: Any) -> None:
    model, batches = hf_model(LLAMA_TIED), batches_of(LLAMA_TIED, rows=8)
    plan = plan_of(schedule_1f1b(), LLAMA_TIED, **options)

    def evaluate(pipeline: Any) -> float:
        return float(pipeline.evaluate([rows_of(pipeline, batch) for batch in batches]))

    losses = run_threads(plan, evaluate, model=model, ranks=plan.ranks)
    assert losses == [pytest.approx(reference(model.eval(), batches), rel=1e-12)] * plan.ranks


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(schedule_1f1b(), LLAMA, dtype="bf16"),
        plan_of(host_stepped(schedule_1f1b()), LLAMA),
        plan_of(schedule_1f1b(), FAMILIES["mixtral"]),
    ],
    ids=["bf16", "host steps", "experts"],
)
@pytest.mark.parametrize("ahead", [False, True], ids=["updated", "pending"])
def test_evaluation_after_an_update_uses_new_parameters(plan: Plan, ahead: bool) -> None:
    tokens = tokens_of(plan.model, rows=4)

    def work(pipeline: Any) -> tuple[float, float]:
        if ahead:
            pipeline.post_validated_step(tokens, max_norm=0.1)
        else:
            pipeline.step(tokens)
            pipeline.optimizer_step(1.0)
        evaluated = float(pipeline.evaluate([tokens]))
        return evaluated, float(pipeline.step(tokens))

    for evaluated, stepped in run_threads(plan, work, optimizer=ADAMW):
        assert evaluated == pytest.approx(stepped, rel=1e-15 if plan.options.dtype == "fp64" else 1e-7)


def test_evaluation_does_not_change_training() -> None:
    """Neither dropout masks, accumulated gradients nor the measurements of the last step change."""
    plan, tokens = plan_of(schedule("zb-v", 2), DROPPING), tokens_of(DROPPING, rows=4)

    def train(pipeline: Any, *, evaluates: bool) -> Any:
        for _ in range(2):
            pipeline.step(tokens)
            measured = pipeline.measured
            before = measured.peak_activation, measured.peak_messages, measured.trace()
            if evaluates:
                pipeline.evaluate(batches_of(DROPPING, rows=4))
                assert before == (measured.peak_activation, measured.peak_messages, measured.trace())
        return {name: p.grad for name, p in pipeline.named_parameters()}, pipeline.steps_taken

    alone = run_threads(plan, partial(train, evaluates=False))
    for (gradients, steps), (expected, _) in zip(run_threads(plan, partial(train, evaluates=True)), alone, strict=True):
        assert steps == 2
        assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_evaluation_saves_nothing_for_a_backward() -> None:
    plan = plan_of(schedule_1f1b(), LLAMA)

    def work(pipeline: Any) -> tuple[int, int]:
        pipeline.evaluate(batches_of(LLAMA, rows=4))
        return pipeline.measured.peak_activation, pipeline.measured.in_flight_bytes

    assert run_threads(plan, work) == [(0, 0)] * 2


def test_training_mode_of_modules_is_restored() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Dropout(0.9), nn.Linear(8, 8), nn.Linear(8, 16)).double()
    model[1].eval()
    plan = Plan(
        planner="test", schedule=schedule_1f1b(), costs=db.StageCosts.of(stages=2), lower_bound=0,
        partition=tuple((PlannedUnit("dense", 2 * s), PlannedUnit("dense", 2 * s + 1)) for s in range(2)),
        options=RunOptions(dtype="fp64"),
    )  # fmt: skip
    tokens = torch.randint(16, (4, 6))

    def evaluate(transport: Transport) -> tuple[float, list[bool]]:
        copied = copy.deepcopy(model)
        loss = float(Pipeline(copied, plan, transport=transport).evaluate([tokens]))
        return loss, [module.training for module in copied]

    answers = ThreadTransport.run(2, evaluate)
    with torch.no_grad():
        logits = model[3](model[2](model[0](tokens[:, :-1]))).flatten(0, 1)
    expected = float(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))
    assert [loss for loss, _ in answers] == [pytest.approx(expected, rel=1e-12)] * 2
    assert [modes for _, modes in answers] == [[True, False, True, True]] * 2


def test_evaluation_without_batches_is_refused() -> None:
    with pytest.raises(InputError, match="no batch to evaluate"):
        run_threads(plan_of(schedule_1f1b(), LLAMA), lambda pipeline: pipeline.evaluate([]))
