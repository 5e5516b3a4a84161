"""The samples of a run, and those that it is validated on, as its options say."""

from __future__ import annotations

from pathlib import Path

from debubble.ir import Plan
from debubble.training.data.datasets import (
    DatasetSamples,
    SampleSource,
    TextSamples,
    TextWindows,
    ValidationSet,
    ValidationSource,
)
from debubble.training.options import TrainOptions, separator_of, sequences_of
from debubble.training.user_code import Dataset, current_folder_last, named_dataset


def samples_of(options: TrainOptions, plan: Plan, dataset: Dataset | None = None) -> SampleSource:
    """The samples of a run: of the given dataset, or as its options say."""
    if dataset is None and options.dataset is not None:
        with current_folder_last():  # the function may import more from there
            dataset = named_dataset(options.dataset)(plan)
    if dataset is None:
        return TextSamples(sequences_of(options, plan, options.data), separator_of(options, plan))
    return DatasetSamples(dataset=dataset, sequence_length=plan.options.sequence_length, seed=options.seed)


def validation_of(options: TrainOptions, plan: Plan) -> ValidationSet | None:
    """The validation set of a run, if its options name one."""
    if options.validation is None:
        return None
    source: ValidationSource
    if options.dataset is None:
        source = TextWindows(sequences_of(options, plan, Path(options.validation)), separator_of(options, plan))
    else:
        with current_folder_last():
            dataset = named_dataset(options.validation, option="--validation")(plan)
        source = DatasetSamples(dataset=dataset, sequence_length=plan.options.sequence_length, seed=options.seed)
    rows = plan.micro_batches * plan.options.micro_batch_size
    return ValidationSet(source=source, rows=rows, replicas=plan.options.data)
