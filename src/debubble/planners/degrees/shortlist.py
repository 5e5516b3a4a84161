"""The choices of degrees that are worth a closer look where nothing fits, found without building a model's units.

A choice stands for all sizes of its micro-batches, of which the smallest takes least memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.costs.step import parameter_bytes
from debubble.ir.degrees import Degrees
from debubble.models.vision import as_trained
from debubble.planners.degrees.space import Job, configurations, of_one_size
from debubble.planners.model_problem import framework_of

MOST_CHOICES = 200
"""Choices whose units are built; each takes some milliseconds."""


@dataclass(frozen=True)
class Shortlist:
    """Choices of degrees.

    Attributes:
        choices: Those with the smallest micro-batches, the most promising first.
        by_size: Choice for all sizes of micro-batches -> the choices that it stands for.
    """

    choices: Sequence[Degrees]
    by_size: Mapping[Degrees, Sequence[Degrees]]

    def sizes_of(self, degrees: Degrees) -> Sequence[Degrees]:
        """The choice with every size of micro-batches."""
        return self.by_size[of_one_size(degrees)]


def shortlist(job: Job, *, on_hosts: bool = False) -> Shortlist:
    """The choices whose states may fit on a device, those that exchange least first.

    Args:
        job: The job.
        on_hosts: Whether optimizer states may be on the host.

    Raises:
        InputError: if no choice is legal.
    """
    by_size: dict[Degrees, list[Degrees]] = {}
    for degrees in configurations(job):
        by_size.setdefault(of_one_size(degrees), []).append(degrees)
    limit = max(job.cluster.memory_limits)
    smallest = (min(group, key=lambda each: each.micro_batch_size) for group in by_size.values())
    roomy = [degrees for degrees in smallest if least_states(job, degrees, on_hosts=on_hosts) <= limit]
    return Shortlist(sorted(roomy, key=_exchange)[:MOST_CHOICES], by_size)


def least_states(job: Job, degrees: Degrees, *, on_hosts: bool = False) -> float:
    """Bytes of states that the fullest device of a choice has at least: its even share of the pipeline's."""
    options = job.run_options(degrees)
    model = as_trained(job.model, options)
    if options.quantize is not None:
        return 0.0
    experts = sum(model.expert_parameters(layer) for layer in range(model.layers))
    dense = model.parameters - experts
    ranks, among = degrees.data * degrees.context, degrees.expert * options.expert_shards
    dense_shards, expert_shards = ranks, max(1.0, ranks * degrees.tensor / among)
    total = 0.0
    for parameters, frozen, divided, shards in (
        (dense, dense if options.lora else model.frozen_parameters, degrees.tensor, dense_shards),
        (experts, experts if options.lora else 0, among, expert_shards),
    ):
        size = parameter_bytes(options, shards=shards, framework=framework_of(options, job.target))
        trained = size.total - size.optimizer * on_hosts
        total += ((parameters - frozen) * trained + frozen * size.frozen.total) / divided
    return total / degrees.pipeline


def _exchange(degrees: Degrees) -> tuple[int, int, int]:
    """The order of choices: few tensor- and context-parallel ranks, little to gather, short pipelines."""
    return degrees.tensor * degrees.context, max(degrees.zero - 1, 0), degrees.pipeline
