"""Training as the only rank of a run, and random numbers, shared by the tests of training."""

import random

import numpy as np
import torch

from debubble.training.monitoring.report import TrainingSummary
from debubble.training.options import TrainOptions
from debubble.training.trainer import train
from debubble.training.user_code import Dataset


def train_alone(options: TrainOptions, *, dataset: Dataset | None = None) -> TrainingSummary:
    """Train as the only rank, which therefore has the summary."""
    summary = train(options, dataset=dataset)
    assert summary is not None
    return summary


def seed_generators() -> None:
    """Seed the generators that a data set may use: torch's, numpy's and Python's."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)


def drawn() -> tuple[float, float, float]:
    """The next number of each of them."""
    return float(torch.rand(())), float(np.random.rand()), random.random()
