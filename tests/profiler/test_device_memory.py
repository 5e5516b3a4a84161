"""Memory of a device that a profile measures besides its units, with a fake allocator."""

from __future__ import annotations

import pytest
import torch

from debubble.profiler.device_memory import WorkspaceMeter, context_bytes

GPU = torch.device("cuda", 0)


def allocates(monkeypatch: pytest.MonkeyPatch, *, before: int, peak: int, after: int) -> None:
    """Let the allocator report these bytes before an operation, at its peak and after it."""
    allocated = iter([before, after])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)


def test_a_workspace_exceeds_the_bytes_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = WorkspaceMeter(GPU)
    for before, peak, after in ((100, 170, 150), (150, 180, 100), (100, 100, 100)):
        allocates(monkeypatch, before=before, peak=peak, after=after)
        with meter.operation():
            pass
    assert meter.peak == 30


def test_there_is_no_workspace_to_measure_on_a_cpu() -> None:
    meter = WorkspaceMeter(torch.device("cpu"))
    with meter.operation():
        pass
    assert meter.peak == 0


def test_the_context_is_the_memory_outside_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 180)
    assert context_bytes(GPU) == 120
