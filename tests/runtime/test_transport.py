"""Ranks on threads of one process: a failing rank ends all, and exchanged tensors are released."""

import weakref
from threading import Thread
from typing import Any

import pytest
import torch

from debubble.ir import Lane
from debubble.runtime.distributed.thread_transport import PeerError, ThreadTransport
from debubble.runtime.distributed.transport import Channel, on_lane


def test_early_failure_of_a_rank_ends_its_peers() -> None:
    failed_ranks = []

    def one(transport: Any) -> None:
        if transport.rank == 0:
            raise ValueError("broken")
        with pytest.raises(PeerError):
            transport.receive(torch.zeros(1), 0, Channel.MESSAGE)
        with pytest.raises(PeerError, match="Rank 0 has stopped"):
            transport.gather(1)
        failed_ranks.append(transport.rank)

    with pytest.raises(ValueError, match="broken"):
        ThreadTransport.run(2, one)
    assert failed_ranks == [1]


def test_waiting_ranks_hear_which_rank_failed() -> None:
    failed_ranks = []

    def one(transport: Any) -> None:
        if transport.rank == 2:
            transport.receive(torch.zeros(1), 0, Channel.MESSAGE)
            raise ValueError("broken")
        if transport.rank == 0:
            transport.send(torch.zeros(1), 2, Channel.MESSAGE)
        with pytest.raises(PeerError, match="Rank 2 has stopped"):
            transport.gather(1)
        failed_ranks.append(transport.rank)

    with pytest.raises(ValueError, match="broken"):
        ThreadTransport.run(3, one)
    assert sorted(failed_ranks) == [0, 1]


def test_exchanged_tensors_are_released() -> None:
    def one(transport: Any) -> Any:
        tensor = torch.zeros(1)
        seen = weakref.ref(tensor)
        transport.gather(tensor)
        del tensor
        other = 1 - transport.rank
        transport.send(torch.zeros(1), other, Channel.MESSAGE)  # this rank has released the tensor of its peer
        transport.receive(torch.zeros(1), other, Channel.MESSAGE)
        return seen() is None

    assert ThreadTransport.run(2, one) == [True, True]


def test_collectives_of_two_lanes_do_not_mix() -> None:
    both, rounds = (0, 1), range(100)

    def one(transport: Any) -> Any:
        sums = []

        def reduce() -> None:
            with on_lane(Lane.REDUCE):
                for i in rounds:
                    tensor = torch.tensor([i + transport.rank])
                    transport.all_reduce(tensor, both)
                    sums.append(int(tensor))

        lane = Thread(target=reduce, daemon=True)
        lane.start()
        gathered = [torch.cat(transport.all_gather(torch.tensor([i, transport.rank]), both)).tolist() for i in rounds]
        lane.join()
        return sums, gathered

    expected = [2 * i + 1 for i in rounds], [[i, 0, i, 1] for i in rounds]
    assert ThreadTransport.run(2, one) == [expected, expected]
