"""The gradient norm over all devices: partial sums, and how a pipeline passes them on.

Partial sums go along the pipeline in the order in which devices are predicted to finish, the whole one comes back.
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

CHUNK = 2**16
"""Numbers that a CPU widens at a time: so few stay in its cache."""


def sum_of_squares(tensors: Iterable[Tensor]) -> float:
    """The sum of the squares of all numbers, in double precision."""
    flat = [tensor.detach().flatten() for tensor in tensors]
    chunks = (chunk.double() for t in flat for chunk in t.split(CHUNK if t.device.type == "cpu" else max(1, len(t))))
    return float(sum(torch.dot(chunk, chunk) for chunk in chunks))


@dataclass(frozen=True)
class PartialSums:
    """Sums over some devices.  An inf or NaN in any gradient makes `squares` one."""

    squares: float = 0.0
    """Sum of the squares of all gradients, in double precision."""
    loss: float = 0.0
    ahead: int = 0
    """Devices that have stepped before the sums were whole."""

    def __add__(self, other: PartialSums) -> PartialSums:
        return PartialSums(self.squares + other.squares, self.loss + other.loss, self.ahead + other.ahead)

    @staticmethod
    def of(parts: Iterable[PartialSums]) -> PartialSums:
        """The sum, from left to right: in the same order it is the same to the bit."""
        return reduce(PartialSums.__add__, parts, PartialSums())

    @property
    def norm(self) -> float:
        """Norm of all gradients."""
        return math.sqrt(self.squares)

    @property
    def finite(self) -> bool:
        """True if no gradient has an inf or NaN."""
        return math.isfinite(self.squares)

    def scale(self, max_norm: float) -> float:
        """Factor of the gradients, as in torch's `clip_grad_norm_`: 1 if their norm is small enough.

        It only falls as more devices are added.  With an inf or NaN there is nothing to multiply.
        """
        return min(1.0, max_norm / (self.norm + 1e-6)) if self.finite else 1.0

    def within(self, max_norm: float) -> bool:
        """Tell whether gradients may be used as they are, for all that is known."""
        return self.finite and self.scale(max_norm) == 1.0

    def to_tensor(self) -> Tensor:
        """The three numbers, [3] in double precision."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @staticmethod
    def from_tensor(numbers: Tensor) -> PartialSums:
        """Sums from three numbers, [3]."""
        squares, loss, ahead = numbers.tolist()
        return PartialSums(squares, loss, round(ahead))


class NormRelay:
    """Passes partial sums along one pipeline, whose ranks come in the order of their turns, and the total back."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._at, self._ranks = ranks.index(transport.rank), ranks

    @property
    def last(self) -> bool:
        """True if this rank is the last, which knows all in its turn."""
        return self._at + 1 == len(self._ranks)

    @property
    def alone(self) -> bool:
        """True if the pipeline is one rank."""
        return len(self._ranks) == 1

    def take_turn(
        self, own: PartialSums, *, steps_ahead: Callable[[PartialSums], bool]
    ) -> tuple[PartialSums, Future[PartialSums]]:
        """Add this rank's sums to those of the ranks before it, and hand them on.

        Waits for the rank before it; a thread hands on and receives what comes back.

        Args:
            own: This rank's sums.
            steps_ahead: Whether this rank will step before it knows all, if it knows this much.

        Returns:
            The sums up to this rank, and the total of all.
        """
        known = own if self._at == 0 else self._receive(self._at - 1) + own
        if steps_ahead(known):
            known += PartialSums(ahead=1)
        total: Future[PartialSums] = Future()
        threading.Thread(target=self._pass_on, args=(known, total), daemon=True).start()
        return known, total

    def _pass_on(self, known: PartialSums, total: Future[PartialSums]) -> None:
        try:
            sums = known
            if not self.last:
                self._send(known, self._at + 1)
                sums = self._receive(self._at + 1)
            if self._at:
                self._send(sums, self._at - 1)
            # Whoever knows may end the process, and Python cannot end a daemon thread that is inside of torch.
            total.set_result(sums)
        except BaseException as error:
            if not total.done():
                total.set_exception(error)

    def _send(self, sums: PartialSums, at: int) -> None:
        self._transport.send(sums.to_tensor(), self._ranks[at], Channel.NORM)

    def _receive(self, at: int) -> PartialSums:
        buffer = torch.empty(3, dtype=torch.float64)
        return PartialSums.from_tensor(self._transport.receive(buffer, self._ranks[at], Channel.NORM))


def finish_order(program: Program) -> tuple[int, ...]:
    """The devices in the order in which their gradients are predicted to be complete."""
    complete: list[Number] = [0] * program.devices
    for operation in run(program).operations:
        if operation.op.kind in (Kind.B, Kind.W, Kind.G):
            complete[operation.device] = max(complete[operation.device], operation.end)
    return tuple(sorted(range(program.devices), key=lambda device: (complete[device], -device)))


def relay_channels(ranks: Sequence[int]) -> list[tuple[int, int, Channel]]:
    """Channels that a relay of these ranks needs open."""
    return [(a, b, Channel.NORM) for pair in itertools.pairwise(ranks) for a, b in (pair, pair[::-1])]
