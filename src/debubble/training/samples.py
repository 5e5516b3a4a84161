"""The samples of a run, and those that it is validated on, as its options say."""

from __future__ import annotations

from pathlib import Path

from debubble.plans import Plan
from debubble.training.data.datasets import DatasetSamples, SampleSource, TextSamples, ValidationSet
from debubble.training.options import TrainOptions, separator_of, sequences_of
from debubble.training.user_code import Dataset, current_folder_last, named_dataset


def samples_of(options: TrainOptions, plan: Plan, dataset: Dataset | None = None) -> SampleSource:
    """The samples of a run: of the given dataset, or as its options say."""
    if dataset is not None:
        return DatasetSamples(dataset=dataset, sequence_length=plan.options.sequence_length, seed=options.seed)
    if options.dataset is not None:
        return _items(options, plan, options.dataset, option="--dataset")
    return _windows(options, plan, options.data)


def validation_of(options: TrainOptions, plan: Plan) -> ValidationSet | None:
    """The validation set of a run, if its options name one."""
    if options.validation is None:
        return None
    if options.dataset is None:
        source = _windows(options, plan, Path(options.validation))
    else:
        source = _items(options, plan, options.validation, option="--validation")
    rows = plan.micro_batches * plan.options.micro_batch_size
    return ValidationSet(source=source, rows=rows, replicas=plan.options.data)


def _windows(options: TrainOptions, plan: Plan, data: Path | None) -> SampleSource:
    return TextSamples(sequences_of(options, plan, data), separator_of(options, plan))


def _items(options: TrainOptions, plan: Plan, function: str, *, option: str) -> SampleSource:
    with current_folder_last():  # the function may import more from there
        return samples_of(options, plan, named_dataset(function, option=option)(plan))
