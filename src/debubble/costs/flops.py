"""How much of its devices' peak a run uses: model FLOPs utilization (PaLM, arXiv 2204.02311, appendix B).

Unlike there, attention counts only the keys that a causal mask or a window leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

from debubble.costs.cluster import Cluster
from debubble.costs.speed import Speed
from debubble.costs.step import element_bytes
from debubble.ir import Plan
from debubble.models.config import ModelConfig


def flops_per_token(model: ModelConfig, length: int, *, lora: int = 0) -> float:
    """Floating-point operations that one token's forward and backward need; recomputation counts as none.

    Two per parameter of every matrix and token forward, two for the gradient of its input, and two for its own, if it
    is trained: with adapters of rank `lora`, they alone are.  Attention beside them multiplies queries with the keys
    that they reach, and the weights with the values.
    """
    looked_up = model.embedding_parameters
    head = model.vocab * model.hidden if model.tied else 0
    matrices = model.active_parameters - looked_up + head
    attention = sum(4 * model.attended(layer, length) * model.attention_width for layer in range(model.layers))
    trained = model.trained_parameters(lora) if lora else matrices
    return 4 * matrices + 2 * trained + 3 * attention


@dataclass(frozen=True)
class Utilization:
    """MFU of a plan's run, by its tokens per second."""

    flops_per_token: float
    peak: float
    """Of all devices together, in the run's dtype, by the plan's cluster."""

    @staticmethod
    def of(plan: Plan) -> Utilization | None:
        """None for a plan that does not say what its devices are."""
        if plan.model is None or plan.cluster is None:
            return None
        options = plan.options
        speed = Speed(Cluster.from_dict(plan.cluster).slowest, element_bytes(options.dtype))
        devices = plan.devices * options.data * options.tensor * options.context
        operations = flops_per_token(ModelConfig.from_hf(plan.model), options.sequence_length, lora=options.lora)
        return Utilization(operations, devices * speed.peak)

    def mfu(self, tokens_per_second: float) -> float:
        """A fraction."""
        return tokens_per_second * self.flops_per_token / self.peak
