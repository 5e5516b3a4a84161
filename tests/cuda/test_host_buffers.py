"""Offload buffers have their exact size and are reused only after pending copies."""

from typing import Any

import pytest
import torch

from debubble.ir import Lane
from debubble.runtime.execution.lanes import lanes_of
from debubble.runtime.memory.host import PinnedMemory
from tests.support.cuda_cases import lag

SIZE = (1 << 20) + 12345


def test_buffer_holds_what_was_copied_to_it(device: Any) -> None:
    lanes = lanes_of(device)
    content = torch.randint(0, 256, (SIZE,), dtype=torch.uint8, device=device)
    buffer, back = lanes.host.take(SIZE), torch.empty_like(content)
    buffer.copy_(content, non_blocking=True)
    back.copy_(buffer, non_blocking=True)
    lanes.host.give_back(buffer)
    assert buffer.device.type == "cpu"
    assert len(buffer) == SIZE
    assert torch.equal(content, back)


def test_a_buffer_that_came_back_is_read_before_it_is_written(device: Any) -> None:
    """The reload lags on its stream; the next offload takes the same buffer on another one."""
    lanes = lanes_of(device)
    first, second = (torch.full((SIZE,), value, dtype=torch.uint8, device=device) for value in (1, 2))
    back = torch.zeros_like(first)
    buffer = lanes.host.take(SIZE)
    buffer.copy_(first)
    with lanes.lane(Lane.H2D, None):
        lag(device)
        back.copy_(buffer, non_blocking=True)
        lanes.host.give_back(buffer)
    with lanes.lane(Lane.D2H, None):
        reused = lanes.host.take(SIZE)
        reused.copy_(second, non_blocking=True)
    lanes.end_step()
    assert back.eq(1).all()
    lanes.catch_up()
    assert reused.eq(2).all()


@pytest.mark.cuda
def test_pinned_buffers_keep_their_size_and_are_reused(gpu: Any) -> None:
    host = lanes_of(gpu).host
    assert isinstance(host, PinnedMemory)
    first, other = host.take(SIZE), host.take(2 * SIZE)
    assert first.is_pinned()
    assert other.is_pinned()
    address = first.data_ptr()
    host.give_back(first)
    assert host.take(SIZE).data_ptr() == address
    assert host.bytes == 3 * SIZE


@pytest.mark.cuda
def test_a_copy_to_a_pinned_buffer_does_not_hold_up_the_host(gpu: Any) -> None:
    lanes = lanes_of(gpu)
    content, buffer = torch.empty(SIZE, dtype=torch.uint8, device=gpu), lanes.host.take(SIZE)
    with lanes.lane(Lane.D2H, None):
        lag(gpu)
        buffer.copy_(content, non_blocking=True)
        mark = lanes.mark()
    assert not mark.event.query()
