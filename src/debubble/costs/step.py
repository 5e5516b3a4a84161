"""What a training step takes beside its pipeline: reducing gradients over the data-parallel ranks, and the optimizer.

Neither is overlapped with the pipeline here, as in Megatron-LM without `--overlap-grad-reduce`.
"""

from __future__ import annotations

from debubble.costs.cluster import Cluster
from debubble.costs.layout import Layout
from debubble.costs.model import Model
from debubble.costs.operators import MEGATRON, Framework
from debubble.costs.speed import Speed
from debubble.costs.states import element_bytes
from debubble.ir import RunOptions


def step_tail(
    model: Model,
    cluster: Cluster,
    options: RunOptions,
    *,
    pipeline: int | None = None,
    framework: Framework = MEGATRON,
) -> float:
    """Seconds from the last backward to the end of the step, on a device with its even share of the parameters."""
    layout = Layout.of(cluster, options, pipeline)
    speed = Speed(cluster.slowest, element_bytes(options.dtype))
    parameters = model.trained_parameters(options.lora) / layout.pipeline / options.tensor
    ranks = options.data * options.context
    # A ring of n ranks scatters gradients once and gathers weights once; an all-reduce does both with gradients.
    gradient = framework.gradient_bytes if speed.element == 2 else 4
    moved = parameters * (2 * gradient if options.zero == 0 else gradient + speed.element)
    beside = max(1, min(ranks, speed.hardware.devices_per_node // options.tensor))
    reduce = speed.gather(moved, ranks, beside=beside)
    # Adam reads gradient, weight, master and moments, and writes all but the gradient.
    return reduce + speed.stream(30 * parameters / (ranks if options.zero else 1))
