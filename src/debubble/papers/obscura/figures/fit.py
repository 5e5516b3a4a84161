"""The models of Obscura's evaluation, 13B to 28B on eight A100-80GB, with inputs fitted to the paper's statements.

Sizes are in GB; the unit of time is the forward of one layer at sequence length 4096 and micro-batch size 1.

* Memory: at 28B "stage 0 takes twice the memory of stage 7" and "BPipe without MLP recomputation takes 106 GB" give
  W + 8 a = 2 (W + a) and W + 5 a = 106: a = 9.636 and W = 57.82 per stage.  Other sizes follow by layers (a) and
  parameters (W).
* Llama-2's gate and up projections are 0.394 of a layer's forward operations, which matches the 13% more compute in
  the text.  MLP recomputation stores 0.367 of a, fitted to Table 1.
* The cheap operators take 0.075 of a forward (text: 2-3% of a step).  With them 0.69 of a is stored, fitted to the
  adjusted stages 0-2 at 23B; the text's 0.6 would adjust only two stages.
* GPT-3's recomputation takes 0.2 of a forward, its cheap operators 0.03: fitted to the text's 1.30 at 28B.  Our cost
  model gives 0.305 and 0.042 (`computed_gpt`); `debubble reproduce obscura` shows the difference.
* The host link has 25 GB/s (PCIe 4.0 x16); compute runs at 60% of an A100's peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from debubble.costs import Cluster, model_units
from debubble.costs.unit import Strategy, Unit
from debubble.costs.units import Units
from debubble.ir import RunOptions
from debubble.models import Model, models
from debubble.planners.problem import ModelUnits, Problem

DEVICES = 8
LAYERS = {"13B": 40, "18B": 56, "23B": 72, "28B": 88}
LAYER_PARAMETERS, TABLE_PARAMETERS = 0.3172, 0.3277
"""Billions of parameters: one Llama-2 layer (h = 5120, ffn = 13824); embedding and head together."""
ACTIVATION, STATIC = 9.636, 57.82
"""a and W of one stage at 28B."""
MESSAGE = 0.68
"""Time of a P2P message: 0.068 of a forward of Figure 5's stages, which have ten layers (13B on four devices)."""
BANDWIDTH = 25 * 2.943 / (0.6 * 312)
"""GB per unit of time, a layer's forward being 2.943 TFLOP."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """Recomputation of one layer: time as a fraction of its forward, stored bytes as a fraction of its activation."""

    cheap_time: float
    mlp_time: float
    cheap_kept: float = 0.69
    mlp_kept: float = 0.367
    full_kept: float = 0.048


LLAMA = Family(cheap_time=0.075, mlp_time=0.394)
GPT = Family(cheap_time=0.03, mlp_time=0.2)
FAMILIES = {"Llama-2": LLAMA, "GPT-3": GPT}
ATTENTION_TIME, ATTENTION_ACTIVATION = 0.409, 0.3
"""The attention half-layer's fraction of a layer's time and activation."""


def computed_gpt() -> Family:
    """GPT-3's recompute times by our cost model, at 28B on A100-80GB; the stored fractions stay fitted."""
    attention, mlp = _computed_layer("gpt3-28b")
    forward = float(attention.forward + mlp.forward)
    cheap = float(attention.strategies["cmb"].recompute + mlp.strategies["cmb"].recompute)
    return replace(GPT, cheap_time=cheap / forward, mlp_time=float(mlp.strategies["mlp"].recompute) / forward)


def computed_forward(size: str) -> float:
    """A stage's forward in seconds by our cost model: an eighth of Llama-2's layers on an A100-80GB."""
    attention, mlp = _computed_layer(f"llama2-{size.lower()}")
    return float(attention.forward + mlp.forward) * LAYERS[size] / DEVICES


def model_with_layers(family: str, layers: int) -> Model:
    """A model of the evaluation's width with a chosen number of layers."""
    key = "num_hidden_layers" if family == "Llama-2" else "n_layer"
    return Model.from_hf({**models["llama2-13b" if family == "Llama-2" else "gpt3-13b"].config, key: layers})


def _computed_layer(name: str) -> Sequence[Unit]:
    """Both halves of a model's first layer."""
    cluster = Cluster.parse(f"{DEVICES}xA100-80GB")
    return model_units(models[name], cluster, RunOptions(sequence_length=4096), pipeline=DEVICES).units[1:3]


def problem(family: str | Family, size: str, micro_batches: int, *, messages: bool = False) -> Problem:
    """One column of Figure 12; `messages` adds Figure 5's P2P message times."""
    workload = units(family, size)
    if messages:
        workload = replace(workload, communication=MESSAGE, communication_model="receiver")
    return Problem(devices=DEVICES, micro_batches=micro_batches, workload=ModelUnits(workload), chunks=1)


def units(family: str | Family, size: str) -> Units:
    """The 2 L + 2 half-layer units of a model."""
    layers, f = LAYERS[size], FAMILIES[family] if isinstance(family, str) else family
    parameters = layers * LAYER_PARAMETERS + TABLE_PARAMETERS
    largest = LAYERS["28B"] * LAYER_PARAMETERS + TABLE_PARAMETERS
    static = STATIC * DEVICES * parameters / largest / layers
    layer_activation = ACTIVATION * DEVICES / LAYERS["28B"]
    halves = _attention(f, layer_activation, static / 3), _mlp(f, layer_activation, 2 * static / 3)
    inner = [replace(half, layer=layer) for layer in range(layers) for half in halves]
    ends = [_unit(kind, 0.0, 0.0, {"none": Strategy(0.0)}) for kind in ("embedding", "head")]
    # As in the paper, an eviction starts after its full forward, and a load ends before its backward.
    return Units(units=(ends[0], *inner, ends[1]), offload_bandwidth=BANDWIDTH, memory_limit=(80,), streams=False)


def _attention(f: Family, layer_activation: float, static: float) -> Unit:
    time, activation = ATTENTION_TIME, ATTENTION_ACTIVATION * layer_activation
    strategies = {
        "none": Strategy(activation),
        "cmb": Strategy(activation * f.cheap_kept, f.cheap_time * time),
        "full": Strategy(f.full_kept / 2 * layer_activation, time),
    }
    return _unit("attention", time, static, strategies)


def _mlp(f: Family, layer_activation: float, static: float) -> Unit:
    time, activation = 1 - ATTENTION_TIME, (1 - ATTENTION_ACTIVATION) * layer_activation
    strategies = {
        "none": Strategy(activation),
        "cmb": Strategy(activation * f.cheap_kept, f.cheap_time * time),
        "mlp": Strategy((f.mlp_kept - ATTENTION_ACTIVATION) * layer_activation, f.mlp_time),
        "full": Strategy(f.full_kept / 2 * layer_activation, time),
    }
    return _unit("mlp", time, static, strategies)


def _unit(kind: str, time: float, static: float, strategies: dict[str, Strategy]) -> Unit:
    return Unit(
        type=kind, layer=None, forward=time, backward_input=time, backward_weight=time, static=static,
        strategies=strategies,
    )  # fmt: skip
