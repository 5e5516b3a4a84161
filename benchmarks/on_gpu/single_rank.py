"""One rank of a plan without its peers: their messages are supplied, and its own messages are dropped.

So one device's program runs with its real memory and its real operations on a machine that has one device: to measure
it, and to compare it with its prediction, before there are all of them.  Sums over ranks have this rank's part alone:
the loss of any but the last device is 0, and a tied table's gradient lacks the other copy's part.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from debubble.ir import InputError, Kind, Op, Program
from debubble.runtime.distributed.transport import Channel, SingleProcessTransport

Supply = Callable[[Op, Tensor], None]
"""Fills the buffer of a receive, such as `2RECV_F5`, with what the peer would have sent."""


class SingleRankTransport(SingleProcessTransport):
    """The transport of one rank that runs without the other ranks of its pipeline.

    Args:
        program: What all devices of the plan run.
        device: The device that this rank is.
        supply: What fills the messages.
        arrivals: When messages arrive, in seconds since the step began; those that are not in it arrive at once.

    Raises:
        InputError: The program offloads to other devices, which would have to hold what it moves there.
    """

    def __init__(
        self, program: Program, device: int, supply: Supply, *, arrivals: Mapping[Op, float] | None = None
    ) -> None:
        self.rank, self.size = device, program.devices
        self._supply, self._began = supply, 0.0
        self.follow(program, arrivals=arrivals)

    def follow(self, program: Program, *, arrivals: Mapping[Op, float] | None = None) -> None:
        """Continue with this program, as `Pipeline.follow` does."""
        if program.schedule.peers:
            raise InputError("A device that offloads to another one, or holds what one offloads, cannot run alone.")
        self._arrivals = arrivals or {}
        self._expected = _receives(program, self.rank)
        self._received: Counter[int] = Counter()

    def send(self, tensor: Tensor, to: int, channel: Channel) -> None:
        """Drop the message."""

    def receive(self, buffer: Tensor, source: int, channel: Channel) -> Tensor:
        """The next message of this source in the program's order, once it has arrived."""
        assert channel is Channel.MESSAGE, "alone, a rank settles no update with others"
        expected = self._expected[source]
        op = expected[self._received[source] % len(expected)]
        self._received[source] += 1
        time.sleep(max(0.0, self._began + self._arrivals.get(op, 0.0) - time.perf_counter()))
        self._supply(op, buffer)
        return buffer

    def all_to_all(
        self, tensor: Tensor, ranks: tuple[int, ...], *, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        """Rows of zeros: a single device has no replicas that could send tokens."""
        return tensor.new_zeros((sum(received), *tensor.shape[1:]))

    def gather(self, value: Any) -> list[Any]:
        """This rank's value for every rank; a step begins now, as ranks synchronize here before every step."""
        self._began = time.perf_counter()
        return super().gather(value)


def _receives(program: Program, device: int) -> Mapping[int, list[Op]]:
    """Messages that the device receives from each source, in order."""
    receives: defaultdict[int, list[Op]] = defaultdict(list)
    for queue in program.queues_of[device]:
        for instruction in (program.instructions[i] for i in queue.instructions):
            if instruction.op.kind in (Kind.RECV_F, Kind.RECV_B):
                assert instruction.peer is not None
                receives[instruction.peer].append(instruction.op)
    return receives
