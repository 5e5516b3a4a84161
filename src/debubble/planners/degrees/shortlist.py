"""Shortlist of choices of degrees for jobs where nothing fits, made without building a model's units.

A choice represents all its micro-batch sizes, of which the smallest takes the least memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.costs.step import parameter_bytes
from debubble.ir.degrees import Degrees
from debubble.models.vision import as_trained
from debubble.planners.degrees.space import Job, configurations, without_batch_size
from debubble.planners.model_problem import framework_of

MAX_CHOICES = 200
"""Length of the shortlist; the units of one choice take some milliseconds to build."""


@dataclass(frozen=True)
class Shortlist:
    """The most promising choices of degrees.

    Attributes:
        choices: The choices with their smallest micro-batches, most promising first.
        by_size: Choice without micro-batch size (`without_batch_size`) -> the choices that it represents.
    """

    choices: Sequence[Degrees]
    by_size: Mapping[Degrees, Sequence[Degrees]]

    def sizes_of(self, degrees: Degrees) -> Sequence[Degrees]:
        """The choice with every legal micro-batch size."""
        return self.by_size[without_batch_size(degrees)]


def shortlist(job: Job, *, cpu_optimizer: bool = False) -> Shortlist:
    """The choices whose states may fit a device, in order of increasing communication.

    Args:
        job: The job.
        cpu_optimizer: Whether optimizer states may be on the host.

    Raises:
        InputError: if no choice is legal.
    """
    by_size: dict[Degrees, list[Degrees]] = {}
    for degrees in configurations(job):
        by_size.setdefault(without_batch_size(degrees), []).append(degrees)
    limit = max(job.cluster.memory_limits)
    smallest = (min(group, key=lambda degrees: degrees.micro_batch_size) for group in by_size.values())
    fitting = [degrees for degrees in smallest if min_state_bytes(job, degrees, cpu_optimizer=cpu_optimizer) <= limit]
    return Shortlist(sorted(fitting, key=_communication)[:MAX_CHOICES], by_size)


def min_state_bytes(job: Job, degrees: Degrees, *, cpu_optimizer: bool = False) -> float:
    """Lower bound on the bytes of states on the fullest device: an even share of the pipeline's states."""
    options = job.run_options(degrees)
    model = as_trained(job.model, options)
    if options.quantize is not None:
        return 0.0
    experts = sum(model.expert_parameters(layer) for layer in range(model.layers))
    dense = model.parameters - experts
    ranks, expert_ranks = degrees.data * degrees.context, degrees.expert * options.expert_shards
    dense_shards, expert_shards = ranks, max(1.0, ranks * degrees.tensor / expert_ranks)
    total = 0.0
    for parameters, frozen, divided, shards in (
        (dense, dense if options.lora else model.frozen_parameters, degrees.tensor, dense_shards),
        (experts, experts if options.lora else 0, expert_ranks, expert_shards),
    ):
        size = parameter_bytes(options, shards=shards, framework=framework_of(options, job.target))
        trained = size.total - size.optimizer * cpu_optimizer
        total += ((parameters - frozen) * trained + frozen * size.frozen.total) / divided
    return total / degrees.pipeline


def _communication(degrees: Degrees) -> tuple[int, int, int]:
    """Sort key: few tensor- and context-parallel ranks, then a low ZeRO level, then a short pipeline."""
    return degrees.tensor * degrees.context, max(degrees.zero - 1, 0), degrees.pipeline
