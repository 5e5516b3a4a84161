"""What a training step takes beside its pipeline: summing gradients over the data-parallel ranks, and the optimizer.

What the program does itself (G, S) is priced there and overlaps.  The rest follows the pipeline, as in Megatron-LM
without `--overlap-grad-reduce`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from debubble.costs.cluster import Cluster
from debubble.costs.efficiency import share
from debubble.costs.operators import MEGATRON, Framework
from debubble.costs.optimizer_states import element_bytes, step_operations, step_traffic
from debubble.costs.parallel_layout import Layout
from debubble.costs.speed import Speed
from debubble.ir import Kind, RunOptions, Schedule
from debubble.models.config import ModelConfig


def step_tail(
    model: ModelConfig,
    cluster: Cluster,
    options: RunOptions,
    *,
    pipeline: int | None = None,
    framework: Framework = MEGATRON,
    schedule: Schedule | None = None,
) -> float:
    """Seconds from the last backward to the end of the step, on a device with its even share of the parameters.

    `schedule`: what it sums (G) or steps (S) itself, device or host, is not in the tail; None: nothing.
    """
    tail = StepTail(model=model, cluster=cluster, options=options, pipeline=pipeline, framework=framework)
    return tail.of(schedule)


@dataclass(frozen=True, kw_only=True)
class StepTail:
    """What a model's step takes after its pipeline, by what the schedule has done inside the pipeline already."""

    model: ModelConfig
    cluster: Cluster
    options: RunOptions
    pipeline: int | None = None
    framework: Framework = MEGATRON

    def of(self, schedule: Schedule | None) -> float:
        """Seconds after this schedule's pipeline; None: after one without G and S."""
        return self._seconds(unsummed=_left(schedule, Kind.G), unstepped=_left(schedule, Kind.S))

    @property
    def least(self) -> float:
        """Seconds after any schedule's pipeline at least: with all gradients summed and all stages stepped inside."""
        return self._seconds(unsummed=0.0, unstepped=0.0)

    def _seconds(self, *, unsummed: float, unstepped: float) -> float:
        """The tail of a device that has left these shares of its gradients and its optimizer step to it."""
        options = self.options
        layout = Layout.of(self.cluster, options, self.pipeline)
        speed = Speed(self.cluster.slowest, element_bytes(options.dtype))
        parameters = self.model.trained_parameters(options.lora) / layout.pipeline / options.tensor
        ranks = options.data * options.context
        scattered = scattered_bytes(options, gradient=self.framework.gradient_bytes if speed.element == 2 else 4)
        gathered = speed.element if options.zero else 0
        # ZeRO-3 scatters and gathers with every micro-batch, inside the pipeline.
        moved = 0.0 if options.zero >= 3 else parameters * (scattered * unsummed + gathered)
        reduce = speed.gather(moved, ranks, beside=beside(speed, options))
        shards = ranks if options.zero else 1
        stepped = parameters / shards * unstepped
        matrices = self.model.matrix_parameters(options.lora) / layout.pipeline / options.tensor / shards * unstepped
        launch = speed.hardware.efficiency.launch if stepped else 0.0
        return reduce + launch + step_seconds(self.model, speed, options, self.framework, stepped, matrices=matrices)


def step_seconds(
    model: ModelConfig, speed: Speed, options: RunOptions, framework: Framework, parameters: float, *, matrices: float
) -> float:
    """The optimizer step of so many parameters, so many of which are in matrices that Muon orthogonalizes.

    The smaller side of these matrices is taken to be the hidden size (or the rank of LoRA), which is the most that it
    can be; embedding and head, which are Adam's beside Muon, count with Muon's traffic.
    """
    side = options.lora or model.hidden
    traffic = step_traffic(options, gradient_bytes=framework.gradient_bytes) / speed.traffic
    pace = speed.hardware.flops * share(speed.hardware.efficiency.matmul, side)
    return parameters * traffic + matrices * step_operations(options, side=side) / pace


def scattered_bytes(options: RunOptions, *, gradient: float) -> float:
    """Bytes per parameter that a ring carries to sum gradients of `gradient` bytes.

    ZeRO scatters them once, and gathers weights after the step; an all-reduce does both with gradients.
    """
    return gradient if options.zero else 2 * gradient


def beside(speed: Speed, options: RunOptions) -> int:
    """Data- and context-parallel ranks that share a node: tensor-parallel ones are between them."""
    return max(1, min(options.data * options.context, speed.hardware.devices_per_node // options.tensor))


def _left(schedule: Schedule | None, kind: Kind) -> float:
    """The largest share of a device's stages for which the schedule has no operation of this kind."""
    if schedule is None:
        return 1.0
    done = {op.stage for op in schedule.operations if op.kind is kind}
    return max(_share_outside(held, done) for held in schedule.placement.stages_of)


def _share_outside(stages: Collection[int], done: Collection[int]) -> float:
    return sum(stage not in done for stage in stages) / len(stages) if stages else 0.0
