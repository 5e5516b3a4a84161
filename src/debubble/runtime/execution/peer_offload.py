"""Offload to a peer device instead of the host.

Both ends know the order from the Program, so there are no requests: the peer (`host`) receives buffers in the order of
the owner's offloads, and sends them back in the order of its reloads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from debubble.ir import Kind, Lane, Op, Program
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.runtime.execution.lanes import CpuLanes, CudaLanes
from debubble.runtime.memory.streams import StreamHandoff


@dataclass
class PeerOffload:
    """Sends a device's offloads to its peer, and serves devices that offload to this one."""

    program: Program
    device: int
    transport: Transport
    rank_of: Mapping[int, int]
    lanes: CpuLanes | CudaLanes

    def __post_init__(self) -> None:
        self.host = self.program.schedule.peers.get(self.device)
        """The peer that stores this device's offloads; None: they go to host memory."""
        self._sizes: dict[tuple[int, int], int] = {}

    @property
    def owners(self) -> list[int]:
        """The devices that offload to this one."""
        return [owner for owner, host in self.program.schedule.peers.items() if host == self.device]

    def service_loops(self, begin: HostingEvent, end: HostingEvent) -> list[Callable[[], None]]:
        """Functions, to be run on a thread each, that receive and return the buffers of a step's peer offloads.

        Args:
            begin: Called with an offload and its bytes before its buffer is allocated.
            end: Called with a reload and its bytes after its buffer has been returned.
        """
        loops: list[Callable[[], None]] = []
        for owner in self.owners:
            buffers: _Buffers = {_key(op): Future() for op in self._transfers(owner, Lane.D2H, Kind.O)}
            loops += [
                partial(self._receive_offloads, owner, buffers, begin),
                partial(self._return_reloads, owner, buffers, end),
            ]
        return loops

    def buffer(self, size: int) -> Tensor:
        """Allocate a buffer of `size` bytes on the device."""
        return torch.empty(size, dtype=torch.uint8, device=self.lanes.device)

    def send(self, op: Op, buffer: Tensor) -> None:
        """O: send the size, then the buffer, to the peer."""
        assert self.host is not None
        self._sizes[_key(op)] = len(buffer)
        to = self.rank_of[self.host]
        self.transport.send(torch.tensor([len(buffer)], device=self.lanes.device), to, Channel.OFFLOAD)
        self.transport.send(buffer, to, Channel.OFFLOAD)

    def fetch(self, op: Op) -> Tensor:
        """L: receive the buffer back from the peer."""
        assert self.host is not None
        buffer = self.buffer(self._sizes.pop(_key(op)))
        return self.transport.receive(buffer, self.rank_of[self.host], Channel.RELOAD)

    def _receive_offloads(self, owner: int, buffers: _Buffers, begin: HostingEvent) -> None:
        source = self.rank_of[owner]
        for op in self._transfers(owner, Lane.D2H, Kind.O):
            message = torch.zeros(1, dtype=torch.int64, device=self.lanes.device)
            size = int(self.transport.receive(message, source, Channel.OFFLOAD).item())
            begin(op, size)
            content = self.transport.receive(self.buffer(size), source, Channel.OFFLOAD)
            buffers[_key(op)].set_result(StreamHandoff.from_current_stream(content))

    def _return_reloads(self, owner: int, buffers: _Buffers, end: HostingEvent) -> None:
        for op in self._transfers(owner, Lane.H2D, Kind.L):
            content = buffers[_key(op)].result().receive()
            del buffers[_key(op)]
            self.transport.send(content, self.rank_of[owner], Channel.RELOAD)
            end(op, len(content))

    def _transfers(self, owner: int, lane: Lane, kind: Kind) -> list[Op]:
        queues = (q for q in self.program.queues_of[owner] if q.lane is lane)
        ops = (self.program.instructions[i].op for queue in queues for i in queue.instructions)
        return [op for op in ops if op.kind is kind]


HostingEvent = Callable[[Op, int], None]
"""Called with an operation and the bytes that this device begins or ceases to store for a peer."""

_Buffers = dict[tuple[int, int], Future[StreamHandoff]]
"""Buffers that this device stores for a peer, by stage and micro-batch."""


def _key(op: Op) -> tuple[int, int]:
    return op.stage, op.micro_batch


def message_channels(program: Program) -> list[tuple[int, int, Channel]]:
    """The channels between devices that a program uses, in the same order on every rank."""
    channels = {
        (i.device, i.peer, Channel.MESSAGE)
        for i in program.instructions
        if i.op.kind in (Kind.SEND_F, Kind.SEND_B) and i.peer is not None
    }
    for owner, host in program.schedule.peers.items():
        channels |= {(owner, host, Channel.OFFLOAD), (host, owner, Channel.RELOAD)}
    return sorted(channels, key=lambda channel: (channel[0], channel[1], channel[2].value))
