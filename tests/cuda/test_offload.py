"""Activations leave and return on lagging lanes while compute overwrites their memory."""

from typing import Any

import pytest
import torch

from debubble.ir import Lane
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.units import MicroBatch
from tests.support.cuda_cases import lag
from tests.support.runtime_cases import inner_stage
from tests.support.tiny_models import LLAMA, MIXTRAL

ROWS, LENGTH = 2, 16


def offload(lanes: Any, stage: Any, ledger: Any, share: Any) -> None:
    """Run O and L like the interpreter, each on its lane after the mark of earlier work."""
    forward = lanes.mark()
    with lanes.lane(Lane.D2H, None):
        lanes.wait(forward, for_memory=False)
        lag(lanes.device)
        buffer = stage.offload(0, share, lanes.host.take)
        lanes.catch_up()
        with lanes.compute_stream():
            stage.release(0)
        mark = lanes.mark()
    scratch = [torch.full((1 << n,), float("nan"), device=lanes.device) for n in range(8, 18) for _ in range(4)]
    del scratch
    with lanes.lane(Lane.H2D, None):
        lanes.wait(mark, for_memory=False)
        lag(lanes.device)
        with lanes.compute_stream():
            stage.allocate_reload(0)
            allocated = lanes.mark()
        lanes.wait(allocated, for_memory=False)
        stage.reload(0, buffer)
        lanes.host.give_back(buffer)
        back = lanes.mark()
    with lanes.lane(Lane.D2H, None):  # size of the next tensor, which would be allocated where the retained rest was
        scratch = [torch.full((1 << n,), float("nan"), device=lanes.device) for n in range(8, 18) for _ in range(4)]
        del scratch
    lanes.wait(back, for_memory=False)


@pytest.mark.parametrize("share", [1.0, 0.3])
@pytest.mark.parametrize(
    ("config", "dtype"), [(LLAMA, torch.float64), (MIXTRAL, torch.float32)], ids=["dense", "mixture"]
)
def test_gradients_are_those_of_a_stage_that_keeps_everything(
    device: Any, dtype: Any, config: Any, share: float
) -> None:
    lanes = lanes_of(device)
    lanes.start_step()
    (plain, _), (moved, ledger) = (inner_stage(config, device=device, dtype=dtype) for _ in range(2))
    for stage in (plain, moved):  # warm-up: kernels are loaded, memory is allocated
        y = stage.forward(0, torch.randn(ROWS, LENGTH, 32, dtype=dtype, device=device), MicroBatch())
        stage.backward(0, torch.ones_like(y), split=False)
        for unit in stage.units:
            unit.zero_grad()
    x = torch.randn(ROWS, LENGTH, 32, dtype=dtype, device=device)
    gradient = torch.randn_like(x)
    plain.forward(0, x, MicroBatch())
    moved.forward(0, x, MicroBatch())
    saved_bytes = ledger.bytes
    offload(lanes, moved, ledger, share)
    assert (ledger.bytes, ledger.offloaded) == (saved_bytes, 0)
    assert ledger.offloaded_peak == round(share * saved_bytes)
    expected, actual = plain.backward(0, gradient, split=False), moved.backward(0, gradient, split=False)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(plain.units, moved.units, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-5)


def test_a_random_seed_on_the_host_is_no_activation() -> None:
    ledger = Ledger(torch.device("cuda"))
    seed = torch.zeros(1, dtype=torch.int64)
    saved = ledger.save(seed)
    assert isinstance(saved, torch.Tensor)
    assert saved.data_ptr() == seed.data_ptr()
    assert ledger.bytes == 0
