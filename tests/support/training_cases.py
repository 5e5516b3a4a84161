"""Training as the only rank of a run, which the training's tests share."""

from debubble.training.options import TrainOptions
from debubble.training.report import TrainingSummary
from debubble.training.trainer import train
from debubble.training.user_code import Dataset


def train_alone(options: TrainOptions, *, dataset: Dataset | None = None) -> TrainingSummary:
    """Train as the only rank, which therefore has the summary."""
    summary = train(options, dataset=dataset)
    assert summary is not None
    return summary
