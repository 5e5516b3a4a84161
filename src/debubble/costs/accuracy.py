"""Errors of predictions on measured runs that no cost was fitted to, and the interval that this gives a plan.

Source: `python -m measured --docs` in benchmarks/, which writes `accuracy.json`: residuals of the half of its records
that is kept for testing, by group (dense or a mixture of experts, generation of the hardware, dtype of products).
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
"""Beginnings of devices' names -> the generation of their hardware."""


@dataclass(frozen=True)
class Accuracy:
    """Errors of predictions on published runs, as shares of what was measured, and the interval that they give one.

    Attributes:
        runs: Measured runs.
        half: The error that half of them do not exceed.
        most: The error that nine in ten do not exceed.
        group: The runs' group.
        low: The least that a value is likely to be, as a share of the predicted one, or in its unit.
        high: The most; nine in ten measured values of the group are between them.
        of_hardware: Whether enough runs are on hardware of the same generation, or on one's own cluster.
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
        """The group and the two errors."""
        errors = f"half within {100 * self.half:.0f}%, nine in ten within {100 * self.most:.0f}%"
        return f"{self.runs} published runs ({self.group}), {errors}"

    def of(self, predicted: float) -> Accuracy:
        """The accuracy with the interval of a predicted value, in its unit."""
        return replace(self, low=predicted * self.low, high=predicted * self.high)

    def corrected(self, correction: Correction) -> Accuracy:
        """The accuracy where measured runs of one's own leave less uncertainty."""
        if not correction.runs:
            return self
        low, high = math.log(self.low), math.log(self.high)
        middle, left = (low + high) / 2, correction.uncertainty
        # What the group's runs have in common is corrected as far as the runs weigh.
        common = (1 - correction.weight) * middle
        return replace(
            self, half=left * self.half, most=left * self.most,
            group=f"{self.group}, {correction.runs} {MEASURED_HERE}", of_hardware=True,
            low=math.exp(common + left * (low - middle)), high=math.exp(common + left * (high - middle)),
        )  # fmt: skip


def group_of(model: Architecture, device: str, dtype: str) -> tuple[str, str, str]:
    """The group of a run: kind of model, generation of its hardware, dtype of products."""
    kind = "dense" if model.experts is None else "MoE"
    generation = next((name for start, name in GENERATIONS.items() if device.startswith(start)), OTHER)
    return kind, generation, dtype


def groups_of(model: Architecture, device: str, dtype: str) -> Iterator[str]:
    """The run's group, and wider ones that it is in, the narrowest first."""
    kind, generation, dtype = group_of(model, device, dtype)
    yield f"{kind}, {generation}, {dtype}"
    yield f"{kind}, {generation}"
    yield kind
    yield ALL


MEASURED_HERE = "measured here"
"""Said of a group that has runs of one's own cluster."""
ALL, OTHER = "all", "other hardware"
"""The group of all runs, and the generation of hardware on which none was measured."""


def accuracy_of(what: Figure, model: Architecture, cluster: Cluster, options: RunOptions) -> Accuracy:
    """The accuracy of predictions for runs like this: of the narrowest group with enough measured runs.

    The cluster's own measured runs narrow it.
    """
    known, device = stated_accuracies()[what], cluster.slowest.name
    found = next(known[name] for name in groups_of(model, device, options.dtype) if name in known)
    generations = {group_of(model, each.name, options.dtype)[1] for each in cluster.types}
    found = replace(found, of_hardware=generations <= {*found.group.split(", ")})
    step, memory = corrections(model, cluster, options)
    return found.corrected(step if what == "step" else memory)


@cache
def stated_accuracies() -> Mapping[Figure, Mapping[str, Accuracy]]:
    """The accuracy of every group that has enough measured runs."""
    content = files("debubble.costs").joinpath("accuracy.json").read_bytes()
    return msgspec.json.decode(content, type=dict[Figure, dict[str, Accuracy]])
