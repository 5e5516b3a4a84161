"""Enforces the planned order of transfers on a link to the host that devices share, by tokens.

After a transfer a device sends a token to the device of the next transfer, which waits for it.  Tokens are messages
between hosts, so no GPU stream waits for another device.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from debubble.ir import Instruction, Kind, Op, Program
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes

_CHANNELS = {
    Kind.O: Channel.OFFLOAD_TOKEN,
    Kind.D: Channel.OFFLOAD_TOKEN,
    Kind.L: Channel.RELOAD_TOKEN,
    Kind.P: Channel.RELOAD_TOKEN,
}
"""The channel of the token that a transfer waits for; a lane receives the tokens of a channel in its own order."""


@dataclass
class LinkOrders:
    """Starts the transfers of a device in the order in which their shared link serves them."""

    program: Program
    device: int
    transport: Transport
    rank_of: Mapping[int, int]
    lanes: CpuLanes | CudaLanes
    _sends: deque[Callable[[], None]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        pairs = [*_handoffs(self.program)]
        self._before = {then: first for first, then in pairs if self._device_of(then) == self.device}
        self._after = {first: then for first, then in pairs if self._device_of(first) == self.device}

    def previous(self, op: Op) -> Instruction | None:
        """The transfer of another device that the link serves right before this one; None if there is none."""
        before = self._before.get(op)
        return None if before is None else self.program.instructions[self.program.index[before]]

    def take_token(self, op: Op, previous: Instruction) -> None:
        """Wait until the previous transfer has ended."""
        self.transport.receive(_token(), self.rank_of[previous.device], _CHANNELS[op.kind])

    def pass_token(self, op: Op) -> None:
        """Wait until this transfer has ended, and begin to send a token to the device of the next one, if any."""
        after = self._after.get(op)
        if after is None:
            return
        self.lanes.catch_up()
        wait = self.transport.begin_send(_token(), self.rank_of[self._device_of(after)], _CHANNELS[after.kind])
        if wait is not None:
            self._sends.append(wait)

    def finish_sends(self) -> None:
        """Wait until all tokens of a step are sent."""
        while self._sends:
            self._sends.popleft()()

    def _device_of(self, op: Op) -> int:
        return self.program.schedule.placement.device_of[op.stage]


def _handoffs(program: Program) -> Iterator[tuple[Op, Op]]:
    """Consecutive transfers of different devices on a link."""
    device_of = program.schedule.placement.device_of
    for link in program.schedule.link_orders:
        for first, then in itertools.pairwise(link):
            if device_of[first.stage] != device_of[then.stage]:
                yield first, then


def _token() -> torch.Tensor:
    return torch.zeros(1, dtype=torch.uint8)
