"""The next batch is made beside the training, and is the one that training would have made."""

import threading

import pytest
import torch

from debubble.ir import InputError
from debubble.training.prefetch import Prefetched
from debubble.training.samples import Items


class Noisy:
    """Item i is i and a random number; notes that it was made."""

    def __init__(self) -> None:
        self.made = {index: threading.Event() for index in range(8)}

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> list[int]:
        if index == 5:
            raise InputError("Item 5 is broken.")
        self.made[index].set()
        return [index, int(torch.randint(1000, ()))]


class InOrder(Items):
    """The items as they come."""

    def batch(self, first: int, *, count: int) -> torch.Tensor:
        return torch.stack([self._item(i, i) for i in range(first, first + count)])


def samples() -> Items:
    return InOrder(dataset=Noisy(), sequence_length=1, seed=3)


def test_batches_are_those_of_the_samples_themselves_also_after_a_leap():
    prefetched = Prefetched(samples(), stride=2)
    for first in (0, 2, 1, 3):
        assert torch.equal(prefetched.batch(first, count=1), samples().batch(first, count=1))


def test_the_next_batch_is_made_before_it_is_asked_for():
    ahead = samples()
    Prefetched(ahead, stride=3).batch(0, count=1)
    assert ahead.dataset.made[3].wait(timeout=30)


def test_what_is_wrong_with_a_batch_is_said_when_it_is_asked_for():
    prefetched = Prefetched(samples(), stride=1)
    prefetched.batch(4, count=1)
    with pytest.raises(InputError, match="Item 5 is broken"):
        prefetched.batch(5, count=1)
