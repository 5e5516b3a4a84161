"""Checks before a step that all ranks have the same batch."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from time import perf_counter
from typing import NoReturn

import torch

from debubble.ir import InputError
from debubble.runtime.steps.batch import StepBatch
from debubble.runtime.topology import Ranks


class BatchAgreement:
    """Compares the ranks' batches and counts their targets."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._shapes: tuple[tuple[int, ...], ...] = ()
        """Shapes of the micro-batches of the last agreement."""
        self._unchecked = 0
        """Checksum of the batches since the last agreement."""

    def agree(self, batch: StepBatch) -> tuple[int, float]:
        """Number of targets over all replicas, and the time when all ranks were ready, on this rank's clock.

        Raises InputError if the ranks of a replica have different batches, or the replicas different shapes.
        """
        size = self._ranks.ranks_per_replica
        shapes = zlib.crc32(repr(batch.shapes).encode())
        batches = self._ranks.transport.gather_numbers((shapes, batch.counted, batch.checksum, perf_counter()))
        if any(b[0] != batches[0][0] or b[1] != batches[n // size * size][1] for n, b in enumerate(batches)):
            self._refuse_unlike(batch)
        self._check_checksums([int(checksum) for _, _, checksum, _ in batches])
        self._shapes, self._unchecked = batch.shapes, 0
        total = round(sum(counted for _, counted, _, _ in batches[::size]))
        if not total:
            raise InputError(_NO_TARGET)
        # Without a common clock, the time after the collective approximates it.
        return total, max(time for _, _, _, time in batches) if self._ranks.one_clock else perf_counter()

    def _refuse_unlike(self, batch: StepBatch) -> NoReturn:
        """Raise an InputError that names a rank with other shapes or targets; all ranks call it."""
        size = self._ranks.ranks_per_replica
        batches = self._ranks.transport.gather((batch.shapes, batch.counted))
        for rank, (shapes, counted) in enumerate(batches):
            first = rank // size * size
            if shapes != batches[0][0] or counted != batches[first][1]:
                raise InputError(
                    f"Rank {rank} has micro-batches of {_shape_words(shapes)} with {counted} targets, but rank {first}"
                    f" of {_shape_words(batches[first][0])} with {batches[first][1]}."
                )
        raise AssertionError("ranks agreed on numbers that differ")

    def count(self, batch: StepBatch) -> tuple[int, float]:
        """Number of targets over all replicas, and the time, without waiting for other devices, which may be late.

        Raises InputError if the batch has other shapes than that of the last agreement.
        """
        if batch.shapes != self._shapes:
            raise InputError(
                f"Micro-batches of {_shape_words(batch.shapes)} follow those of {_shape_words(self._shapes)}: call"
                " `finish_update` between batches of different shapes."
            )
        now = perf_counter()
        self._unchecked = zlib.crc32(batch.checksum.to_bytes(4, "big"), self._unchecked)
        total = torch.tensor(batch.counted, device=batch.rows[0].tokens.device)
        self._ranks.sum_over_replicas(total)
        if not total:
            raise InputError(_NO_TARGET)
        return int(total) // self._ranks.context.size, now

    def check_counted(self) -> None:
        """Raise InputError if the ranks of a replica had different batches since the last agreement."""
        self._check_checksums(self._ranks.transport.gather(self._unchecked))

    def _check_checksums(self, checksums: Sequence[int]) -> None:
        for first in range(0, len(checksums), self._ranks.ranks_per_replica):
            ranks = range(first, first + self._ranks.ranks_per_replica)
            different = [str(rank) for rank in ranks if checksums[rank] != checksums[first]]
            if different:
                subject = f"Ranks {', '.join(different)} have" if len(different) > 1 else f"Rank {different[0]} has"
                raise InputError(
                    f"{subject} other tokens or targets than rank {first} of the same replica: give them the same"
                    " batch (a DataLoader that shuffles needs the same seed on all of them)."
                )


_NO_TARGET = "The batch has no target to learn from."


def _shape_words(shapes: Sequence[tuple[int, ...]]) -> str:
    """The distinct shapes of micro-batches."""
    return ", ".join(" x ".join(map(str, shape)) for shape in dict.fromkeys(shapes))
