"""Offload to files gives the same gradients, writes the expected bytes and leaves no files."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from debubble.ir import Placement, Schedule, StageCosts
from debubble.runtime.memory.host import DiskMemory, OffloadError
from tests.support.runtime_cases import plan_of, run_threads, tokens_of
from tests.support.tiny_models import LLAMA

SCHEDULE = Schedule.of(
    "offload", Placement.linear(1), 3, [["0F0", "0O0", "0F1", "0O1", "0F2", "0B2", "0L1", "0B1", "0L0", "0B0"]]
)
PLAN = plan_of(SCHEDULE, LLAMA, costs=StageCosts.of(stages=1, offload=1))


def two_steps(pipeline: Any) -> Any:
    """Gradients of two steps, which reuse buffers, and the peak of offloaded bytes."""
    for _ in range(2):
        pipeline.step(tokens_of(LLAMA, rows=3))
    gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    return gradients, pipeline.measured.peak_offloaded


def test_gradients_are_the_same_from_files_as_from_memory(tmp_path: Path) -> None:
    ((expected, moved),) = run_threads(PLAN, two_steps)
    ((gradients, filed),) = run_threads(PLAN, two_steps, offload_to=tmp_path)
    assert filed == moved > 0
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


def test_buffer_keeps_its_content_and_is_reused(tmp_path: Path) -> None:
    files = DiskMemory(tmp_path)
    first, second = files.take(10_000), files.take(10_000)
    first.fill_(7)
    second.fill_(9)
    assert first.eq(7).all()
    files.give_back(first)
    assert files.take(10_000).data_ptr() == first.data_ptr()
    larger = files.take(20_000)
    assert larger.numel() == 20_000
    assert files.bytes == 40_000


def test_new_sizes_reuse_existing_buffers(tmp_path: Path) -> None:
    """Uneven routing gives such sizes: the file grows with the largest size, not with every new one."""
    files = DiskMemory(tmp_path)
    for size in (10_000, 9_000, 7_001, 9_999):
        buffer = files.take(size)
        assert buffer.numel() == size
        files.give_back(buffer)
    assert files.bytes == 10_000


@pytest.mark.slow
def test_killed_process_leaves_no_files(tmp_path: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from debubble.runtime.memory.host import DiskMemory\n"
        f"DiskMemory(Path({str(tmp_path)!r})).take(1 << 20).fill_(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_full_disk_raises_one_sentence(small_disk: Any) -> None:
    files = DiskMemory(small_disk)
    buffer = files.take(700_000)
    with pytest.raises(OffloadError, match="cannot hold another 500000 of activations next to 700000: No space left"):
        files.take(500_000)
    assert buffer.numel() == 700_000
