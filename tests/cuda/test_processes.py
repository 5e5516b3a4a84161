"""Ranks in processes over Gloo with tensors on one device: Gloo copies them through host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from debubble.plans import Plan
from debubble.runtime import Pipeline
from tests.support.cuda_cases import assert_same, on_gpu
from tests.support.gloo_ranks import spawn
from tests.support.runtime_cases import plan_of, reference_gradients, tokens_of
from tests.support.schedule_cases import schedule_of
from tests.support.tiny_models import LLAMA, LLAMA_TIED


def one_step(rank: Any, folder: Any, path: Any, tokens: Any, device: Any) -> None:
    """Save the loss and gradients of this rank."""
    pipeline = Pipeline(None, Plan.load(path), device=torch.device(device))
    loss = pipeline.step(tokens.chunk(pipeline.plan.options.data)[pipeline.ranks.replica])
    gradients = {name: p.grad.cpu() for name, p in pipeline.named_parameters() if p.grad is not None}
    torch.save((loss.cpu(), gradients), folder / f"rank{rank}.pt")


@pytest.mark.parametrize(
    ("name", "devices", "data"),
    [
        ("1f1b", 2, 1),
        pytest.param("1f1b", 2, 2, marks=pytest.mark.cuda),
        pytest.param("zb-v", 4, 1, marks=pytest.mark.cuda),
    ],
)
def test_step_has_the_gradients_of_one_process(device: Any, name: str, devices: int, data: int, tmp_path: Path) -> None:
    plan = plan_of(schedule_of(name, devices=devices, micro_batches=2 * devices), LLAMA_TIED, data=data)
    plan.save(tmp_path / "plan.json")
    tokens = tokens_of(LLAMA_TIED, rows=2 * devices * data)
    folder = spawn(devices * data, one_step, tmp_path / "plan.json", tokens, str(device))
    answers = [torch.load(folder / f"rank{rank}.pt") for rank in range(devices * data)]
    actual = answers[0][0], {n: g for _, gradients in answers[:devices] for n, g in gradients.items()}
    expected = reference_gradients(LLAMA_TIED, tokens, device=device, micro_batches=plan.micro_batches * data)
    assert_same(actual, expected, tolerance=1e-11)


def train(rank: Any, folder: Any, path: Any, tokens: Any, device: Any) -> None:
    """Save the losses of three steps and the parameters after them."""
    pipeline = Pipeline(None, Plan.load(path), device=torch.device(device))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    rows = tokens.chunk(pipeline.plan.options.data)[pipeline.ranks.replica]
    losses = []
    for _ in range(3):
        losses.append(pipeline.step(rows).cpu())
        optimizer.step()
        optimizer.zero_grad()
    torch.save((losses, {n: p.cpu() for n, p in pipeline.state_dict().items()}), folder / f"rank{rank}.pt")


@pytest.mark.parametrize("options", [on_gpu({"data": 2, "zero": 2}), {"tensor": 2}, on_gpu({"context": 2})], ids=str)
def test_ranks_that_communicate_in_backward_match_one_process(device: Any, options: Any, tmp_path: Path) -> None:
    schedule, tokens = schedule_of("1f1b", devices=1, micro_batches=2), tokens_of(LLAMA, rows=4)
    answers = []
    for name, options_of_run in {"divided": options, "alone": {}}.items():
        plan_of(schedule, LLAMA, **options_of_run).save(tmp_path / name)
        folder = spawn(2 if options_of_run else 1, train, tmp_path / name, tokens, str(device))
        answers.append(torch.load(folder / "rank0.pt"))
    (losses, parameters), (expected_losses, expected) = answers
    torch.testing.assert_close(losses, expected_losses, rtol=1e-6, atol=0)
    assert parameters.keys() == expected.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-11)
