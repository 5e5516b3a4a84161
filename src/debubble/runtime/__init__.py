"""Runs a plan on torch: interprets its Program with tensors.

`Pipeline` is the whole surface; `models` builds the units, `stage` what runs on them, `interpreter` the lanes.
"""

from debubble.runtime.batch import Batch
from debubble.runtime.pipeline import Pipeline

__all__ = ["Batch", "Pipeline"]
