"""Runs a plan on torch: interprets its Program with tensors.

`Pipeline` is the whole surface; `models` has units and stages, `execution` runs their operations on lanes.
"""

from debubble.runtime.pipeline import Pipeline
from debubble.runtime.steps.batch import Batch

__all__ = ["Batch", "Pipeline"]
