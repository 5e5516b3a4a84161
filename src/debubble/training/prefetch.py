"""The next batch is made while the pipeline trains on this one."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from debubble.runtime import Batch
from debubble.training.samples import Samples


class Prefetched:
    """The same samples, one thread makes them: each batch as soon as the one before it has been asked for.

    Batches are asked for from `stride` samples after the one before, as training does; any other is made when it is.
    """

    def __init__(self, samples: Samples, *, stride: int) -> None:
        self._samples, self._stride = samples, stride
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._next: tuple[int, int, Future[Batch]] | None = None

    def batch(self, first: int, *, count: int) -> Batch:
        """Samples `first` to `first + count`.  Raises what making them does."""
        made = self._take(first, count)
        following = first + self._stride
        self._next = following, count, self._make(following, count)
        return made.result()

    def _take(self, first: int, count: int) -> Future[Batch]:
        if self._next is not None and self._next[:2] == (first, count):
            return self._next[2]
        return self._make(first, count)

    def _make(self, first: int, count: int) -> Future[Batch]:
        return self._thread.submit(self._samples.batch, first, count=count)
