"""Agreement of all ranks to end a run after the current step, on a signal of a job scheduler."""

from __future__ import annotations

import signal

import torch
import torch.distributed as dist
from torch import Tensor

END_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that job schedulers send before they kill a job."""


class EndRequest:
    """The signal that this rank has received, and the agreement of all ranks after each step.  Every rank has one.

    Args:
        wait: Whether ranks wait for the agreement after each step.  If not, its result is used one step later, which is
            then the last.
    """

    def __init__(self, *, wait: bool) -> None:
        # A separate group, because a checkpoint may be written concurrently.
        self._group = dist.new_group(backend="gloo")
        self._wait, self._received = wait, 0
        self._pending: tuple[Tensor, dist.Work] | None = None

    def receive(self, number: signal.Signals) -> None:
        """Record the signal, on any thread; this rank informs the others after its step."""
        self._received = number

    def agreed(self) -> signal.Signals | None:
        """The signal on which all ranks end the run now, if any.  Every rank calls it after each step."""
        local = torch.tensor(int(self._received))
        work = dist.all_reduce(local, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        result = (local, work) if self._wait else self._pending
        self._pending = local, work
        if result is None:
            return None
        result[1].wait()
        return signal.Signals(int(result[0])) if result[0] else None
