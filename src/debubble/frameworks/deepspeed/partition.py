"""DeepSpeed's partition of optimizer states, and of a pipeline's layers: `uniform`, `parameters`, or `type:REGEX`.

Its list of layers is taken to be the embedding, the decoder layers, the last norm and the head, as in
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
        InputError: if there is no such method, or nothing that it counts.
    """
    if stages > model.layers + 2:
        raise InputError(f"{model.layers} layers cannot fill {stages} stages.")
    kind, _, pattern = method.lower().partition(":")
    layers = model.layers
    if kind == "uniform":
        bounds = _uniform(layers + 3, stages)
    elif kind == "parameters":
        table = model.vocab * model.hidden
        own = (model.layer_parameters(layer) for layer in range(layers))
        bounds = _balanced([table, *own, model.hidden, table], stages)
    elif kind == "type" and pattern:
        bounds = _balanced(_of_type(pattern, layers), stages)
    else:
        raise InputError(f"DeepSpeed's partition method '{method}' is not read; uniform, parameters and type:NAME are.")
    counts = tuple(min(end, layers + 1) - min(max(begin, 1), layers + 1) for begin, end in pairwise(bounds))
    if 0 in counts[1:-1]:
        raise InputError(f"{method} leaves stages of the {stages} without layers, which are not read here.")
    return counts


def divided_states(stage: int, dtype: str) -> int:
    """The ZeRO level of a stage: DeepSpeed's optimizer of bf16 divides its states without one too."""
    return max(stage, 1) if dtype == "bf16" else stage


def _of_type(pattern: str, layers: int) -> list[int]:
    """1 for each layer whose class the pattern matches."""
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
    """The bounds of equally many items per stage, the first ones with one more."""
    each, more = divmod(items, stages)
    return [0, *accumulate(each + (stage < more) for stage in range(stages))]


def _balanced(weights: Sequence[int], stages: int) -> list[int]:
    """The bounds for which the heaviest and the lightest stage differ least; of equal ones the latest cut."""
    sums = [0, *accumulate(weights)]
    count = len(weights)
    best: list[dict[int, tuple[float, float, int]]] = [{0: (0.0, float("inf"), 0)}]
    for stage in range(1, stages + 1):
        row: dict[int, tuple[float, float, int]] = {}
        for end in range(stage, count + 1):
            for begin, (most, least, _) in best[-1].items():
                if begin >= end:
                    continue
                weight = sums[end] - sums[begin]
                heaviest, lightest = max(most, weight), min(least, weight)
                if end not in row or heaviest - lightest <= row[end][0] - row[end][1]:
                    row[end] = (heaviest, lightest, begin)
        best.append(row)
    bounds = [count]
    for row in reversed(best[1:]):
        bounds.append(row[bounds[-1]][2])
    return bounds[::-1]
