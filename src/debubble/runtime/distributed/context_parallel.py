"""Context parallelism: the ranks of a group shard every sequence, and attention gathers keys and values.

A sequence is split into 2n equal chunks, and rank i of n has chunks i and 2n - 1 - i, which balances causal attention
(Llama Team, arXiv:2407.21783, section 3.3.2, which gathers keys and values too).  Parameter gradients are summed over
the group as over replicas.  Attention without masks is ring attention: `models/attention/ring.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from debubble.runtime.distributed.transport import RankGroup, SingleProcessTransport


@dataclass(frozen=True)
class ContextGroup(RankGroup):
    """The ranks that shard sequences."""

    @property
    def chunk_indices(self) -> tuple[int, int]:
        """Indices of this rank's two chunks among the 2 x `size` of a sequence."""
        return self._chunk_indices(self.group_rank)

    def local_chunks(self, x: Tensor, dim: int) -> Tensor:
        """This rank's two chunks of full sequences along dimension `dim`."""
        return self._chunks_of_rank(x, dim, self.group_rank)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """All-gather full sequences from every rank's chunks along dimension `dim`."""
        halves = [shard.chunk(2, dim) for shard in self.transport.all_gather(x.contiguous(), self.ranks)]
        return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)], dim)

    def reduce(self, x: Tensor, dim: int) -> Tensor:
        """Reduce-scatter: this rank's chunks of the sum of all ranks' tensors."""
        return self.reduce_scatter([self._chunks_of_rank(x, dim, rank) for rank in range(self.size)])

    def _chunks_of_rank(self, x: Tensor, dim: int, group_rank: int) -> Tensor:
        chunks = x.chunk(2 * self.size, dim)
        return torch.cat([chunks[index] for index in self._chunk_indices(group_rank)], dim)

    def _chunk_indices(self, group_rank: int) -> tuple[int, int]:
        return group_rank, 2 * self.size - 1 - group_rank


NO_CONTEXT_GROUP = ContextGroup(SingleProcessTransport(), (0,))
"""The group of a rank that has full sequences."""
