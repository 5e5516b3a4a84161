"""What a run trains on, sample by sample: packed text, or a Dataset of the user's own.

Sample i of a run is the same whatever the number of ranks, the partition, or the restarts before it.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from debubble.ir import InputError, Plan
from debubble.runtime import Batch
from debubble.runtime.batch import check_entries
from debubble.training.data.text import Sequences, shuffled
from debubble.training.options import TrainOptions, sequences_of


class Samples(Protocol):
    """An endless row of samples."""

    @property
    def beside(self) -> bool:
        """Whether a process beside the training is to make them, as that may take long."""

    def batch(self, first: int, *, count: int) -> Batch:
        """Samples `first` to `first + count`, as `Pipeline.step` takes them."""


@dataclass(frozen=True)
class Text:
    """Windows of a text."""

    sequences: Sequences
    beside = False

    def batch(self, first: int, *, count: int) -> Tensor:
        """[count, length + 1]."""
        return torch.from_numpy(self.sequences.batch(first, count=count))


class Dataset(Protocol):
    """What torch calls a map-style dataset.

    An item is `length + 1` tokens, or a mapping with entries of a `Batch` (`input_ids` and `labels`, say) of `length`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Items:
    """The items of a Dataset, all once per epoch, each epoch shuffled anew.

    While an item is made, the random numbers of torch, numpy and Python follow from the seed and the sample; afterwards
    their generators are as they were.  Meant for a process of its own: threads share these generators.
    """

    dataset: Dataset
    sequence_length: int
    seed: int = 0
    beside = True

    def __post_init__(self) -> None:
        if not len(self.dataset):
            raise InputError("The dataset has no items.")

    def batch(self, first: int, *, count: int) -> Batch:
        """The items side by side: [count, length + 1], or a mapping with [count, length] each."""
        places = shuffled(first, count=count, per_epoch=len(self.dataset), seed=self.seed)
        items = [self._item(first + i, int(place)) for i, place in enumerate(places)]
        forms = {tuple(item) if isinstance(item, Mapping) else None for item in items}
        if len(forms) > 1:
            raise InputError("The items of the dataset differ in form: all must be tokens, or have the same entries.")
        if isinstance(items[0], Tensor):
            return torch.stack(items)
        return {name: torch.stack([item[name] for item in items]) for name in items[0]}

    def _item(self, sample: int, place: int) -> Any:
        with _random_numbers(random.Random(f"{self.seed} {sample}").getrandbits(32)):
            return _checked(self.dataset[place], place, self.sequence_length)


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


def _checked(item: Any, place: int, length: int) -> Tensor | Mapping[str, Tensor]:
    """An item as tensors.  Raises InputError if it has another form or length."""
    if isinstance(item, Mapping):
        check_entries(item, f"Item {place} of the dataset")
        entries = {name: torch.as_tensor(item[name], dtype=torch.int64) for name in sorted(item)}
        shapes = {name: list(entry.shape) for name, entry in entries.items()}
        if "input_ids" in entries and set(map(tuple, shapes.values())) == {(length,)}:
            return entries
    elif isinstance(item, Tensor | np.ndarray | Sequence):
        tokens = torch.as_tensor(item, dtype=torch.int64)
        shapes = {"tokens": list(tokens.shape)}
        if shapes["tokens"] == [length + 1]:
            return tokens
    else:
        shapes = {type(item).__name__: []}
    raise InputError(
        f"Item {place} of the dataset has {shapes}: it must be {length + 1} tokens, or a mapping with 'input_ids' and"
        f" 'labels' or 'targets' of {length} each."
    )


def samples_of(options: TrainOptions, plan: Plan, dataset: Dataset | None = None) -> Samples:
    """What a run trains on: the given dataset, or what its options say."""
    if dataset is None and options.dataset is not None:
        with _current_folder_last():  # the function may import more from there
            dataset = named_dataset(options.dataset)(plan)
    if dataset is None:
        return Text(sequences_of(options, plan))
    return Items(dataset=dataset, sequence_length=plan.options.sequence_length, seed=options.seed)


def named_dataset(name: str) -> Callable[[Plan], Dataset]:
    """The function that `module:function` names; the module may be in the current folder.

    What is installed goes before what is in that folder.  Raises InputError if there is none.
    """
    module, _, function = name.partition(":")
    try:
        with _current_folder_last():
            found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--dataset {name} cannot be loaded: {error}; give it as module:function.") from error
    if not callable(found):
        raise InputError(f"--dataset {name} is no function: give one that takes the plan and returns a Dataset.")
    return found  # type: ignore[no-any-return]


@contextmanager
def _current_folder_last() -> Iterator[None]:
    """Let imports find modules in the current folder that are nowhere else."""
    before = sys.path.copy()
    sys.path.append(os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before
