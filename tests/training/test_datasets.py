import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.training.checks import check
from debubble.training.data.datasets import DatasetSamples
from debubble.training.options import TrainOptions
from debubble.training.user_code import named_dataset
from tests.support.training_cases import drawn, seed_generators, train_alone


class Counting:
    """Item i is i, i + 1, ..., and a last number that is random by every generator."""

    def __init__(self, size: int, length: int) -> None:
        self._size, self._length = size, length

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> list[int]:
        noise = int(torch.randint(100, ())) + np.random.randint(100) + random.randrange(100)
        return [*range(index, index + self._length), noise]


def counting(plan: Plan) -> Counting:
    return Counting(12, plan.options.sequence_length)


def items(size: int = 5, length: int = 3) -> DatasetSamples:
    return DatasetSamples(dataset=Counting(size, length), sequence_length=length, seed=4)


def tokens(samples: DatasetSamples, first: int, *, count: int) -> torch.Tensor:
    """A batch of items that are plain tokens."""
    batch = samples.batch(first, count=count)
    assert isinstance(batch, torch.Tensor)
    return batch


def test_every_item_comes_once_per_epoch() -> None:
    samples = items()
    assert [sorted(tokens(samples, 5 * epoch, count=5)[:, 0].tolist()) for epoch in (0, 1)] == [[0, 1, 2, 3, 4]] * 2
    assert tokens(samples, 0, count=5)[:, 0].tolist() != tokens(samples, 5, count=5)[:, 0].tolist()


def test_sample_does_not_depend_on_how_it_is_read() -> None:
    expected = tokens(items(), 0, count=8)
    torch.manual_seed(1)
    parts = torch.cat([tokens(items(), 0, count=3), tokens(items(), 3, count=5)])
    assert torch.equal(expected, parts)


def test_reading_samples_does_not_change_random_generators() -> None:
    seed_generators()
    expected = drawn()
    seed_generators()
    items().batch(0, count=3)
    assert drawn() == expected


@pytest.mark.parametrize("name", ["labels", "targets"])
def test_items_may_have_the_entries_of_a_batch(name: str) -> None:
    mapping = {"input_ids": [1, 2], name: [2, -100], "attention_mask": [1, 1]}
    batch = DatasetSamples(dataset=[mapping], sequence_length=2).batch(0, count=2)
    assert not isinstance(batch, torch.Tensor)
    assert {name: entry.tolist() for name, entry in batch.items()} == {
        name: [value] * 2 for name, value in mapping.items()
    }


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([np.ones(3)], r"Item 0 of the dataset has numbers of float64: tokens are whole numbers\."),
        ([{"input_ids": [1, 2], "labels": [1.0, 2.0]}], "numbers of float32"),
        ([["a", "b", "c"]], "Item 0 of the dataset is no array of numbers"),
        ([[1, 2]], r"Item 0 of the dataset has \{'tokens': \[2\]\}: it must be 3 tokens"),
        ([{"input_ids": [1, 2], "labels": [1]}], r"'labels': \[1\]"),
        (
            [{"input_ids": [1, 2], "text": "ab"}],
            "Item 0 of the dataset has an entry 'text', which the runtime does not",
        ),
        ([None], "NoneType"),
        ([{"input_ids": [1, 2], "labels": [1, 2]}, [1, 2, 3]], "items of the dataset differ in form"),
        ([], "no items"),
    ],
)
def test_items_that_are_no_tokens_are_refused(items: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        DatasetSamples(dataset=items, sequence_length=2).batch(0, count=len(items))


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
def test_items_of_any_integer_dtype_are_tokens(dtype: Any) -> None:
    batch = tokens(DatasetSamples(dataset=[np.array([7, 8, 9], dtype)], sequence_length=2), 0, count=1)
    assert (batch.dtype, batch.tolist()) == (torch.int64, [[7, 8, 9]])


@pytest.mark.parametrize("name", ["nowhere:function", "random:nothing", "sys:path"])
def test_missing_dataset_is_one_sentence(name: str) -> None:
    with pytest.raises(InputError, match=f"--dataset {name}"):
        named_dataset(name)


@pytest.mark.usefixtures("process_group", "forked_processes")
def test_dataset_by_name_trains_like_the_object(
    plan_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_data.py").write_text("from tests.training.test_datasets import counting")
    monkeypatch.chdir(tmp_path)
    options = TrainOptions(plan=plan_file(1), steps=2, warmup=1)
    named = TrainOptions(plan=plan_file(1), steps=2, warmup=1, dataset="my_data:counting")
    check(named)
    direct = train_alone(options, dataset=counting(Plan.load(options.plan)))
    assert [r.loss for r in train_alone(named).reports] == [r.loss for r in direct.reports]


@pytest.mark.usefixtures("process_group", "forked_processes")
def test_a_run_on_a_dataset_is_resumed_bit_for_bit(plan_file: Any, tmp_path: Path) -> None:
    dataset = counting(Plan.load(plan_file(1)))
    options = TrainOptions(plan=plan_file(1), steps=4, warmup=1, checkpoint=tmp_path / "c", save_every=2, keep=9)
    expected = [r.loss for r in train_alone(options, dataset=dataset).reports]
    shutil.rmtree(tmp_path / "c" / "step-000004")
    resumed = [r.loss for r in train_alone(replace(options, resume=True), dataset=dataset).reports]
    assert resumed == expected[2:]
