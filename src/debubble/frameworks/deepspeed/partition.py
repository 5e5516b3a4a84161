"""DeepSpeed's partition of optimizer states, and of a pipeline's layers: `uniform`, `parameters`, or `type:REGEX`.

The list of layers is assumed to be the embedding, the decoder layers, the final norm and the head, as in
Megatron-DeepSpeed, whose head shares the embedding's class.  Source: deepspeed/runtime/pipe/module.py,
`_partition_layers`, and `partition_uniform` and `partition_balanced` of deepspeed/runtime/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from debubble.ir import InputError
from debubble.models import Model

DEFAULT_METHOD = "parameters"
"""PipelineModule's default partition method."""


def partitioned_layers(method: str, model: Model, stages: int) -> tuple[int, ...]:
    """Decoder layers per stage.

    Args:
        method: DeepSpeed's partition_method.
        model: The model.
        stages: Pipeline devices.

    Raises:
        InputError: if the method is unknown, or matches no layer.
    """
    if stages > model.layers + 2:
        raise InputError(f"{model.layers} layers cannot fill {stages} stages.")
    kind, _, pattern = method.lower().partition(":")
    layers = model.layers
    if kind == "uniform":
        bounds = _uniform(layers + 3, stages)
    elif kind == "parameters":
        table = model.vocab * model.hidden
        parameters = (model.layer_parameters(layer) for layer in range(layers))
        bounds = _balanced([table, *parameters, model.hidden, table], stages)
    elif kind == "type" and pattern:
        bounds = _balanced(_of_type(pattern, layers), stages)
    else:
        raise InputError(f"DeepSpeed's partition method '{method}' is not read; uniform, parameters and type:NAME are.")
    counts = tuple(min(end, layers + 1) - min(max(begin, 1), layers + 1) for begin, end in pairwise(bounds))
    if 0 in counts[1:-1]:
        raise InputError(f"{method} leaves stages of the {stages} without layers, which are not read here.")
    return counts


def divided_states(stage: int, dtype: str) -> int:
    """The effective ZeRO level: DeepSpeed's bf16 optimizer shards its states even at stage 0."""
    return max(stage, 1) if dtype == "bf16" else stage


def _of_type(pattern: str, layers: int) -> list[int]:
    """Weights of the layers: 1 if the pattern matches the layer's class."""
    try:
        matched = re.compile(pattern)
    except re.error as error:
        raise InputError(f"DeepSpeed's partition method 'type:{pattern}' is no pattern: {error}.") from error
    classes = ["embeddingpipe", *["paralleltransformerlayerpipe"] * layers, "mixedfusedlayernorm", "embeddingpipe"]
    weights = [int(matched.search(name) is not None) for name in classes]
    if not any(weights[1:-2]):
        raise InputError(
            f"DeepSpeed's partition method 'type:{pattern}' matches none of the decoder layers by the class names that"
            " are known here: give --model and a layout of your own with `plan`."
        )
    return weights


def _uniform(items: int, stages: int) -> list[int]:
    """The bounds of an even split, with the remainder on the first stages."""
    quotient, remainder = divmod(items, stages)
    return [0, *accumulate(quotient + (stage < remainder) for stage in range(stages))]


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """The bounds that minimize the difference of the heaviest and the lightest stage; ties take the latest cut."""
    sums = [0, *accumulate(weights)]
    count = len(weights)
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, float("inf"), 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(stage, count + 1):
            for begin, (max_weight, min_weight, _) in best[-1].items():
                if begin >= end:
                    continue
                weight = sums[end] - sums[begin]
                heaviest, lightest = max(max_weight, weight), min(min_weight, weight)
                if end not in row or heaviest - lightest <= row[end][0] - row[end][1]:
                    row[end] = (heaviest, lightest, begin)
        best.append(row)
    bounds = [count]
    for row in reversed(best[1:]):
        bounds.append(row[bounds[-1]][2])
    return bounds[::-1]
