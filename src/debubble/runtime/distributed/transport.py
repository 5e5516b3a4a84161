"""Transport of tensors between the ranks of a run: torch.distributed, or a single process.

`send` and `receive` block until the message is complete.  Every directed pair of ranks has its own channel, with a
thread at each end, so no message waits for another pair or for the compute lane.  Ranks have one process group per lane
with collectives, as lanes run concurrently and order their collectives differently on different ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from debubble.ir import Lane

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Channel(Enum):
    """Kinds of messages between a directed pair of ranks; only messages of one kind are ordered."""

    MESSAGE = "message"
    OFFLOAD = "offload"
    RELOAD = "reload"
    NORM = "norm"
    """A few numbers in host memory, never on the device."""
    OFFLOAD_TOKEN = "offload token"
    """A token in host memory: the link to the host is free for the receiver's next offload."""
    RELOAD_TOKEN = "reload token"
    """A token in host memory: the link to the host is free for the receiver's next reload."""
    UNITS = "units"
    """Parameters of units that move to another rank, with gradients and optimizer states."""
    RING = "ring"
    """Keys and values of ring attention between threads of one process; processes use a process group."""


_TOKENS = (Channel.OFFLOAD_TOKEN, Channel.RELOAD_TOKEN)
"""Channels that need not be opened: a plan that a run switches to may be the first to use them."""

_TAGS = {channel: tag for tag, channel in enumerate(Channel)}

Group = tuple[tuple[int, ...], Lane]
"""Ranks, and the lane of their collectives."""

_lane: ContextVar[Lane] = ContextVar("lane", default=Lane.COMPUTE)


def current_lane() -> Lane:
    """The lane whose process groups this thread's collectives use."""
    return _lane.get()


@contextmanager
def on_lane(lane: Lane) -> Iterator[None]:
    """Context in which this thread's collectives use the lane's process groups; by default the compute lane's."""
    token = _lane.set(lane)
    try:
        yield
    finally:
        _lane.reset(token)


class Transport:
    """Communication of one rank with the others; this base class implements a run of one rank."""

    rank: int
    size: int

    def open(self, channels: Sequence[tuple[int, int, Channel]], groups: Sequence[Group]) -> None:
        """Open channels (from, to, kind) and process groups.

        All ranks call it, with the same arguments.
        """

    def mesh(self, shape: Mapping[str, int]) -> DeviceMesh | None:
        """Torch's device mesh of all ranks in row-major order, with named dimensions; None without torch.distributed.

        The ranks of each dimension are one of the open `groups`.
        """
        return None

    def send(self, tensor: Tensor, to: int, channel: Channel) -> None:
        """Send the tensor to a rank, and return when the message is complete."""
        raise AssertionError("a single rank sends nothing")

    def begin_send(self, tensor: Tensor, to: int, channel: Channel) -> Callable[[], None] | None:
        """Begin to send the tensor; the result waits until the message is complete.  None: it is complete."""
        self.send(tensor, to, channel)
        return None

    def receive(self, buffer: Tensor, source: int, channel: Channel) -> Tensor:
        """Receive into the buffer, or return the tensor that arrived."""
        raise AssertionError("a single rank receives nothing")

    def begin_receive(self, buffer: Tensor, source: int, channel: Channel) -> Callable[[], Tensor]:
        """Begin to receive; the result waits and returns what `receive` does.  Waits are in the order of the calls."""
        return partial(self.receive, buffer, source, channel)

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum over these ranks, in place.  All of them call it, in the same order."""

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...], *, to: int) -> None:
        """Sum over these ranks into the tensor of rank `to`; the others' tensors are overwritten."""

    def broadcast(self, tensor: Tensor, ranks: tuple[int, ...], *, source: int) -> None:
        """Fill the tensor, in place, with that of one of these ranks."""

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """The tensors of these ranks, in order.  All of them call it, with tensors of one shape."""
        return [tensor] * len(ranks)

    def all_to_all(
        self, tensor: Tensor, ranks: tuple[int, ...], *, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Send `sent[i]` rows of a tensor to the i-th of these ranks, and return the `received[i]` rows from each.

        All of them call it, in the same order.
        """
        return tensor

    def rotate(self, tensor: Tensor, ranks: tuple[int, ...]) -> Callable[[], Tensor]:
        """Begin to send a tensor to the next of these ranks, in a ring.

        All of them call it, in the same order, and do not change the tensor.  The result waits for the tensor of the
        previous rank, which has the same shape.
        """
        return lambda: tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's (small) value, on every rank."""
        return [value] * self.size

    def gather_numbers(self, numbers: Sequence[float]) -> list[Sequence[float]]:
        """Every rank's numbers on every rank, equally many from each: faster than `gather`."""
        return self.gather(numbers)


class SingleProcessTransport(Transport):
    """A run of one rank."""

    rank, size = 0, 1


@dataclass(frozen=True)
class RankGroup:
    """A group of ranks, as seen by one of them.  All of them call its collectives in the same order."""

    transport: Transport
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def group_rank(self) -> int:
        """This rank's index in the group."""
        return self.ranks.index(self.transport.rank)

    def reduce_scatter(self, shards: Sequence[Tensor]) -> Tensor:
        """Sum `shards[i]` over the ranks onto rank i, and return this rank's; the shards are overwritten."""
        for shard, rank in zip(shards, self.ranks, strict=True):
            self.transport.reduce(shard, self.ranks, to=rank)
        return shards[self.group_rank]

    def rotate(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin to send a tensor to the next rank; the result waits for the previous rank's."""
        return self.transport.rotate(tensor, self.ranks)


class DistributedTransport(Transport):
    """torch.distributed: Gloo on CPU, NCCL on CUDA.  The default process group must be initialised.

    Over Gloo CUDA tensors pass through host memory, so several ranks can share a GPU, which NCCL does not allow.
    """

    def __init__(self) -> None:
        import torch.distributed as dist

        self._dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._channels: dict[tuple[int, int, Channel], Any] = {}
        self._groups: dict[Group, Any] = {}
        # Small control messages stay off the device.
        self._control = dist.new_group(backend="gloo") if self.size > 1 else None

    def open(self, channels: Sequence[tuple[int, int, Channel]], groups: Sequence[Group]) -> None:
        """Create the process groups of these channels and groups."""
        for channel in (channel for channel in channels if channel not in self._channels):
            # Gloo tells messages apart by tags, and every group adds polling; NCCL runs a group's messages in order.
            by_tag = self._dist.get_backend() == "gloo" or channel[2] is Channel.NORM
            self._channels[channel] = self._control if by_tag else self._dist.new_group(sorted(channel[:2]))
        for group in groups:
            if len(group[0]) > 1 and group not in self._groups:
                self._groups[group] = self._dist.new_group(list(group[0]))

    def mesh(self, shape: Mapping[str, int]) -> DeviceMesh:
        """Build torch's device mesh of all ranks from the open process groups."""
        from torch.distributed.device_mesh import DeviceMesh

        ranks = torch.arange(self.size).view(*shape.values())
        lines = [line for dim in range(len(shape)) for line in ranks.movedim(dim, -1).flatten(0, -2).tolist()]
        groups = [self._groups.get((tuple(line), Lane.COMPUTE)) or self._alone for line in lines if self.rank in line]
        device_type = "cuda" if self._dist.get_backend() == "nccl" else "cpu"
        return DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=tuple(shape))

    @cached_property
    def _alone(self) -> Any:
        return self._dist.new_group([self.rank], use_local_synchronization=True)

    def send(self, tensor: Tensor, to: int, channel: Channel) -> None:
        """Send the tensor, and return when the message is complete."""
        self.begin_send(tensor, to, channel)()

    def begin_send(self, tensor: Tensor, to: int, channel: Channel) -> Callable[[], None]:
        """Begin to send the tensor, through host memory where Gloo cannot read the device."""
        group = self._group_of(self.rank, to, channel)
        with self._reachable(tensor.contiguous(), received=False) as message:
            work = self._dist.isend(message, to, group=group, tag=_TAGS[channel])
        assert work is not None

        def wait() -> None:
            work.wait()

        return wait

    def receive(self, buffer: Tensor, source: int, channel: Channel) -> Tensor:
        """Fill the buffer with the next message of this source and channel, and return it."""
        with self._reachable(buffer, sent=False) as message:
            self.begin_receive(message, source, channel)()
        return buffer

    def begin_receive(self, buffer: Tensor, source: int, channel: Channel) -> Callable[[], Tensor]:
        """Begin to receive the next message of this source and channel, into a buffer that the backend can access."""
        group = self._group_of(source, self.rank, channel)
        work = self._dist.irecv(buffer, source, group=group, tag=_TAGS[channel])
        assert work is not None

        def wait() -> Tensor:
            work.wait()
            return buffer

        return wait

    def _group_of(self, source: int, to: int, channel: Channel) -> Any:
        return self._control if channel in _TOKENS else self._channels[source, to, channel]

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum over these ranks, in place."""
        if len(ranks) > 1:
            with self._reachable(tensor) as summed:
                self._dist.all_reduce(summed, group=self._groups[ranks, current_lane()])

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...], *, to: int) -> None:
        """Sum over these ranks into the tensor of rank `to`."""
        with self._reachable(tensor) as summed:
            self._dist.reduce(summed, to, group=self._groups[ranks, current_lane()])

    def broadcast(self, tensor: Tensor, ranks: tuple[int, ...], *, source: int) -> None:
        """Fill the tensor, in place, with that of rank `source`."""
        with self._reachable(tensor) as message:
            self._dist.broadcast(message, source, group=self._groups[ranks, current_lane()])

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """The tensors of these ranks, in order, through host memory where Gloo cannot read the device."""
        with self._reachable(tensor, received=False) as message:
            gathered = [torch.empty_like(message) for _ in ranks]
            self._dist.all_gather(gathered, message, group=self._groups[ranks, current_lane()])
        return [result.to(tensor.device) for result in gathered]

    def all_to_all(
        self, tensor: Tensor, ranks: tuple[int, ...], *, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Exchange rows with these ranks, through host memory where Gloo cannot read the device."""
        with self._reachable(tensor, received=False) as message:
            rows = message.new_empty((sum(received), *message.shape[1:]))
            self._dist.all_to_all_single(
                rows, message, list(received), list(sent), group=self._groups[ranks, current_lane()]
            )
        return rows.to(tensor.device)

    def rotate(self, tensor: Tensor, ranks: tuple[int, ...]) -> Callable[[], Tensor]:
        """Send to the next of these ranks and receive from the previous one, through the host where Gloo needs it."""
        dist, group = self._dist, self._groups[ranks, current_lane()]
        with self._reachable(tensor.contiguous(), received=False) as message:
            arriving = torch.empty_like(message)
        before, after = neighbours(self.rank, ranks)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, message, after, group), dist.P2POp(dist.irecv, arriving, before, group)]
        )

        def wait() -> Tensor:
            for work in works:
                work.wait()
            return arriving.to(tensor.device)

        return wait

    @contextmanager
    def _reachable(self, tensor: Tensor, *, sent: bool = True, received: bool = True) -> Iterator[Tensor]:
        """The tensor, or a host copy of it if Gloo cannot access the device, copied back afterwards if `received`."""
        if not tensor.is_cuda or self._dist.get_backend() != "gloo":
            yield tensor
            return
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        if sent:
            host.copy_(tensor)
        yield host
        if received:
            tensor.copy_(host)

    def gather(self, value: Any) -> list[Any]:
        """Collect every rank's picklable value on every rank, over Gloo."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        self._dist.all_gather_object(values, value, group=self._control)
        return values

    def gather_numbers(self, numbers: Sequence[float]) -> list[Sequence[float]]:
        """Collect every rank's numbers on every rank, in double precision, over Gloo."""
        if self.size == 1:
            return [numbers]
        local = torch.tensor(numbers, dtype=torch.float64)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        self._dist.all_gather(gathered, local, group=self._control)
        return [result.tolist() for result in gathered]


def neighbours(rank: int, ranks: tuple[int, ...]) -> tuple[int, int]:
    """The ranks before and after one of these, in a ring."""
    index = ranks.index(rank)
    return ranks[index - 1], ranks[(index + 1) % len(ranks)]
