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
from typing import NamedTuple

import torch

from debubble.ir import Kind, Number, Program
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.simulator import run


@dataclass(frozen=True)
class Tally:
    """Sums over some devices.  An inf or NaN in any gradient makes `squares` one."""

    squares: float = 0.0
    """Sum of the squares of all gradients, in double precision."""
    loss: float = 0.0
    ahead: int = 0
    """Devices that have stepped before the sums were whole."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.squares + other.squares, self.loss + other.loss, self.ahead + other.ahead)

    @staticmethod
    def of(tallies: Iterable[Tally]) -> Tally:
        """The sum, from left to right: in the same order it is the same to the bit."""
        return reduce(Tally.__add__, tallies, Tally())

    @property
    def norm(self) -> float:
        return math.sqrt(self.squares)

    @property
    def finite(self) -> bool:
        """Whether no gradient has an inf or NaN."""
        return math.isfinite(self.squares)

    def scale(self, max_norm: float) -> float:
        """What gradients are multiplied by, as in torch's `clip_grad_norm_`: 1 if their norm is small enough.

        It only falls as more devices are added.  With an inf or NaN there is nothing to multiply.
        """
        return min(1.0, max_norm / (self.norm + 1e-6)) if self.finite else 1.0

    def harmless(self, max_norm: float) -> bool:
        """Whether gradients may be used as they are, for all that is known."""
        return self.finite and self.scale(max_norm) == 1.0


class Passed(NamedTuple):
    """What a rank knows after its turn."""

    known: Tally
    """Of the devices up to this one."""
    whole: Future[Tally]
    """Of all."""


class Relay:
    """The ranks of one pipeline in the order of their turns, as one of them sees them."""

    def __init__(self, transport: Transport, ranks: Sequence[int]) -> None:
        self._transport = transport
        self._at, self._ranks = ranks.index(transport.rank), ranks

    @property
    def last(self) -> bool:
        """Whether this rank is the last, which knows all in its turn."""
        return self._at + 1 == len(self._ranks)

    @property
    def alone(self) -> bool:
        return len(self._ranks) == 1

    def take_turn(self, own: Tally, *, steps_ahead: Callable[[Tally], bool]) -> Passed:
        """Add this rank's tally to that of those before it, and hand it on.

        Waits for the rank before it; what is handed on and what comes back is a thread's.  `steps_ahead` says of what
        is then known whether this rank will step before it knows all.
        """
        known = own if self._at == 0 else self._receive(self._at - 1) + own
        if steps_ahead(known):
            known += Tally(ahead=1)
        whole: Future[Tally] = Future()
        threading.Thread(target=self._pass_on, args=(known, whole), daemon=True).start()
        return Passed(known, whole)

    def _pass_on(self, known: Tally, whole: Future[Tally]) -> None:
        try:
            total = known
            if not self.last:
                self._send(known, self._at + 1)
                total = self._receive(self._at + 1)
            whole.set_result(total)
            if self._at:
                self._send(total, self._at - 1)
        except BaseException as error:
            if not whole.done():
                whole.set_exception(error)

    def _send(self, tally: Tally, at: int) -> None:
        self._transport.send(torch.tensor(astuple(tally), dtype=torch.float64), self._ranks[at], Channel.TALLY)

    def _receive(self, at: int) -> Tally:
        numbers = self._transport.receive(torch.empty(3, dtype=torch.float64), self._ranks[at], Channel.TALLY)
        squares, loss, ahead = numbers.tolist()
        return Tally(squares, loss, round(ahead))


def turns(program: Program) -> tuple[int, ...]:
    """The devices in the order in which their gradients are predicted to be complete."""
    complete: list[Number] = [0] * program.devices
    for operation in run(program).operations:
        if operation.op.kind in (Kind.B, Kind.W, Kind.G):
            complete[operation.device] = max(complete[operation.device], operation.end)
    return tuple(sorted(range(program.devices), key=lambda device: (complete[device], -device)))


def channels(ranks: Sequence[int]) -> list[tuple[int, int, Channel]]:
    """What a relay of these ranks needs open."""
    return [(a, b, Channel.TALLY) for pair in itertools.pairwise(ranks) for a, b in (pair, pair[::-1])]
