"""Device memory that a profile measures besides units."""

from __future__ import annotations

import pytest
import torch

from debubble.profiler.device_memory import WorkspaceMeter, context_bytes


def test_workspace_is_what_an_operation_frees(device: torch.device) -> None:
    meter = WorkspaceMeter(device)
    with meter.operation():
        retained, temporary = (torch.empty(2**20, dtype=torch.uint8, device=device) for _ in range(2))
        del temporary
    assert len(retained) == 2**20
    assert meter.peak == (2**20 if device.type == "cuda" else 0)


@pytest.mark.cuda
def test_context_memory_is_measured() -> None:
    assert context_bytes(torch.device("cuda", 0)) > 0
