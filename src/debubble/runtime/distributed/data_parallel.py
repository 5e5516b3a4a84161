"""What the data-parallel replicas of a device share: gradients are summed, and ZeRO divides what follows from them.

Divided, every replica owns the same share of the rows of every parameter: it alone gets their gradient's sum, keeps
their optimizer states and steps them, and then tells the others (ZeRO-2).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from debubble.runtime.distributed.transport import Transport


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same stages, as one of them sees them.  They all call the same, in the same order."""

    transport: Transport
    ranks: tuple[int, ...]
    divided: bool
    """Whether each owns a part of the rows (ZeRO)."""

    def reduce(self, gradient: Tensor) -> Tensor:
        """The sum of all replicas' gradients: this one's rows of it if divided.  The argument is used up."""
        if not self.divided:
            self.transport.all_reduce(gradient, self.ranks)
            return gradient
        parts = [self._part(gradient, rank).clone() for rank in self.ranks]
        for part, rank in zip(parts, self.ranks, strict=True):
            self.transport.reduce(part, self.ranks, to=rank)
        return parts[self.ranks.index(self.transport.rank)]

    def own(self, tensor: Tensor) -> Tensor:
        """This replica's rows of a tensor, as a view; all of them if not divided."""
        return self._part(tensor, self.transport.rank) if self.divided else tensor

    def rows(self, of: int) -> range:
        """Which of so many rows are this replica's; all of them if not divided."""
        return self._rows(of, self.transport.rank) if self.divided else range(of)

    def gather(self, tensor: Tensor) -> None:
        """Fill a tensor, in which every replica has its own rows, with all."""
        if self.divided:
            for rank in self.ranks:
                self.transport.broadcast(self._part(tensor, rank), self.ranks, source=rank)

    def _part(self, tensor: Tensor, rank: int) -> Tensor:
        rows = self._rows(len(tensor), rank)
        return tensor[rows.start : rows.stop]

    def _rows(self, of: int, rank: int) -> range:
        index, count = self.ranks.index(rank), len(self.ranks)
        return range(of * index // count, of * (index + 1) // count)
