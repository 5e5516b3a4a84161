"""Full bf16 training keeps weights, gradients and moments in 16 bits without fp32 copies."""

from typing import Any

import pytest
import torch

import debubble as db
from debubble.costs import MEGATRON
from debubble.costs.step import parameter_bytes
from debubble.ir import InputError
from tests.runtime.test_pipeline import ADAMW, device_stepped, host_stepped, schedule_1f1b
from tests.support.reference_model import ReferenceModel
from tests.support.runtime_cases import losses_alone, plan_of, rows_of, run_threads, tokens_of
from tests.support.tiny_models import LLAMA

STEPS, ROWS = 3, 4
GATHERED = db.StageCosts.of(stages=2, gathered=1, static=1)


def plan_for(schedule: Any = None, **options: Any) -> Any:
    return plan_of(schedule or schedule_1f1b(), LLAMA, dtype="bf16", master_dtype="bf16", **options)


def losses_of(pipeline: Any) -> list[float]:
    losses = []
    for step in range(STEPS):
        losses.append(float(pipeline.step(rows_of(pipeline, tokens_of(LLAMA, rows=ROWS, seed=step)))))
        pipeline.optimizer_step(None)
    return losses


@pytest.fixture(scope="module")
def torch_losses() -> list[float]:
    """The losses of torch's AdamW on a model in bf16, in one process."""
    model = ReferenceModel(LLAMA, dtype=torch.bfloat16)
    batches = [tokens_of(LLAMA, rows=ROWS, seed=step) for step in range(STEPS)]
    return losses_alone(lambda tokens: model(tokens).float(), ADAMW(model.parameters()), batches)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"data": 2, "zero": 1, "schedule": db.schedules["1f1b"](devices=2, micro_batches=2)},
        {"data": 2, "zero": 3, "schedule": db.schedules["1f1b"](devices=2, micro_batches=2), "costs": GATHERED},
        {"schedule": device_stepped(schedule_1f1b())},
        {"schedule": host_stepped(schedule_1f1b())},
    ],
    ids=["whole", "ZeRO-1", "ZeRO-3", "stepped inside", "stepped on hosts"],
)
def test_losses_are_those_of_torch_in_bf16(options: Any, torch_losses: list[float]) -> None:
    losses = run_threads(plan_for(**options), losses_of, optimizer=ADAMW)[0]
    # bf16 has an 8-bit significand, and micro-batches are rounded separately.
    assert losses == pytest.approx(torch_losses, rel=2e-2)


def test_bytes_per_parameter_match_the_plan() -> None:
    plan = plan_for()

    def bytes_per_parameter(pipeline: Any) -> set[float]:
        losses_of(pipeline)
        pipeline.step(rows_of(pipeline, tokens_of(LLAMA, rows=ROWS)))
        working = {p for s in pipeline.stages.values() for u in s.units for p in u.parameters()}
        assert {p.dtype for p in working} == {torch.bfloat16}
        states = [t for o in pipeline.optimizers for state in o.state.values() for t in state.values() if t.dim()]
        tensors = [*working, *pipeline.parameters(), *(p.grad for p in pipeline.parameters()), *states]
        storages = {t.data_ptr(): t.nbytes for t in tensors}
        return {sum(storages.values()) / sum(p.numel() for p in working)}

    counted = parameter_bytes(plan.options, shards=1, framework=MEGATRON).total
    assert run_threads(plan, bytes_per_parameter, optimizer=ADAMW) == [{counted}, {counted}] == [{8.0}, {8.0}]


def test_averages_of_weights_in_16_bits_are_refused() -> None:
    with pytest.raises(InputError, match="An average of weights in bf16 rounds away what a step adds"):
        run_threads(plan_for(), lambda _: None, optimizer=ADAMW, ema_decay=0.9)


def test_masters_in_bf16_need_computing_in_16_bits() -> None:
    with pytest.raises(InputError, match="--dtype fp32 computes in fp32: leave one of them out"):
        parameter_bytes(db.ir.RunOptions(dtype="fp32", master_dtype="bf16"), shards=1, framework=MEGATRON)
