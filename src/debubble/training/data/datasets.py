"""Samples of a run: packed text, or a Dataset of the user's own, made by a process of torch's DataLoader.

Sample i of a run is the same whatever the number of ranks, the partition, or the restarts before it.
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
    """Windows of a text."""

    sequences: Sequences
    separator: int | None = None
    """The token that ends a text where tokens attend to their own text alone; None: to all before them."""
    separate = False
    """True if a process of its own is to make the batches, as that may take long."""

    def __len__(self) -> int:
        return self.sequences.per_epoch

    def batch(self, first: int, *, count: int) -> Entries:
        """Samples `first` to `first + count` of the endless row: [count, length + 1], or a mapping with positions."""
        return self._entries(self.sequences.batch(first, count=count))

    def rows(self, places: Sequence[int]) -> Entries:
        """[places, length + 1], or a mapping with positions."""
        return self._entries(self.sequences.windows(np.array(places)))

    def _entries(self, windows: Tokens) -> Entries:
        """The tokens of windows, with positions that count from the beginning of each text if there is a separator."""
        tokens = torch.from_numpy(windows)
        if self.separator is None:
            return tokens
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        place = torch.arange(inputs.shape[1]).expand_as(inputs)
        begins = torch.nn.functional.pad(inputs[:, :-1] == self.separator, (1, 0), value=True)
        begun = torch.where(begins, place, 0).cummax(1).values
        return {"input_ids": inputs, "targets": targets, "position_ids": place - begun}


@dataclass(frozen=True, kw_only=True)
class DatasetSamples:
    """The items of a Dataset, all once per epoch, each epoch shuffled anew.

    While an item is made, the random numbers of torch, numpy and Python follow from the seed and the sample; afterwards
    their generators are as they were.  Meant for a process of its own: threads share these generators.
    """

    dataset: Dataset
    sequence_length: int
    seed: int = 0
    separate = True

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise InputError("The dataset has no items.")

    def batch(self, first: int, *, count: int) -> Entries:
        """The items in parallel: [count, length + 1], or a mapping with [count, length] each."""
        places = shuffled_indices(first, count=count, per_epoch=len(self.dataset), seed=self.seed)
        return _side_by_side([self._item(first + i, int(place)) for i, place in enumerate(places)])

    def __len__(self) -> int:
        return len(self.dataset)

    def rows(self, places: Sequence[int]) -> Entries:
        """The items at these places of the dataset, as `batch` has them."""
        return _side_by_side([self._item(place, place) for place in places])

    def _item(self, sample: int, place: int) -> Any:
        with _random_numbers(random.Random(f"{self.seed} {sample}").getrandbits(32)):
            try:
                item = self.dataset[place]
            except DebubbleError:
                raise
            except Exception as error:
                raise UserCodeError.from_error(error, f"Item {place} of the dataset cannot be made") from error
            return _as_tensors(item, place, self.sequence_length)


SampleSource = TextSamples | DatasetSamples
"""The samples of a run: once, in order, or as an endless row in which every epoch has all of them."""


@dataclass(frozen=True, kw_only=True)
class ValidationSet:
    """All samples of a source once, in order, in batches for the replicas of a run."""

    source: SampleSource
    rows: int
    """Samples per batch and replica."""
    replicas: int = 1

    def batches(self, replica: int) -> Iterator[Mapping[str, Tensor]]:
        """A replica's batches, [rows, length] each; what the last one lacks is filled with rows without targets."""
        last = len(self.source) - 1
        for first in range(0, last + 1, self.rows * self.replicas):
            places = range(first + self.rows * replica, first + self.rows * (replica + 1))
            entries = self.source.rows([min(place, last) for place in places])
            if isinstance(entries, Tensor):
                entries = {"input_ids": entries[:, :-1], "targets": entries[:, 1:]}
            name = "labels" if "labels" in entries else "targets"
            targets = entries[name].clone()
            targets[torch.tensor(places) > last] = IGNORED
            yield {**entries, name: targets}


def _side_by_side(items: Sequence[Any]) -> Entries:
    forms = {tuple(item) if isinstance(item, Mapping) else None for item in items}
    if len(forms) > 1:
        raise InputError("The items of the dataset differ in form: all must be tokens, or have the same entries.")
    if isinstance(items[0], Tensor):
        return torch.stack(list(items))
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


@contextmanager
def _random_numbers(seed: int) -> Iterator[None]:
    """Let the generators of this process follow from a seed."""
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


def _as_tensors(item: Any, place: int, length: int) -> Tensor | Mapping[str, Tensor]:
    """An item as tensors.  Raises InputError if it has another form or length, or numbers that are not whole."""
    if isinstance(item, Mapping):
        check_entries(item, f"Item {place} of the dataset")
        entries = {name: _whole_numbers(item[name], place) for name in sorted(item)}
        shapes = {name: list(entry.shape) for name, entry in entries.items()}
        if "input_ids" in entries and set(map(tuple, shapes.values())) == {(length,)}:
            return entries
    elif isinstance(item, Tensor | np.ndarray | Sequence):
        tokens = _whole_numbers(item, place)
        shapes = {"tokens": list(tokens.shape)}
        if shapes["tokens"] == [length + 1]:
            return tokens
    else:
        shapes = {type(item).__name__: []}
    raise InputError(
        f"Item {place} of the dataset has {shapes}: it must be {length + 1} tokens, or a mapping with 'input_ids' and"
        f" 'labels' or 'targets' of {length} each."
    )


def _whole_numbers(values: Any, place: int) -> Tensor:
    """The numbers as torch's kernels take them.  Raises InputError if they are not whole."""
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"Item {place} of the dataset is no array of numbers: {error}.") from error
    if found.is_floating_point() or found.is_complex():
        dtype = str(found.dtype).removeprefix("torch.")
        raise InputError(f"Item {place} of the dataset has numbers of {dtype}: tokens are whole numbers.")
    return found.long()


READING_PHASE, STARTING_PHASE = "reads data", "starts the process that reads data"
"""Phases of a rank; the second one takes as long as Python does to import what the dataset needs."""
PREFETCHED_BATCHES = 2
"""Batches that are made before they are asked for."""


class Prefetcher:
    """Samples made ahead, by a process of torch's DataLoader where they ask for one.

    Batches are asked for from `stride` samples after the one before, as training does; after any other leap the process
    begins anew.  It is spawned: a rank has threads, which a forked process would lack while their locks are taken.
    """

    def __init__(self, samples: SampleSource, *, stride: int) -> None:
        self._samples, self._stride = samples, stride
        self._batches: Iterator[Entries | DebubbleError] = iter(())
        self._next: tuple[int, int] | None = None

    @property
    def phase(self) -> str:
        """The status of a rank that asks for the next batch."""
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
        """End the process: it does not hear of an end that garbage collection brings, which then takes seconds."""
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
            generator=torch.Generator(),  # or else it draws a seed from the one of the training
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
    """Batches by their first sample; a DebubbleError is an answer, so that it arrives as it is."""

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
