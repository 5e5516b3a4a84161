"""Model FLOPs utilization (MFU): the share of its devices' peak that a run uses (PaLM, arXiv 2204.02311, appendix B).

Unlike in the paper, attention counts only the keys that a causal mask or a window lets a query attend to.
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
    """Floating-point operations of one token's forward and backward; recomputation does not count.

    Per token, every matrix parameter takes two operations forward, two for the gradient of its input, and two for its
    own gradient if it is trained (with LoRA of rank `lora`, only adapters are).  Attention adds the products of queries
    with the keys that they attend to, and of the attention weights with the values.
    """
    head = model.vocab * model.hidden if model.tied else 0
    vision = model.vision
    tower = 0 if vision is None else vision.parameters
    matrices = model.active_parameters - model.embedding_parameters + head - tower
    attention = sum(model.core_flops(layer, length) for layer in range(model.layers))
    trained = model.trained_parameters(lora) if lora else matrices
    images = 0.0 if vision is None else (3 if vision.trained else 1) * vision.images * vision.flops / length
    return 4 * matrices + 2 * trained + 3 * attention + images


@dataclass(frozen=True)
class Utilization:
    """The model FLOPs utilization of a run, from its tokens per second."""

    flops_per_token: float
    peak: float | None
    """Operations per second of all devices together at the peak of the run's dtype; None: some peak is not known."""

    @staticmethod
    def of_run(model: ModelConfig, cluster: Cluster, options: RunOptions, *, devices: int) -> Utilization:
        """The utilization of a run on the first `devices` devices of the cluster."""
        used = cluster.types[:devices]
        peaks = {type_.name: Speed.from_hardware(type_, options.dtype).product_peak for type_ in used}
        return Utilization(
            flops_per_token(as_trained(model, options), options.sequence_length, lora=options.lora),
            sum(peaks[type_.name] for type_ in used) if all(type_.peak_known for type_ in used) else None,
        )

    def mfu(self, tokens_per_second: float) -> float | None:
        """The share of the peak that a throughput uses; None: the peak is not known."""
        return None if self.peak is None else tokens_per_second * self.flops_per_token / self.peak
