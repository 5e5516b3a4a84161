"""The request of a scheduler that a run end after the step that it is in, on which all ranks agree."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist
from torch import Tensor

END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of schedulers before they end a job by force."""


class EndRequest:
    """Signals that ranks have received, and their agreement after each step.  Every rank has one.

    Args:
        wait: Whether ranks wait for each other to agree on the step that has ended.  If not, they hear after the next
            one, which is then the last.
    """

    def __init__(self, *, wait: bool) -> None:
        # A group of its own: a checkpoint may be written meanwhile.
        self._group = dist.new_group(backend="gloo")
        self._wait, self._received = wait, 0
        self._pending: tuple[Tensor, dist.Work] | None = None

    def receive(self, number: signal.Signals) -> None:
        """Note the signal, on any thread; this rank tells the others after its step."""
        self._received = number

    def agreed(self) -> signal.Signals | None:
        """The signal after which the run is to end now, the same on all ranks.  Every rank calls it after each step."""
        told = torch.tensor(int(self._received))
        work = dist.all_reduce(told, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        heard = (told, work) if self._wait else self._pending
        self._pending = told, work
        if heard is None:
            return None
        heard[1].wait()
        return signal.Signals(int(heard[0])) if heard[0] else None
