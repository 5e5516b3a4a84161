"""The mapping of a run's ranks to pipeline devices and nodes, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from debubble.costs.devices.cluster import Cluster, slowest
from debubble.costs.devices.known_hardware import Hardware
from debubble.ir import InputError, RunOptions


@dataclass(frozen=True)
class Layout:
    """Ranks in Megatron-LM's order: tensor varies fastest, then context, data and pipeline."""

    cluster: Cluster
    ranks: int
    """Ranks per pipeline device."""
    pipeline: int
    """Number of pipeline devices."""

    @staticmethod
    def from_options(cluster: Cluster, options: RunOptions, pipeline: int | None) -> Layout:
        """The layout for these degrees (`pipeline` None: all that remain); InputError if they do not fit."""
        for name in ("tensor", "context", "data", "expert", "expert_tensor"):
            degree = getattr(options, name)
            if degree is not None and degree < 1:
                raise InputError(f"The {name.replace('_', '-')}-parallel degree must be at least 1, not {degree}.")
        ranks = options.tensor * options.context * options.data
        if options.expert_tensor not in (None, options.tensor):
            if options.tensor % options.expert_shards or ranks % (options.expert * options.expert_shards):
                raise InputError(
                    f"{options.expert} expert-parallel x {options.expert_shards} expert-tensor-parallel ranks do not"
                    f" divide the {options.tensor} tensor- x {options.data} data- x {options.context} context-parallel"
                    " ones."
                )
        elif (options.data * options.context) % options.expert:
            unsharded = options.tensor > 1 and ranks % options.expert == 0
            advice = f"with --expert-tensor 1 they divide all {ranks} of a stage" if unsharded else "give more of these"
            raise InputError(
                f"{options.expert} expert-parallel ranks do not divide the {options.data} x {options.context} data- and"
                f" context-parallel ones: {advice}."
            )
        if pipeline is None:
            if cluster.count % ranks:
                raise InputError(
                    f"{cluster.count} devices cannot be divided into groups of {ranks} (tensor {options.tensor} x"
                    f" context {options.context} x data {options.data}); choose degrees whose product divides"
                    f" {cluster.count}."
                )
            pipeline = cluster.count // ranks
        if pipeline < 1:
            raise InputError(f"A pipeline needs at least one device, not {pipeline}.")
        if pipeline * ranks > cluster.count:
            raise InputError(
                f"{pipeline} pipeline devices of {ranks} ranks each need {pipeline * ranks} devices, but the cluster"
                f" has {cluster.count}."
            )
        return Layout(cluster, ranks, pipeline)

    def check_all_used(self, options: RunOptions) -> None:
        """Raise InputError, with other degrees as advice, if the degrees leave devices idle."""
        count, used = self.cluster.count, self.pipeline * self.ranks
        if used == count:
            return
        specified = {name: getattr(options, name) for name in ("tensor", "context", "data")}
        degrees = {**{name: n for name, n in specified.items() if n > 1}, "pipeline": self.pipeline}
        words = " ".join(f"--{name} {n}" for name, n in degrees.items())
        better = [
            " ".join(f"--{name} {n}" for name, n in choice.items()) for choice in self._degrees_that_fill(options)
        ]
        advice = f"{' or '.join(better)} uses all" if better else f"choose degrees whose product is {count}"
        raise InputError(
            f"{words} {'use' if len(degrees) > 1 else 'uses'} {used} of {count} devices: {advice}; or give a cluster of"
            f" {used}."
        )

    def _degrees_that_fill(self, options: RunOptions) -> Iterator[dict[str, int]]:
        """Degrees that use all devices: a longer pipeline, or more replicas with the same or a shorter pipeline."""
        count = self.cluster.count
        if count % self.ranks == 0:
            yield {"pipeline": count // self.ranks}
        replica = options.tensor * options.context
        for pipeline in range(self.pipeline, 0, -1):
            data, rest = divmod(count, pipeline * replica)
            if not rest and (replica * data) % (options.expert * options.expert_shards) == 0:
                shorter = {"pipeline": pipeline} if pipeline < self.pipeline else {}
                yield {**shorter, "data": data}
                return

    @property
    def across_nodes(self) -> bool:
        """True if some message between pipeline neighbours leaves its node."""
        return self.ranks * self.pipeline > self.cluster.slowest.devices_per_node

    def degrees_across_nodes(self, options: RunOptions) -> list[str]:
        """The degrees whose rank groups span several nodes."""
        o = options
        ends = {
            "tensor": (o.tensor, o.tensor),
            "context": (o.context, o.tensor * o.context),
            "data": (o.data, self.ranks),
            "expert": (o.expert, o.expert * o.expert_shards),
            "pipeline": (self.pipeline, self.ranks * self.pipeline),
        }
        in_node = self.cluster.slowest.devices_per_node
        return [name for name, (degree, end) in ends.items() if degree > 1 and end > in_node]

    @property
    def pipeline_devices_per_node(self) -> int:
        """Pipeline devices per node; 1 if the ranks of some pipeline device span two nodes."""
        devices, rest = divmod(self.cluster.slowest.devices_per_node, self.ranks)
        return 1 if rest else devices

    @property
    def ranks_per_host_link(self) -> int:
        """Ranks of one pipeline device that share a host link, and use it concurrently."""
        return math.gcd(self.cluster.slowest.devices_per_switch, self.ranks)

    @property
    def link_groups(self) -> tuple[tuple[int, ...], ...]:
        """Groups of pipeline devices that share a host link."""
        size = self.cluster.slowest.devices_per_switch // self.ranks_per_host_link
        if self.ranks > 1 or size == 1:
            return ()
        return tuple(
            tuple(range(first, min(first + size, self.pipeline))) for first in range(0, self.pipeline - 1, size)
        )

    @property
    def slowest_ranks(self) -> tuple[Hardware, ...]:
        """The slowest type among the ranks of every pipeline device, which sets its speed."""
        types = self.cluster.types
        if self.cluster.is_homogeneous:
            return types[: self.pipeline]
        return tuple(slowest(types[d * self.ranks : (d + 1) * self.ranks]) for d in range(self.pipeline))

    @property
    def memory_limit(self) -> tuple[int, ...]:
        """The memory limit of every pipeline device, the minimum over its ranks; one entry if all are equal."""
        limits = self.cluster.memory_limits
        devices = tuple(min(limits[d * self.ranks : (d + 1) * self.ranks]) for d in range(self.pipeline))
        return devices[:1] if len(set(devices)) == 1 else devices
