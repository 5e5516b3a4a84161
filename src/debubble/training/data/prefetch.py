"""The next batch is made while the pipeline trains on this one."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset

from debubble.ir import DebubbleError
from debubble.runtime import Batch
from debubble.runtime.failures import hear_no_signals
from debubble.runtime.launcher import end_with_parent
from debubble.training.data.datasets import Samples

AHEAD = 2
"""Batches that are made before they are asked for."""


class Prefetched:
    """The same samples, made by a process of torch's DataLoader where they ask for one.

    Batches are asked for from `stride` samples after the one before, as training does; after any other leap the process
    begins anew.
    """

    def __init__(self, samples: Samples, *, stride: int) -> None:
        self._samples, self._stride = samples, stride
        self._batches: Iterator[Batch | DebubbleError] = iter(())
        self._next: tuple[int, int] | None = None

    def batch(self, first: int, *, count: int) -> Batch:
        """Samples `first` to `first + count`.  Raises what making them does."""
        if self._next != (first, count):
            self._batches = self._batches_from(first, count)
        self._next = first + self._stride, count
        made = next(self._batches)
        if isinstance(made, DebubbleError):
            raise made
        return made

    def _batches_from(self, first: int, count: int) -> Iterator[Batch | DebubbleError]:
        beside = self._samples.beside
        loader = DataLoader(
            _Batches(self._samples, count),
            batch_size=None,
            sampler=range(first, sys.maxsize, self._stride),
            num_workers=1 if beside else 0,
            prefetch_factor=AHEAD if beside else None,
            multiprocessing_context=multiprocessing.get_context("fork") if beside else None,
            worker_init_fn=_begin,
            generator=torch.Generator(),  # or else it draws a seed from the one of the training
        )
        return iter(loader)


@dataclass(frozen=True)
class _Batches(Dataset[Batch | DebubbleError]):
    """Batches by their first sample; an error of ours is an answer, which arrives as it is."""

    samples: Samples
    count: int

    def __getitem__(self, first: int) -> Batch | DebubbleError:
        try:
            return self.samples.batch(first, count=self.count)
        except DebubbleError as error:
            return error


def _begin(worker: int) -> None:
    """What the process does first: it was forked from a rank that listens to signals."""
    hear_no_signals()
    end_with_parent()
