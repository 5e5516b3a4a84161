"""Memory model of ChronosPipe's figures: bytes per layer, and the fraction of m_a that each schedule stores.

Activations of one layer and token take 4 h + (6 q + 4 kv + 4 ffn) / t bytes, or 2 ffn without a gate.  That assumes
FlashAttention, recomputed norms and activation function, inputs of ColumnLinear not divided over the TP ranks (section
6.1), and Megatron's second copy of the attention output.  Model states take 18 bytes per parameter.

The fraction that a schedule stores is simulated: device 0's peak in blocks of m_a / (p v).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache

from debubble.ir import Number, StageCosts
from debubble.ir.stage_costs import CommunicationModel
from debubble.papers.chronospipe.offload import DEVICE_BYTES, STATE_BYTES, offload_states
from debubble.schedules import schedules
from debubble.simulator import Timeline, simulate

GB = 1e9
TENSOR = 8
"""Tensor-parallel ranks."""
LIMIT = 32
"""GB of device memory."""
MESSAGE = Fraction(104, 1000)
"""T_c in T_unit (section 6.1)."""
LAYER_STATES = STATE_BYTES * 42e9 / 48 / 64 / GB
"""GB of model states per layer on each of 64 devices, from 42 B parameters in 48 layers."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The dimensions of a decoder that determine its memory."""

    name: str
    layers: int
    hidden: int
    queries: int
    keys: int
    """Width of the keys, equal to that of the values."""
    ffn: int
    gated: bool

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        return self.hidden * (2 * self.queries + 2 * self.keys + (3 if self.gated else 2) * self.ffn)

    def layer_activation(self, tokens: int) -> float:
        """GB of one layer's activations on one device."""
        divided = 6 * self.queries + 4 * self.keys + (4 if self.gated else 2) * self.ffn
        return tokens * (4 * self.hidden + divided / TENSOR) / GB


LLAMA2_70B = Shape(name="LLaMA2-70B", layers=80, hidden=8192, queries=8192, keys=1024, ffn=28672, gated=True)
QWEN2_32B = Shape(name="Qwen2.5-32B", layers=64, hidden=5120, queries=5120, keys=1024, ffn=27648, gated=True)
PALM_62B = Shape(name="PaLM-62B", layers=64, hidden=8192, queries=8192, keys=256, ffn=32768, gated=True)
OPT_66B = Shape(name="OPT-66B", layers=64, hidden=9216, queries=9216, keys=9216, ffn=36864, gated=False)


LAYER = LLAMA2_70B.layer_activation(2 * 4096)
"""GB of one layer's activations."""

HOST_STEP = Fraction(4 * 10_000, 4545)
"""T_unit of a chunk's D and S, fitted to Figure 14: the two idle backwards (4 T_unit) at PP4 hide 45.45% of it."""
PARAMETER_LOAD = HOST_STEP / 2
"""T_unit of P: half of D and S, as Figure 8 draws it."""


@dataclass(frozen=True)
class Method:
    """A schedule with its recomputation and offload, as compared in the figures."""

    name: str
    schedule: str
    chunks: int
    recomputed: Fraction = Fraction(0)
    """R, the fraction of layers that recompute in full, equal on all stages; in Chronos-Recomp the shallow chunks."""
    on_host: Fraction = Fraction(0)
    """Fraction of the model whose optimizer states are offloaded."""

    @property
    def states(self) -> float:
        """Fraction of the model states that stays on the device."""
        return float(1 - self.on_host * (1 - Fraction(DEVICE_BYTES, STATE_BYTES)))

    def run(self, p: int, m: int, *, message: Number = 0, model: CommunicationModel = "latency") -> Timeline:
        """Simulate the method with times in T_unit = T_fwd / (2 p) and activations as fractions of m_a."""
        v = self.chunks
        duration, block = Fraction(2, v), Fraction(1, p * v)
        costs = StageCosts.of(
            stages=p * v,
            forward=duration,
            backward_input=duration,
            backward_weight=duration,
            activation=block,
            # The paper counts 1F1B with recomputation without the layer that is being recomputed.
            recompute_workspace=0,
            communication=message,
            communication_model=model,
        )
        made = schedules[self.schedule](devices=p, micro_batches=m, chunks=v, costs=costs)
        if self.recomputed and not made.explicit_recompute:
            shares = dict.fromkeys(range(p * v), self.recomputed)
            made = replace(made, fused_recompute=frozenset(shares), recompute_fraction=shares)
        if self.on_host:
            made = offload_states(made, chunks=[v - 1])
            costs = costs.replace(host_step=HOST_STEP, parameter_load=PARAMETER_LOAD)
        return simulate(made, costs)

    def activations(self, p: int) -> float:
        """Device 0's peak of activations as a fraction of m_a."""
        return _activations(self, p)


@cache
def _activations(method: Method, p: int) -> float:
    return float(method.run(p, 3 * p).peak_memory[0])


PLAIN = Method("1F1B", "1f1b", 1)
HALF = Method("1F1B + R = 50%", "1f1b", 1, Fraction(1, 2))
FULL = Method("1F1B + R = 100%", "1f1b", 1, Fraction(1))
INTERLEAVED = Method("interleaved 1F1B", "interleaved", 2)
INTERLEAVED_HALF = Method("interleaved 1F1B + R = 50%", "interleaved", 2, Fraction(1, 2))
INTERLEAVED_RECOMPUTED = Method("interleaved 1F1B + R = 66.7%", "interleaved", 2, Fraction(2, 3))
CHRONOS = Method("Chronos-Pipe", "chronos", 2)
RECOMP = Method("Chronos-Pipe + Chronos-Recomp", "chronos-recomp", 2, Fraction(1, 2))
ALL = Method("ChronosPipe ALL", "chronos-recomp", 2, Fraction(1, 2), on_host=Fraction(1, 2))


def percent(share: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100 * share:.4g}%"
