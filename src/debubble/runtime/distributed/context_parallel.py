"""Context parallelism: the ranks of a group divide every sequence, and attention gathers keys and values.

A sequence is cut into 2n equal chunks, and rank i of n has the chunks i and 2n - 1 - i: so all have as many keys before
their queries (Llama Team, arXiv:2407.21783, section 3.3.2, which gathers keys and values too).  Gradients of parameters
are summed over the group as over replicas.  Attention without masks goes around a ring: `models/attention/ring.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from debubble.runtime.distributed.transport import RankGroup, SingleProcessTransport


@dataclass(frozen=True)
class ContextGroup(RankGroup):
    """The ranks that divide sequences among them."""

    @property
    def chunks(self) -> tuple[int, int]:
        """The two chunks of every sequence, of 2 x `size`, that are this rank's."""
        return self._chunks(self.part)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's two chunks of the whole sequences that lie along a dimension."""
        return self._own(x, dim, self.part)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole sequences of all ranks' chunks along a dimension."""
        halves = [part.chunk(2, dim) for part in self.transport.all_gather(x.contiguous(), self.ranks)]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)

    def reduce(self, x: Tensor, dim: int) -> Tensor:
        """This rank's chunks of the sum of all ranks' tensors."""
        return self.reduce_scatter([self._own(x, dim, index) for index in range(self.size)])

    def _own(self, x: Tensor, dim: int, index: int) -> Tensor:
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat([chunks[chunk] for chunk in self._chunks(index)], dim)

    def _chunks(self, index: int) -> tuple[int, int]:
        return index, 2 * self.size - 1 - index


NO_CONTEXT_GROUP = ContextGroup(SingleProcessTransport(), (0,))
"""The group of a rank that has whole sequences."""
