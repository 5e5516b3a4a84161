"""A stage of a model whose routers have an auxiliary loss (see routing.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from debubble.ir import PlannedUnit
from debubble.runtime.execution.stage import Stage
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.routing import Balance, Routing
from debubble.runtime.models.units import MicroBatch, Unit


class BalancedStage(Stage):
    """Hands on the routers' sums with what every stage does: forward those of the layers so far, backward those of all.

    What lies between stages is one message of `balance.message`'s shape; the last one's loss has the auxiliary one.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        planned: Sequence[PlannedUnit],
        ledger: Ledger,
        *,
        balance: Balance,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__(units, planned, ledger)
        self._balance, self._first, self._last = balance, first, last
        self._routings: dict[int, Routing] = {}

    def forward(self, j: int, x: Tensor, micro_batch: MicroBatch, *, recomputing: int = 0) -> Tensor:
        assert micro_batch.targets is not None
        balance, shape = self._balance, micro_batch.targets.shape
        x, sums = (x, balance.nothing(on=x.device)) if self._first else balance.unpack(x, shape)
        routing = self._routings[j] = Routing(balance, shape, sums)
        y = super().forward(j, x, replace(micro_batch, routing=routing), recomputing=recomputing)
        return y + balance.loss(routing.sums) if self._last else balance.pack(y, routing.sums)

    def backward(self, j: int, gradient: Tensor, *, split: bool) -> Tensor | None:
        routing = self._routings.pop(j)
        if not self._last:
            gradient, routing.sums = self._balance.unpack(gradient, routing.shape)
        flowing = super().backward(j, gradient, split=split)
        return None if flowing is None else self._balance.pack(flowing, routing.sums)

    def forget(self) -> None:
        super().forget()
        self._routings.clear()
