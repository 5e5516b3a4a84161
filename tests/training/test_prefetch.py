"""The next batch is prepared during training and is the one that training would have read."""

import multiprocessing
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from debubble.ir import InputError
from debubble.runtime.launch.failures import UserCodeError
from debubble.training.data.datasets import READING_PHASE, STARTING_PHASE, DatasetSamples, Prefetcher
from tests.support import forked
from tests.support.processes import wait_for_end
from tests.support.training_cases import drawn, seed_generators

SPAWN, FORKED = multiprocessing.get_context("spawn"), multiprocessing.get_context(forked.START_METHOD)


class Noisy:
    """Item i is i and a random number; sets an event, which other processes see, when it was made."""

    def __init__(self) -> None:
        self.made = {index: SPAWN.Event() for index in range(8)}

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> list[int]:
        if index == 5:
            raise InputError("Item 5 is broken.")
        self.made[index].set()
        return [index, int(torch.randint(1000, ())) + np.random.randint(1000) + random.randrange(1000)]


class InOrder(DatasetSamples):
    """The items in order."""

    def batch(self, first: int, *, count: int) -> torch.Tensor:
        return torch.stack([self._item(i, i) for i in range(first, first + count)])


def samples() -> InOrder:
    return InOrder(dataset=Noisy(), sequence_length=1, seed=3)


@pytest.fixture
def prefetch(forked_processes: None) -> Iterator[Callable[..., Prefetcher]]:
    """Prefetch items in a process that ends with the test."""
    with ExitStack() as ends:
        yield lambda items, stride: ends.enter_context(closing(Prefetcher(items, stride=stride)))


def test_batches_match_the_samples_also_after_a_jump(prefetch: Any) -> None:
    prefetched = prefetch(samples(), 2)
    for first in (0, 2, 1, 3):
        batch = prefetched.batch(first, count=1)
        assert isinstance(batch, torch.Tensor)
        assert torch.equal(batch, samples().batch(first, count=1))


def test_next_batch_is_prepared_in_advance(prefetch: Any) -> None:
    dataset = Noisy()
    prefetched = prefetch(InOrder(dataset=dataset, sequence_length=1, seed=3), 3)
    prefetched.batch(0, count=1)
    assert dataset.made[3].wait(timeout=30)


def test_invalid_batch_is_reported_when_requested(prefetch: Any) -> None:
    prefetched = prefetch(samples(), 1)
    prefetched.batch(4, count=1)
    with pytest.raises(InputError, match=r"^Item 5 is broken\.$"):
        prefetched.batch(5, count=1)


def test_training_keeps_its_random_numbers(prefetch: Any) -> None:
    seed_generators()
    expected = [drawn() for _ in range(4)]
    seed_generators()
    prefetched = prefetch(samples(), 1)
    actual = []
    for first in range(4):
        prefetched.batch(first, count=1)
        actual.append(drawn())
    assert actual == expected


def test_dataset_that_cannot_be_pickled_is_refused() -> None:
    class Local(Noisy): ...

    with pytest.raises(InputError, match="define its class and all that it refers to at the top of a module"):
        Prefetcher(DatasetSamples(dataset=Local(), sequence_length=1), stride=1).batch(0, count=1)


class Waiting(Noisy):
    """Reports which process makes its items, and never returns one."""

    def __init__(self, sender: Connection) -> None:
        super().__init__()
        self.sender = sender

    def __getitem__(self, index: int) -> list[int]:
        self.sender.send(os.getpid())
        signal.pause()
        raise AssertionError


class Late(Waiting):
    """Starts in the worker process after the rank has ended."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.sender.send(os.getpid())
        rank = multiprocessing.parent_process()
        assert rank is not None
        rank.join()

    def __getitem__(self, index: int) -> list[int]:
        signal.pause()
        raise AssertionError


def ask_for_an_item(kind: type[Waiting], sender: Connection) -> None:
    Prefetcher(DatasetSamples(dataset=kind(sender), sequence_length=1), stride=1).batch(0, count=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Waiting, Late])
def test_the_process_that_makes_items_ends_with_its_rank(kind: type[Waiting]) -> None:
    heard, sender = FORKED.Pipe(duplex=False)
    rank = FORKED.Process(target=ask_for_an_item, args=(kind, sender))
    rank.start()
    worker = heard.recv()
    rank.kill()
    rank.join()
    wait_for_end([worker])


class Raising(Noisy):
    """A dataset whose items all raise."""

    def __getitem__(self, index: int) -> list[int]:
        raise KeyError("text")


def test_exception_of_a_dataset_is_named_with_its_line(prefetch: Any) -> None:
    prefetched = prefetch(InOrder(dataset=Raising(), sequence_length=1), 1)
    with pytest.raises(UserCodeError) as caught:
        prefetched.batch(2, count=1)
    assert str(caught.value) == "Item 2 of the dataset cannot be made: KeyError: 'text'."
    assert 'raise KeyError("text")' in caught.value.traceback


def test_rank_reports_the_phase_of_the_reader_process(prefetch: Any) -> None:
    prefetched = prefetch(samples(), 2)
    phases = [prefetched.phase]
    prefetched.batch(0, count=1)
    assert [*phases, prefetched.phase] == [STARTING_PHASE, READING_PHASE]
