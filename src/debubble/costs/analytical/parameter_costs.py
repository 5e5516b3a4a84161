"""The costs of a unit's parameters on one device: bytes of model states, and seconds of collectives and optimizer step.

ZeRO shards states over data- and context-parallel ranks.  Its collectives (gradients are reduced, weights gathered) run
once per step, or in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from debubble.costs.analytical.operators import Shapes
from debubble.costs.step import (
    HOST_MEMORY_BANDWIDTH,
    ParameterBytes,
    expert_replicas_in_node,
    parameter_bytes,
    ranks_in_node,
    scattered_bytes,
    step_seconds,
    step_traffic,
)
from debubble.costs.unit import HostStates, StateBytes, Unit
from debubble.ir import RunOptions
from debubble.models.quantization import quantized_bytes


class Counts(NamedTuple):
    """The numbers of a unit's parameters: outside experts, in experts, and in LoRA's adapters.

    `matrices` lists the sizes of the linear layers with an adapter, which may be quantized; they count in `dense`.
    """

    dense: int
    experts: int = 0
    adapters: int = 0
    matrices: tuple[int, ...] = ()


_LocalParameters = list[tuple[float, ParameterBytes]]
"""Numbers of parameters on one device, with the bytes per parameter."""


OVERLAP_SLOWDOWN = 0.3
"""Seconds that a second of a collective adds to the computing that it overlaps with, whose multiprocessors and memory
bandwidth it uses.  Fitted to the 45 runs of FSDP and ZeRO-2 in the fit half of the published runs: the median error of
their steps is 4.0% with it and 6.1% without, and 7.7% and 9.7% for the 41 held-out runs."""
OVERLAP_TRAFFIC = 6
"""Upper limit of the slowdown, as a multiple of the seconds in which the collective's bytes pass device memory: over
slow networks a collective mostly waits.  Set by two runs with 6 GB/s per device, one of each half."""


class ShardWaits(NamedTuple):
    """Seconds that the collectives of ZeRO-2 and FSDP add to a unit's computing."""

    forward: float
    backward: float


@dataclass(frozen=True)
class ParameterCosts:
    """The costs of parameters for one run's degrees, ZeRO level and optimizer."""

    shapes: Shapes

    def with_parameters(self, unit: Unit, counts: Counts, *, matrices: bool = False) -> Unit:
        """The unit with these parameters; Muon orthogonalizes the gradients of `matrices`."""
        s, local = self.shapes, self._local_parameters(counts, self.shapes.options)
        stepped = self._stepped_parameters(local)
        orthogonalized = stepped if matrices else 0.0
        return replace(
            unit,
            static=sum(count * size.total for count, size in local),
            states=StateBytes(
                weights=sum(count * size.weight for count, size in local),
                gradients=sum(count * size.gradient for count, size in local),
                optimizer=sum(count * size.optimizer for count, size in local),
            ),
            on_host=self._on_host(counts, stepped),
            hosted=sum(count * size.hosted for count, size in local),
            gradient_reduce=self._gradient_reduce(local),
            optimizer_step=step_seconds(s.model, s.speed, s.options, s.framework, stepped, matrices=orthogonalized),
            parameter_gather=self._gather_seconds(local) if self._gathers_stages else 0.0,
            gathered=sum(count * self._gathered_bytes(size) for count, size in local) if self._gathers_stages else 0,
            undivided=sum(count * (size.summed - size.gradient) for count, size in local),
        )

    def per_stage(self) -> dict[str, float]:
        """Seconds per step, by name, that every stage takes in addition to its units."""
        latency, _ = self._ring
        step = {"optimizer_step": self.shapes.speed.hardware.efficiency.launch}
        gather = {"parameter_gather": latency} if self._gathers_stages else {}
        return {**step, "gradient_reduce": latency, **gather} if self._ranks > 1 else step

    @property
    def _ranks(self) -> int:
        """The number of ranks over which ZeRO shards states."""
        return self.shapes.options.data * self.shapes.options.context

    @property
    def _ring(self) -> tuple[float, float]:
        """Latency and bytes per second of the ring of ZeRO's ranks."""
        return self.shapes.speed.ring(self._ranks, alongside=ranks_in_node(self.shapes.speed, self.shapes.options))

    def _bandwidth(self, size: ParameterBytes) -> float:
        """Bytes per second of the ring of the ranks that share a parameter."""
        if not size.of_experts:
            return self._ring[1]
        speed, ranks = self.shapes.speed, max(1, round(size.shards))
        return speed.ring(ranks, alongside=expert_replicas_in_node(speed, self.shapes.options))[1]

    def _ring_seconds(self, local: _LocalParameters, moved: Callable[[ParameterBytes], float]) -> float:
        """Seconds to move `moved` bytes per parameter around the ring of the ranks that share the parameter."""
        return sum(
            count * moved(size) * (size.shards - 1) / size.shards / self._bandwidth(size)
            for count, size in local
            if count
        )

    def _gradient_reduce(self, local: _LocalParameters) -> float:
        """Seconds per step to reduce gradients."""
        o = self.shapes.options
        return self._ring_seconds(local, lambda size: scattered_bytes(o, gradient=size.summed) if size.summed else 0.0)

    def _stepped_parameters(self, local: _LocalParameters) -> float:
        """Number of parameters that the optimizer of one rank updates on the device."""
        options = self.shapes.options
        sharded = sum(count / (size.shards if options.zero else 1) for count, size in local if size.summed)
        return sharded * (1 - options.host_optimizer)

    def waits(self, forward: float, backward: float, counts: Counts) -> ShardWaits:
        """Waits of one micro-batch for the collectives of gradients (ZeRO-2) and weights (FSDP).

        Gradients are reduce-scattered after each backward; FSDP gathers weights before the forward and again before the
        backward.  They overlap with the computing of neighboring units (FSDP's prefetch), which they slow down
        (`OVERLAP_SLOWDOWN`); only a collective that takes longer is waited for.
        """
        if self.shapes.options.zero < 2 or self._ranks == 1:
            return ShardWaits(0.0, 0.0)
        latency, _ = self._ring
        local = self._local_parameters(counts, self.shapes.options)
        summed = sum(count * size.summed for count, size in local)
        scatter = latency + self._ring_seconds(local, lambda size: size.summed)
        gather = gathered = copied_out = copied_in = 0.0
        if self._gathers_units:
            gather = latency + self._gather_seconds(local)
            gathered = sum(count * self._gathered_bytes(size) for count, size in local)
        if self._gathers_units and self.shapes.framework.copies_gathered:
            # Weights are read and written; gradients are read in the run's dtype and written in that of their sum.
            trained = sum(count for count, size in local if size.summed)
            copied_out = self.shapes.speed.stream(2 * gathered)
            copied_in = self.shapes.speed.stream(self.shapes.element * trained + summed)
        return ShardWaits(
            copied_out + self._wait(gather, forward, moved=gathered),
            copied_out + copied_in + self._wait(gather + scatter, backward, moved=gathered + summed),
        )

    def _wait(self, collectives: float, computing: float, *, moved: float) -> float:
        """Seconds that collectives of `moved` bytes add to the computing that they overlap with."""
        traffic = moved / self.shapes.speed.hardware.memory_bandwidth
        slowdown = min(OVERLAP_SLOWDOWN * min(collectives, computing), OVERLAP_TRAFFIC * traffic)
        return max(0.0, collectives - computing) + slowdown

    @property
    def _divides_weights(self) -> bool:
        return self.shapes.options.zero >= 3 and self._ranks > 1

    @property
    def _gathers_units(self) -> bool:
        return self._divides_weights and self.shapes.framework.gathers_units

    @property
    def _gathers_stages(self) -> bool:
        return self._divides_weights and not self.shapes.framework.gathers_units

    def _gather_seconds(self, local: _LocalParameters) -> float:
        """Seconds to gather parameters that ZeRO-3 shards."""
        return self._ring_seconds(local, self._gathered_bytes)

    def _gathered_bytes(self, size: ParameterBytes) -> float:
        return self.shapes.element if size.quantized is None else size.quantized

    def gathered_unit(self, parameters: float, matrices: Sequence[int] = ()) -> float:
        """Bytes of weights that FSDP gathers; `matrices` lists the sizes of those that may be quantized."""
        s = self.shapes
        if not self._gathers_units:
            return 0.0
        size = s.element * parameters
        if s.options.quantize:
            size += sum(quantized_bytes(s.options.quantize, n) - s.element * n for n in matrices)
        return size / s.options.tensor

    def _on_host(self, counts: Counts, stepped: float) -> HostStates | None:
        """Costs with an offloaded optimizer: weights and gradients stay on the device, and a rank moves its shard.

        None with `--host-optimizer`, which offloads a fixed fraction of all states.

        The host steps before the norm of all gradients is known, so it keeps a copy for post-validation.  Its step
        takes the time of its memory traffic; Muon's products are neglected.
        """
        if self.shapes.options.host_optimizer:
            return None
        o = replace(self.shapes.options, post_validation=True, host_optimizer=1.0)
        local = self._local_parameters(counts, o)
        share = 1 / self._ranks if o.zero else 1.0
        gradients = sum(count * size.gradient for count, size in local) * (1.0 if o.zero >= 2 else share)
        weights = sum(count * size.weight for count, size in local if size.gradient) * (1.0 if o.zero >= 3 else share)
        traffic = step_traffic(o, framework=self.shapes.framework)
        return HostStates(
            static=sum(count * (size.weight + size.gradient) for count, size in local),
            gradients=gradients,
            parameters=weights,
            step=traffic * stepped / HOST_MEMORY_BANDWIDTH,
        )

    def _local_parameters(self, counts: Counts, o: RunOptions) -> _LocalParameters:
        """Parameters on one device with their bytes; ZeRO shards an expert over the ranks that have the same one.

        With LoRA all but the adapters are frozen; a frozen vision tower has none.
        """
        framework, shards = self.shapes.framework, self._ranks
        dense = parameter_bytes(o, shards=shards, framework=framework)
        expert_ranks = o.expert * o.expert_shards
        of_experts = parameter_bytes(o, shards=o.tensor * shards / expert_ranks, framework=framework)
        of_experts = replace(of_experts, of_experts=True)
        if framework.defers_gradients:
            dense, of_experts = (replace(kind, gradient=kind.summed) for kind in (dense, of_experts))
        if o.lora or self.shapes.frozen:
            matrices = [weights / o.tensor for weights in counts.matrices] if o.quantize else []
            weight_shards = shards if o.zero >= 3 else 1
            sizes = [quantized_bytes(o.quantize or "", n) / n for n in matrices]
            return [
                (counts.dense / o.tensor - sum(matrices), dense.frozen),
                *(
                    (n, replace(dense.frozen, weight=size / weight_shards, quantized=size))
                    for n, size in zip(matrices, sizes, strict=True)
                ),
                (counts.experts / expert_ranks, of_experts.frozen),
                (counts.adapters / o.tensor, dense),
            ]
        return [(counts.dense / o.tensor, dense), (counts.experts / expert_ranks, of_experts)]
