"""Samples of a run: packed text, or a user's Dataset that a DataLoader process reads.

Sample i does not depend on the number of ranks, the partition or restarts.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.data
from torch import Tensor
from torch.utils.data import DataLoader

from debubble.ir import DebubbleError, InputError
from debubble.processes import end_with_parent
from debubble.runtime.launch.failures import UserCodeError
from debubble.runtime.steps.batch import IGNORED, Entries, check_entries
from debubble.training.data.text import Sequences, Tokens, shuffled_indices
from debubble.training.user_code import Dataset, current_folder_last


@dataclass(frozen=True)
class TextSamples:
    """Packed windows of text."""

    sequences: Sequences
    separator: int | None = None
    """The end-of-text token if attention is restricted to a token's own text; None: tokens attend across texts."""
    separate = False
    """Whether batches are made in a separate process, because that may take long."""

    def __len__(self) -> int:
        return self.sequences.per_epoch

    def batch(self, first: int, *, count: int) -> Entries:
        """Samples `first` to `first + count` of the run: [count, length + 1], or a mapping with positions."""
        return self._entries(self.sequences.batch(first, count=count))

    def rows(self, indices: Sequence[int]) -> Entries:
        """The windows at these indices: [indices, length + 1], or a mapping with positions."""
        return self._entries(self.sequences.windows(np.array(indices)))

    def _entries(self, windows: Tokens) -> Entries:
        """The tokens of windows, with positions relative to the start of each text if there is a separator."""
        tokens = torch.from_numpy(windows)
        if self.separator is None:
            return tokens
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        position = torch.arange(inputs.shape[1]).expand_as(inputs)
        begins = torch.nn.functional.pad(inputs[:, :-1] == self.separator, (1, 0), value=True)
        start = torch.where(begins, position, 0).cummax(1).values
        return {"input_ids": inputs, "targets": targets, "position_ids": position - start}


@dataclass(frozen=True, kw_only=True)
class DatasetSamples:
    """The items of a Dataset, reshuffled every epoch.

    While an item is made, the generators of torch, numpy and Python are seeded by the run's seed and the sample, and
    restored afterwards.  Meant for a separate process, because threads share these generators.
    """

    dataset: Dataset
    sequence_length: int
    seed: int = 0
    separate = True

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise InputError("The dataset has no items.")

    def batch(self, first: int, *, count: int) -> Entries:
        """The stacked items: [count, length + 1], or a mapping with [count, length] each."""
        indices = shuffled_indices(first, count=count, per_epoch=len(self.dataset), seed=self.seed)
        return _stack([self._item(first + i, int(index)) for i, index in enumerate(indices)])

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, indices: Sequence[int]) -> Entries:
        """The items at these indices of the dataset, stacked as in `batch`."""
        return _stack([self._item(index, index) for index in indices])

    def _item(self, sample: int, index: int) -> Any:
        with _seeded_generators(random.Random(f"{self.seed} {sample}").getrandbits(32)):
            try:
                item = self.dataset[index]
            except DebubbleError:
                raise
            except Exception as error:
                raise UserCodeError.from_error(error, f"Item {index} of the dataset cannot be made") from error
            return _as_tensors(item, index, self.sequence_length)


SampleSource = TextSamples | DatasetSamples
"""A source of samples: by index in order, or as an endless shuffled sequence of epochs."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """All samples of a source once, in order, in batches for data-parallel replicas."""

    source: SampleSource
    rows: int
    """Samples per batch and replica."""
    replicas: int = 1

    def batches(self, replica: int) -> Iterator[Mapping[str, Tensor]]:
        """A replica's batches, [rows, length] each; the last one is padded with rows without targets."""
        last = len(self.source) - 1
        for first in range(0, last + 1, self.rows * self.replicas):
            indices = range(first + self.rows * replica, first + self.rows * (replica + 1))
            entries = self.source.rows([min(index, last) for index in indices])
            if isinstance(entries, Tensor):
                entries = {"input_ids": entries[:, :-1], "targets": entries[:, 1:]}
            name = "labels" if "labels" in entries else "targets"
            targets = entries[name].clone()
            targets[torch.tensor(indices) > last] = IGNORED
            yield {**entries, name: targets}


def _stack(items: Sequence[Any]) -> Entries:
    forms = {tuple(item) if isinstance(item, Mapping) else None for item in items}
    if len(forms) > 1:
        raise InputError("The items of the dataset differ in form: all must be tokens, or have the same entries.")
    if isinstance(items[0], Tensor):
        return torch.stack(list(items))
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


@contextmanager
def _seeded_generators(seed: int) -> Iterator[None]:
    """Seed the generators of this process, and restore them afterwards."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _as_tensors(item: Any, index: int, length: int) -> Tensor | Mapping[str, Tensor]:
    """Convert an item to tensors.  Raises InputError for a wrong form or length, or numbers that are not integers."""
    if isinstance(item, Mapping):
        check_entries(item, f"Item {index} of the dataset")
        entries = {name: _integers(item[name], index) for name in sorted(item)}
        shapes = {name: list(entry.shape) for name, entry in entries.items()}
        if "input_ids" in entries and set(map(tuple, shapes.values())) == {(length,)}:
            return entries
    elif isinstance(item, Tensor | np.ndarray | Sequence):
        tokens = _integers(item, index)
        shapes = {"tokens": list(tokens.shape)}
        if shapes["tokens"] == [length + 1]:
            return tokens
    else:
        shapes = {type(item).__name__: []}
    raise InputError(
        f"Item {index} of the dataset has {shapes}: it must be {length + 1} tokens, or a mapping with 'input_ids' and"
        f" 'labels' or 'targets' of {length} each."
    )


def _integers(values: Any, index: int) -> Tensor:
    """Convert values to an int64 tensor.  Raises InputError if they are not integers."""
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Item {index} of the dataset is no array of numbers: {error}.") from error
    if numbers.is_floating_point() or numbers.is_complex():
        dtype = str(numbers.dtype).removeprefix("torch.")
        raise InputError(f"Item {index} of the dataset has numbers of {dtype}: tokens are whole numbers.")
    return numbers.long()


READING_PHASE, STARTING_PHASE = "reads data", "starts the process that reads data"
"""Phases of a rank's status; the second one includes the process's import of the dataset's modules."""
PREFETCHED_BATCHES = 2
"""Number of batches that the DataLoader process prepares in advance."""


class Prefetcher:
    """Prefetches batches, in a DataLoader process if the samples need one.

    Consecutive batches must start `stride` samples apart, as in training; any other start restarts the process.  It is
    spawned, because a fork of a rank with threads may inherit locks that are never released.
    """

    def __init__(self, samples: SampleSource, *, stride: int) -> None:
        self._samples, self._stride = samples, stride
        self._batches: Iterator[Entries | DebubbleError] = iter(())
        self._next: tuple[int, int] | None = None

    @property
    def phase(self) -> str:
        """The phase of a rank that waits for the next batch."""
        return READING_PHASE if self._next is not None or not self._samples.separate else STARTING_PHASE

    def batch(self, first: int, *, count: int) -> Entries:
        """Samples `first` to `first + count`.

        Raises:
            InputError: The dataset cannot be sent to the process; and whatever making the samples raises.
        """
        if self._next != (first, count):
            self._batches = self._batches_from(first, count)
        self._next = first + self._stride, count
        made = next(self._batches)
        if isinstance(made, DebubbleError):
            raise made
        return made

    def close(self) -> None:
        """End the process at once; leaving it to garbage collection would take seconds."""
        self._batches, self._next = iter(()), None

    def _batches_from(self, first: int, count: int) -> Iterator[Entries | DebubbleError]:
        separate = self._samples.separate
        loader = DataLoader(
            _Batches(self._samples, count),
            batch_size=None,
            sampler=range(first, sys.maxsize, self._stride),
            num_workers=1 if separate else 0,
            prefetch_factor=PREFETCHED_BATCHES if separate else None,
            multiprocessing_context="spawn" if separate else None,
            worker_init_fn=_end_with_rank,
            generator=torch.Generator(),  # otherwise it draws a seed from the default generator, which training uses
        )
        try:
            with current_folder_last(), warnings.catch_warnings():  # the process looks for modules where this one does
                warnings.filterwarnings("ignore", "Got pickle error")  # torch's way to say what is raised, too
                return iter(loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise InputError(
                f"The dataset cannot be sent to the process that makes its items ({error}): define its class and all"
                " that it refers to at the top of a module."
            ) from error


@dataclass(frozen=True)
class _Batches(torch.utils.data.Dataset[Entries | DebubbleError]):
    """Batches by their first sample; a DebubbleError is returned, so that it reaches the rank unchanged."""

    samples: SampleSource
    count: int

    def __getitem__(self, first: int) -> Entries | DebubbleError:
        try:
            return self.samples.batch(first, count=self.count)
        except DebubbleError as error:
            return error


def _end_with_rank(worker: int) -> None:
    end_with_parent()
    rank = multiprocessing.parent_process()
    if rank is None or not rank.is_alive():  # it ended while this process began
        os._exit(1)
