"""Ranks in processes over Gloo whose tensors are on one device: Gloo carries them through the host's memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from debubble.ir import Plan
from debubble.runtime import Pipeline
from tests.support.cuda_cases import assert_same
from tests.support.gloo_ranks import spawn
from tests.support.runtime_cases import LLAMA_TIED, plan_of, reference_gradients, tokens_of
from tests.support.schedule_cases import schedule_of


def one_step(rank: Any, folder: Any, path: Any, tokens: Any, device: Any) -> None:
    """Loss and gradients of this rank, saved."""
    pipeline = Pipeline(None, Plan.load(path), device=torch.device(device))
    loss = pipeline.step(tokens.chunk(pipeline.plan.options.data)[pipeline.ranks.replica])
    gradients = {name: p.grad.cpu() for name, p in pipeline.named_parameters() if p.grad is not None}
    torch.save((loss.cpu(), gradients), folder / f"rank{rank}.pt")


@pytest.mark.parametrize(("name", "devices", "data"), [("1f1b", 2, 1), ("zb-v", 4, 1), ("1f1b", 2, 2)])
def test_a_step_has_the_gradients_of_one_process(
    device: Any, name: str, devices: int, data: int, tmp_path: Path
) -> None:
    plan = plan_of(schedule_of(name, devices=devices, micro_batches=2 * devices), LLAMA_TIED, data=data)
    plan.save(tmp_path / "plan.json")
    tokens = tokens_of(LLAMA_TIED, rows=2 * devices * data)
    folder = spawn(devices * data, one_step, tmp_path / "plan.json", tokens, str(device))
    told = [torch.load(folder / f"rank{rank}.pt") for rank in range(devices * data)]
    found = told[0][0], {n: g for _, gradients in told[:devices] for n, g in gradients.items()}
    expected = reference_gradients(LLAMA_TIED, tokens, device=device, micro_batches=plan.micro_batches * data)
    assert_same(found, expected, tolerance=1e-11)
