"""Model FLOPs utilization, the share of its devices' peak that a run uses (PaLM, arXiv 2204.02311, appendix B).

Unlike there, attention counts only the keys that a causal mask or a window leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.costs.devices.cluster import Cluster
from debubble.costs.devices.speed import Speed
from debubble.ir import RunOptions
from debubble.models.architecture import Architecture
from debubble.models.config import ModelConfig
from debubble.models.vision import as_trained


def flops_per_token(model: Architecture, length: int, *, lora: int = 0) -> float:
    """Floating-point operations that one token's forward and backward need; recomputation counts as none.

    Two per parameter of every matrix and token forward, two for the gradient of its input, and two for its own, if it
    is trained: with adapters of rank `lora`, they alone are.  Attention next to them multiplies queries with the keys
    that they reach, and the weights with the values.
    """
    looked_up = model.embedding_parameters
    head = model.vocab * model.hidden if model.tied else 0
    vision = model.vision
    matrices = model.active_parameters - looked_up + head - (0 if vision is None else vision.parameters)
    attention = sum(model.core_flops(layer, length) for layer in range(model.layers))
    trained = model.trained_parameters(lora) if lora else matrices
    images = 0.0 if vision is None else (3 if vision.trained else 1) * vision.images * vision.flops / length
    return 4 * matrices + 2 * trained + 3 * attention + images


@dataclass(frozen=True)
class Utilization:
    """MFU of a run, by its tokens per second."""

    flops_per_token: float
    peak: float | None
    """The peak of all devices together, in the run's dtype, by the cluster; None: some device's is not known."""

    @staticmethod
    def of(model: ModelConfig, cluster: Cluster, options: RunOptions, *, devices: int) -> Utilization:
        """A run on that many devices of the cluster."""
        used = cluster.types[:devices]
        peaks = {type_.name: Speed.of(type_, options.dtype).product_peak for type_ in used}
        return Utilization(
            flops_per_token(as_trained(model, options), options.sequence_length, lora=options.lora),
            sum(peaks[type_.name] for type_ in used) if all(type_.peak_known for type_ in used) else None,
        )

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share of the peak that so many tokens per second take; None: the peak is not known."""
        return None if self.peak is None else tokens_per_second * self.flops_per_token / self.peak
