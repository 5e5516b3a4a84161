"""The gradient norm over all devices: partial sums, and their relay along a pipeline.

Partial sums are relayed in the predicted finishing order of the devices, and the total is relayed back.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import astuple, dataclass
from functools import reduce

import torch
from torch import Tensor

from debubble.ir import Kind, Number, Program
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.simulator import run

CHUNK_SIZE = 2**16
"""Elements that a CPU converts to fp64 at a time, few enough to stay in its cache."""


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    """The sum of the squares of all elements, in double precision."""
    flat = [tensor.detach().flatten() for tensor in tensors]
    sizes = (CHUNK_SIZE if tensor.device.type == "cpu" else max(1, len(tensor)) for tensor in flat)
    chunks = (chunk.double() for tensor, size in zip(flat, sizes, strict=True) for chunk in tensor.split(size))
    return float(sum(torch.dot(chunk, chunk) for chunk in chunks))


@dataclass(frozen=True)
class PartialSums:
    """Sums over some devices.  `squares` is inf or NaN if any gradient has one."""

    squares: float = 0.0
    """Sum of the squares of all gradients, in double precision."""
    loss: float = 0.0
    ahead: int = 0
    """Devices that stepped before the total was known."""

    def __add__(self, other: PartialSums) -> PartialSums:
        return PartialSums(self.squares + other.squares, self.loss + other.loss, self.ahead + other.ahead)

    @staticmethod
    def sum(terms: Iterable[PartialSums]) -> PartialSums:
        """Add from left to right; the same order gives the same bits."""
        return reduce(PartialSums.__add__, terms, PartialSums())

    @property
    def norm(self) -> float:
        """Norm of all gradients."""
        return math.sqrt(self.squares)

    @property
    def finite(self) -> bool:
        """True if no gradient has an inf or NaN."""
        return math.isfinite(self.squares)

    def scale(self, max_norm: float) -> float:
        """The clipping factor of torch's `clip_grad_norm_`; 1 if the norm is within the limit, or inf or NaN.

        Adding more devices never increases it.
        """
        return min(1.0, max_norm / (self.norm + 1e-6)) if self.finite else 1.0

    def within(self, max_norm: float) -> bool:
        """Tell whether the gradients summed so far need neither clipping nor skipping."""
        return self.finite and self.scale(max_norm) == 1.0

    def to_tensor(self) -> Tensor:
        """The three sums as [3] in double precision."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @staticmethod
    def from_tensor(numbers: Tensor) -> PartialSums:
        """Sums from a tensor [3]."""
        squares, loss, ahead = numbers.tolist()
        return PartialSums(squares, loss, round(ahead))


class NormRelay:
    """Relays partial sums along the ranks of one pipeline, in the given order, and the total back."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._index, self._ranks = ranks.index(transport.rank), ranks

    @property
    def last(self) -> bool:
        """True if this rank is the last, which knows the total first."""
        return self._index + 1 == len(self._ranks)

    @property
    def has_one_rank(self) -> bool:
        """True if the pipeline has one rank."""
        return len(self._ranks) == 1

    def take_turn(
        self, local: PartialSums, *, steps_ahead: Callable[[PartialSums], bool]
    ) -> tuple[PartialSums, Future[PartialSums]]:
        """Add this rank's sums to those of the ranks before it, and pass them on.

        Waits for the previous rank; a thread sends the result and receives the total.

        Args:
            local: This rank's sums.
            steps_ahead: Whether this rank will step before it knows the total, given the sums so far.

        Returns:
            The sums up to this rank, and the total.
        """
        known = local if self._index == 0 else self._receive(self._index - 1) + local
        if steps_ahead(known):
            known += PartialSums(ahead=1)
        total: Future[PartialSums] = Future()
        threading.Thread(target=self._pass_on, args=(known, total), daemon=True).start()
        return known, total

    def _pass_on(self, known: PartialSums, total: Future[PartialSums]) -> None:
        try:
            sums = known
            if not self.last:
                self._send(known, self._index + 1)
                sums = self._receive(self._index + 1)
            if self._index:
                self._send(sums, self._index - 1)
            # Set last: a caller that has the total may end the process, and a daemon thread must not be inside torch.
            total.set_result(sums)
        except BaseException as error:
            if not total.done():
                total.set_exception(error)

    def _send(self, sums: PartialSums, index: int) -> None:
        self._transport.send(sums.to_tensor(), self._ranks[index], Channel.NORM)

    def _receive(self, index: int) -> PartialSums:
        buffer = torch.empty(3, dtype=torch.float64)
        return PartialSums.from_tensor(self._transport.receive(buffer, self._ranks[index], Channel.NORM))


def finish_order(program: Program) -> tuple[int, ...]:
    """The devices in the order in which the simulation completes their gradients."""
    complete: list[Number] = [0] * program.devices
    for operation in run(program).operations:
        if operation.op.kind in (Kind.B, Kind.W, Kind.G):
            complete[operation.device] = max(complete[operation.device], operation.end)
    return tuple(sorted(range(program.devices), key=lambda device: (complete[device], -device)))


def relay_channels(ranks: Sequence[int]) -> list[tuple[int, int, Channel]]:
    """Channels of a relay along these ranks."""
    return [(a, b, Channel.NORM) for pair in itertools.pairwise(ranks) for a, b in (pair, pair[::-1])]
