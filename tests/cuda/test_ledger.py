"""The ledger compared with torch's allocator, which counts requested bytes (`requested_bytes`) and allocated bytes.

It allocates multiples of 512 bytes, so `memory_allocated` exceeds the requested bytes by less than 512 bytes per
tensor, if no tensor is larger than a megabyte: larger ones may get a full cached block.
"""

from typing import Any

import pytest
import torch

from debubble.runtime.models.stage import SavePolicy
from debubble.runtime.models.units import MicroBatch
from tests.support.runtime_cases import inner_stage
from tests.support.tiny_models import GPT2, LLAMA, MIXTRAL

pytestmark = pytest.mark.cuda
ROWS, LENGTH, HIDDEN = 2, 16, 32


def counted() -> Any:
    """Requested bytes, allocated bytes and number of tensors, after all streams are idle."""
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator checks the streams on its next call
    stats = torch.cuda.memory_stats()
    return [stats[f"{counter}.all.current"] for counter in ("requested_bytes", "allocated_bytes", "allocation")]


@pytest.mark.parametrize("strategy", ["none", "norm", "full"])
@pytest.mark.parametrize("config", [LLAMA, GPT2, MIXTRAL], ids=["llama", "gpt2", "mixtral"])
def test_ledger_matches_the_allocators_requested_bytes(gpu: Any, config: Any, strategy: str) -> None:
    stage, ledger = inner_stage(config, strategy, device=gpu, dtype=torch.float32)

    def forward() -> Any:
        x = torch.randn(ROWS, LENGTH, HIDDEN, device=gpu)
        return stage.forward(0, x, MicroBatch(), SavePolicy(recomputing=99))

    y = forward()
    stage.backward(0, torch.ones_like(y), split=False)  # kernels, workspaces and gradients exist
    del y
    before = counted()
    y = forward()
    asked, allocated, tensors = (now - then for now, then in zip(counted(), before, strict=True))
    assert asked == ledger.bytes + y.nbytes
    assert 0 <= allocated - asked < 512 * tensors
    stage.backward(0, torch.ones_like(y), split=False)
    del y
    assert ledger.bytes == 0
    assert counted() == before


@pytest.mark.parametrize("share", [1.0, 0.4])
def test_offload_returns_bytes_and_reload_takes_them(gpu: Any, share: float) -> None:
    stage, ledger = inner_stage(LLAMA, device=gpu, dtype=torch.float32)
    pinned: dict[Any, Any] = {}

    def take(size: Any) -> Any:
        return pinned.setdefault(size, torch.empty(size, dtype=torch.uint8, pin_memory=True))

    for _ in range(2):
        before = counted()
        y = stage.forward(0, torch.randn(ROWS, LENGTH, HIDDEN, device=gpu), MicroBatch())
        saved_bytes, requested = ledger.bytes, counted()[0]
        buffer = stage.offload(0, share, take)
        stage.release(0)
        assert requested - counted()[0] == len(buffer) == round(share * saved_bytes)
        stage.reload(0, buffer)
        assert counted()[0] == requested
        stage.backward(0, torch.ones_like(y), split=False)
        del y
    assert counted() == before
