"""A stage with routers, whose messages carry the sums of their auxiliary loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from debubble.ir import PlannedUnit
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.compilation import Compiler
from debubble.runtime.models.routing import Balance, Routing
from debubble.runtime.models.stage import SAVE_ALL, SavePolicy, Stage, UnitDone
from debubble.runtime.models.units import MicroBatch, UnitModule


class MoeStage(Stage):
    """A stage whose routers have an auxiliary loss (see routing.py), and whose messages include the sums of that loss.

    Forward messages have the sums over the layers so far, backward messages those over all layers.  Messages have the
    shape `balance.message`; the last stage adds the auxiliary loss to the loss.
    """

    def __init__(
        self,
        units: Sequence[UnitModule],
        planned: Sequence[PlannedUnit],
        ledger: Ledger,
        *,
        balance: Balance,
        first: bool,
        last: bool,
        compiler: Compiler | None = None,
    ) -> None:
        super().__init__(units, planned, ledger, compiler=compiler)
        self._balance, self._first, self._last = balance, first, last
        self._routings: dict[int, Routing] = {}

    def forward(
        self,
        j: int,
        x: Tensor,
        micro_batch: MicroBatch,
        policy: SavePolicy = SAVE_ALL,
        unit_done: UnitDone | None = None,
    ) -> Tensor:
        """F: the message to the next stage, or the loss including the auxiliary one."""
        routing, x = self._unpack(x, micro_batch)
        self._routings[j] = routing
        micro_batch = replace(micro_batch, routing=routing)
        y = super().forward(j, x, micro_batch, policy, unit_done)
        return self._pack(y, routing)

    def evaluate(self, x: Tensor, micro_batch: MicroBatch) -> Tensor:
        """Run the units as `forward` does, without saving anything."""
        routing, x = self._unpack(x, micro_batch)
        return self._pack(super().evaluate(x, replace(micro_batch, routing=routing)), routing)

    def backward(self, j: int, gradient: Tensor, *, split: bool) -> Tensor | None:
        """B, or I if `split`: the message to the previous stage (None if the stage's input is tokens)."""
        routing = self._routings.pop(j)
        if not self._last:
            gradient, routing.sums = self._balance.unpack(gradient, routing.shape)
        input_gradient = super().backward(j, gradient, split=split)
        return None if input_gradient is None else self._balance.pack(input_gradient, routing.sums)

    def forget(self) -> None:
        """Drop all micro-batches in flight, including the routers' sums."""
        super().forget()
        self._routings.clear()

    def _unpack(self, x: Tensor, micro_batch: MicroBatch) -> tuple[Routing, Tensor]:
        """The routers' sums over the layers so far, and the stage's input."""
        assert micro_batch.targets is not None
        shape = micro_batch.targets.shape
        x, sums = (x, self._balance.zero_sums(on=x.device)) if self._first else self._balance.unpack(x, shape)
        return Routing(self._balance, shape, sums), x

    def _pack(self, y: Tensor, routing: Routing) -> Tensor:
        """The message to the next stage, or the loss including the auxiliary one."""
        return y + self._balance.loss(routing.sums) if self._last else self._balance.pack(y, routing.sums)
