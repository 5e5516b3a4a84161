"""Ranks that share something, as one of them sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from debubble.runtime.distributed.transport import Transport


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share something, as one of them sees them.  They all call the same, in the same order."""

    transport: Transport
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def part(self) -> int:
        """This rank's index in the group."""
        return self.ranks.index(self.transport.rank)

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """The sum of all ranks' tensors for this rank; `parts` are those for each rank, and are used up."""
        for part, rank in zip(parts, self.ranks, strict=True):
            self.transport.reduce(part, self.ranks, to=rank)
        return parts[self.part]
