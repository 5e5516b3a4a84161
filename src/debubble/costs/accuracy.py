"""Prediction errors on held-out measured runs, and the confidence interval that they give a plan's figures.

`python -m measured --docs` in benchmarks/ writes `accuracy.json`: residuals of the half of its records that is held out
for testing, by group (dense or mixture of experts, hardware generation, dtype of products).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import msgspec

from debubble.costs.calibration import Correction, Figure, corrections
from debubble.costs.devices.cluster import Cluster
from debubble.ir import RunOptions
from debubble.models.architecture import Architecture

GENERATIONS: Mapping[str, str] = {
    "V100": "Volta", "A100": "Ampere", "A800": "Ampere", "H": "Hopper", "GH": "Hopper", "B200": "Blackwell",
    "B300": "Blackwell", "GB": "Blackwell", "RTX4": "Ada", "RTX6000-Ada": "Ada", "L4": "Ada", "MI": "Instinct",
}  # fmt: skip
"""Prefix of a device's name -> its hardware generation."""


@dataclass(frozen=True)
class Accuracy:
    """Prediction errors on published runs, as fractions of the measured values, and a confidence interval.

    Attributes:
        runs: Number of measured runs.
        half: Median error.
        most: 90th percentile of the error.
        group: The runs' group.
        low: Lower end of the interval, as a fraction of the predicted value, or in its unit.
        high: Upper end of the interval, which has nine in ten measured values of the group.
        of_hardware: Whether enough runs are on hardware of the same generation, or on the user's own cluster.
    """

    runs: int
    half: float
    most: float
    group: str
    low: float
    high: float
    of_hardware: bool = True

    @property
    def words(self) -> str:
        """A phrase with the number of runs, the group and the two errors."""
        errors = f"half within {100 * self.half:.0f}%, nine in ten within {100 * self.most:.0f}%"
        return f"{self.runs} published runs ({self.group}), {errors}"

    def scaled_to(self, predicted: float) -> Accuracy:
        """The accuracy with its interval in the unit of a predicted value."""
        return replace(self, low=predicted * self.low, high=predicted * self.high)

    def corrected(self, correction: Correction) -> Accuracy:
        """The accuracy after a correction by the user's own measured runs, which lower the uncertainty."""
        if not correction.runs:
            return self
        low, high = math.log(self.low), math.log(self.high)
        middle, scale = (low + high) / 2, correction.uncertainty
        # The correction removes this fraction of the bias that the group's runs have in common.
        bias = (1 - correction.weight) * middle
        return replace(
            self, half=scale * self.half, most=scale * self.most,
            group=f"{self.group}, {correction.runs} {MEASURED_HERE}", of_hardware=True,
            low=math.exp(bias + scale * (low - middle)), high=math.exp(bias + scale * (high - middle)),
        )  # fmt: skip


def group_of(model: Architecture, device: str, dtype: str) -> tuple[str, str, str]:
    """The group of a run: kind of model, hardware generation, dtype of products."""
    kind = "dense" if model.experts is None else "MoE"
    generation = next((name for start, name in GENERATIONS.items() if device.startswith(start)), OTHER)
    return kind, generation, dtype


def groups_of(model: Architecture, device: str, dtype: str) -> Iterator[str]:
    """The groups that contain a run, narrowest first."""
    kind, generation, dtype = group_of(model, device, dtype)
    yield f"{kind}, {generation}, {dtype}"
    yield f"{kind}, {generation}"
    yield kind
    yield ALL


MEASURED_HERE = "measured here"
"""Suffix of the name of a group that includes runs of the user's own cluster."""
ALL, OTHER = "all", "other hardware"
"""The group of all runs, and the generation of hardware without measured runs."""


def accuracy_of(figure: Figure, model: Architecture, cluster: Cluster, options: RunOptions) -> Accuracy:
    """The accuracy of a prediction: that of the narrowest group of the run that has enough measured runs.

    The cluster's own measured runs narrow its interval.
    """
    known, device = stated_accuracies()[figure], cluster.slowest.name
    accuracy = next(known[name] for name in groups_of(model, device, options.dtype) if name in known)
    generations = {group_of(model, type_.name, options.dtype)[1] for type_ in cluster.types}
    accuracy = replace(accuracy, of_hardware=generations <= {*accuracy.group.split(", ")})
    step, memory = corrections(model, cluster, options)
    return accuracy.corrected(step if figure == "step" else memory)


@cache
def stated_accuracies() -> Mapping[Figure, Mapping[str, Accuracy]]:
    """The accuracy of every group that has enough measured runs."""
    content = files("debubble.costs").joinpath("accuracy.json").read_bytes()
    return msgspec.json.decode(content, type=dict[Figure, dict[str, Accuracy]])
