"""A run computes the loss of a validation set during training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from debubble.ir import InputError
from debubble.plans import Plan
from debubble.runtime.models.units import MicroBatch
from debubble.training.checks import check
from debubble.training.data.datasets import DatasetSamples, TextSamples, ValidationSet
from debubble.training.data.text import Sequences, load_tokens
from debubble.training.options import TrainOptions
from tests.support.reference_model import ReferenceModel
from tests.support.training_cases import train_alone

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture
def options(options: TrainOptions, tmp_path: Path) -> TrainOptions:
    (tmp_path / "more.txt").write_text("Nine green bottles, hanging on the wall; " * 9)
    return replace(options, steps=5, validation=str(tmp_path / "more.txt"), validate_every=2)


def test_every_window_is_in_a_batch_once() -> None:
    sequences = Sequences(tokens=np.arange(1, 16), sequence_length=2)
    validation = ValidationSet(source=TextSamples(sequences), rows=2, replicas=2)
    first, second = ([batch["targets"].tolist() for batch in validation.batches(replica)] for replica in range(2))
    assert first == [[[2, 3], [4, 5]], [[10, 11], [12, 13]]]
    assert second == [[[6, 7], [8, 9]], [[14, 15], [-100, -100]]]
    assert next(iter(validation.batches(0)))["input_ids"].tolist() == [[1, 2], [3, 4]]


def test_items_of_a_dataset_are_seen_once() -> None:
    items = [{"input_ids": [i, i + 1], "labels": [-100, i + 1]} for i in range(3)]
    validation = ValidationSet(source=DatasetSamples(dataset=items, sequence_length=2), rows=2)
    batches = list(validation.batches(0))
    assert [batch["input_ids"].tolist() for batch in batches] == [[[0, 1], [1, 2]], [[2, 3], [2, 3]]]
    assert batches[1]["labels"].tolist() == [[-100, 3], [-100, -100]]


def test_validation_loss_matches_one_process(options: TrainOptions) -> None:
    report = train_alone(replace(options, steps=1, learning_rate=0.0, weight_decay=0.0)).reports[0]
    plan = Plan.load(options.plan)
    assert plan.model is not None
    model = ReferenceModel(plan.model.config, dtype=torch.float32)
    sequences = Sequences(tokens=load_tokens(Path(options.validation or "")), sequence_length=32)
    tokens = torch.from_numpy(sequences.windows(np.arange(sequences.per_epoch)))
    targets = tokens[:, 1:].contiguous()
    with torch.no_grad():
        loss = model(tokens[:, :-1].contiguous(), MicroBatch(targets=targets, scale=1 / targets.numel()))
    assert report.validation_loss == pytest.approx(float(loss), rel=1e-6)


def test_validation_does_not_change_training(options: TrainOptions) -> None:
    validated = train_alone(options)
    assert [step for step, _ in validated.as_dict()["validation_losses"]] == [2, 4, 5]
    alone = train_alone(replace(options, validation=None))
    assert [r.loss for r in validated.reports] == [r.loss for r in alone.reports]
    assert alone.as_dict()["validation_losses"] == []


def test_post_validation_has_the_same_validation_losses(options: TrainOptions) -> None:
    synchronous, ahead = train_alone(options), train_alone(replace(options, post_validation=True))
    assert [r.validation_loss for r in ahead.reports] == [r.validation_loss for r in synchronous.reports]


def test_two_ranks_validate_as_one(options: TrainOptions, train: Any, plan_file: Any) -> None:
    arguments = ["--steps", "2", "--warmup", "2", "--lr", "0.01", "--validate-every", "1", "--json"]
    texts = ["--data", str(options.data), "--validation", str(options.validation)]

    def losses(ranks: int) -> Any:
        code, answer, error = train(str(plan_file(ranks)), *texts, *arguments)
        assert code == 0, error
        return json.loads(answer)["validation_losses"]

    assert losses(2) == [[step, pytest.approx(loss, rel=1e-5)] for step, loss in losses(1)]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"validate_every": 0}, "--validate-every must be at least 1"),
        ({"validation": Path("nowhere.txt")}, "no data file or directory nowhere.txt"),
        ({"dataset": "json:loads", "data": None}, "--validation .*/more.txt cannot be loaded"),
        ({"prompt": ""}, "--prompt is empty"),
        ({"prompt": "Nine", "dataset": "json:loads", "data": None, "validation": None}, "does not go with --dataset"),
        ({"prompt": "Nine", "sample_tokens": 0}, "--sample-tokens must be at least 1"),
    ],
)
def test_invalid_validation_and_resume_options_are_refused(options: TrainOptions, entries: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(replace(options, **entries))


def test_a_prompt_is_continued_and_training_is_the_same(options: TrainOptions) -> None:
    alone = train_alone(replace(options, validation=None))
    prompted = train_alone(replace(options, validation=None, prompt="Nine", sample_tokens=3))
    samples = prompted.as_dict()["samples"]
    assert [step for step, _ in samples] == [2, 4, 5]
    assert all(sample.startswith("Nine") and len(sample) >= 5 for _, sample in samples)
    assert [r.loss for r in prompted.reports] == [r.loss for r in alone.reports]
