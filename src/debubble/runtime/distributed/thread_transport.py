"""Transport between ranks that are threads of one process, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from debubble.ir import DebubbleError, InputError
from debubble.runtime.distributed.transport import Channel, Group, Transport, current_lane, neighbours
from debubble.runtime.memory.streams import StreamHandoff
from debubble.runtime.torch_internals import runs_in_backward


class ThreadTransport(Transport):
    """The ranks of one process, each on a thread: for tests, and for running a plan without a launcher.

    `ThreadTransport.run(n, work)` calls `work(transport)` for every rank and returns the results.

    On a GPU, torch runs all backwards of a process in one thread: ranks with collectives in the backward (tensor
    parallelism, ZeRO-2, ring attention) must be processes there.
    """

    def __init__(self, hub: _ThreadHub, rank: int) -> None:
        self._hub, self.rank, self.size = hub, rank, hub.size

    def send(self, tensor: Tensor, to: int, channel: Channel) -> None:
        """Put the tensor, not a copy, into the receiver's mailbox, and return at once."""
        self._hub.mail[self.rank, to, channel].put(StreamHandoff.from_current_stream(tensor.detach()))

    def receive(self, buffer: Tensor, source: int, channel: Channel) -> Tensor:
        """Take the next tensor from the mailbox and return it; `buffer` is not written.

        Raises PeerError if the source has failed.
        """
        sent = self._hub.mail[source, self.rank, channel].get()
        if sent is None:
            raise PeerError(source)
        tensor = sent.receive()
        assert tensor.shape == buffer.shape
        assert tensor.dtype == buffer.dtype
        return tensor

    def all_reduce(self, tensor: Tensor, ranks: tuple[int, ...]) -> None:
        """Sum over these ranks, in place.  Raises PeerError if a rank has failed."""
        tensor.copy_(torch.stack(self.all_gather(tensor, ranks)).sum(0))

    def reduce(self, tensor: Tensor, ranks: tuple[int, ...], *, to: int) -> None:
        """Sum over these ranks into the tensor of rank `to`.  Raises PeerError if a rank has failed."""
        values = self.all_gather(tensor, ranks)
        if self.rank == to:
            tensor.copy_(torch.stack(values).sum(0))

    def broadcast(self, tensor: Tensor, ranks: tuple[int, ...], *, source: int) -> None:
        """Fill the tensor with that of rank `source`.  Raises PeerError if a rank has failed."""
        tensor.copy_(self.all_gather(tensor, ranks)[ranks.index(source)])

    def all_gather(self, tensor: Tensor, ranks: tuple[int, ...]) -> list[Tensor]:
        """Collect the tensors of these ranks on each of them.  Raises PeerError if a rank has failed."""
        _check_can_wait(tensor)
        handoff = StreamHandoff.from_current_stream(tensor.clone())
        return [sent.receive() for sent in self._hub.exchange(ranks, self.rank, handoff)]

    def all_to_all(
        self, tensor: Tensor, ranks: tuple[int, ...], *, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Exchange rows with these ranks.  Raises PeerError if a rank has failed."""
        _check_can_wait(tensor)
        sent_rows = [StreamHandoff.from_current_stream(rows) for rows in tensor.clone().split(list(sent))]
        arrived = self._hub.exchange(ranks, self.rank, sent_rows)
        return torch.cat([rows[ranks.index(self.rank)].receive() for rows in arrived])

    def rotate(self, tensor: Tensor, ranks: tuple[int, ...]) -> Callable[[], Tensor]:
        """Put the tensor, not a copy, into the next rank's mailbox; the result raises PeerError if one has failed."""
        _check_can_wait(tensor)
        before, after = neighbours(self.rank, ranks)
        self.send(tensor, after, Channel.RING)
        return lambda: self.receive(tensor, before, Channel.RING)

    def gather(self, value: Any) -> list[Any]:
        """Collect every rank's value on every rank.  Raises PeerError if a rank has failed."""
        return self._hub.exchange(tuple(range(self.size)), self.rank, value)

    @staticmethod
    def run(ranks: int, work: Callable[[ThreadTransport], Any]) -> list[Any]:
        """Run all ranks until they end.  Raises the first error of any."""
        hub = _ThreadHub(ranks)
        results: list[Any] = [None] * ranks
        errors: list[BaseException] = []

        def run_rank(rank: int) -> None:
            try:
                results[rank] = work(ThreadTransport(hub, rank))
            except BaseException as error:
                errors.append(error)
                hub.abort(rank)

        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def _check_can_wait(tensor: Tensor) -> None:
    if tensor.is_cuda and runs_in_backward():
        raise InputError(
            "Ranks that are threads cannot meet in a backward on a GPU, as torch runs one after another there: run them"
            " as processes, under torchrun."
        )


class PeerError(DebubbleError):
    """Another rank has failed."""

    def __init__(self, rank: int) -> None:
        super().__init__(f"Rank {rank} has stopped.")


class _ThreadHub:
    """Mailboxes and barriers that the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: dict[tuple[int, int, Channel], SimpleQueue[StreamHandoff | None]] = {
            (a, b, channel): SimpleQueue() for a in range(size) for b in range(size) for channel in Channel
        }
        self._barriers: dict[Group, threading.Barrier] = {}
        self._values: dict[Group, dict[int, Any]] = {}
        self._failed: int | None = None
        """The rank that failed first; from then on no rank waits for another."""
        self._lock = threading.Lock()

    def exchange(self, ranks: tuple[int, ...], rank: int, value: Any) -> list[Any]:
        """The values of these ranks, on each of them.  Raises PeerError if a rank has failed."""
        if len(ranks) == 1:
            return [value]
        with self._lock:
            if self._failed is not None:
                raise PeerError(self._failed)
            group = ranks, current_lane()
            barrier = self._barriers.setdefault(group, threading.Barrier(len(ranks)))
            values = self._values.setdefault(group, {})
            values[rank] = value
        try:
            barrier.wait()
            results = [values[r] for r in ranks]
            barrier.wait()
        except threading.BrokenBarrierError:
            assert self._failed is not None
            raise PeerError(self._failed) from None
        del values[rank]
        return results

    def abort(self, rank: int) -> None:
        """Note that a rank has failed, and wake all that wait for it."""
        with self._lock:
            if self._failed is None:
                self._failed = rank
            for barrier in self._barriers.values():
                barrier.abort()
        for (source, _, _), box in self.mail.items():
            if source == rank:
                box.put(None)
