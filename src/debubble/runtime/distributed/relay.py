"""Hands tallies along a pipeline: partial ones forward, in the order in which devices finish, the whole one back."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import astuple
from typing import NamedTuple

import torch

from debubble.ir import Kind, Number, Program
from debubble.runtime.distributed.gradient_norm import Tally
from debubble.runtime.distributed.transport import Channel, Transport
from debubble.simulator import run


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
