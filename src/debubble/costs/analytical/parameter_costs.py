"""The costs of a unit's parameters on one device: the bytes of their states, and the seconds of what updates them.

ZeRO divides states among data- and context-parallel ranks, and its collectives take time: once per step for what the
step divides (gradients are reduced, weights gathered), or in every micro-batch.
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
    """The numbers of a unit's parameters: of all but its experts, of the experts, and of LoRA's adapters.

    `matrices` has the weights of each linear layer with an adapter, which may be quantised; they are dense ones.
    """

    dense: int
    experts: int = 0
    adapters: int = 0
    matrices: tuple[int, ...] = ()


_Own = list[tuple[float, ParameterBytes]]
"""Numbers of parameters on one device, with the bytes of each."""


OVERLAP_SLOWDOWN = 0.3
"""Seconds by which a second of a collective slows the computing that it overlaps with, of which it takes
multiprocessors and memory bandwidth.  Fitted to the fit half of the published runs of FSDP and ZeRO-2, 45 of them: half
of their steps are within 4.0% with it and 6.1% without, and of the 41 others within 7.7% and 9.7%."""
OVERLAP_TRAFFIC = 6
"""At most so many times the seconds in which the collective's bytes pass the device's memory: over slow networks a
collective mostly waits.  Set by two runs with 6 GB/s for each device, one of each half."""


class ShardWaits(NamedTuple):
    """Seconds that a unit waits for the collectives of ZeRO-2 and FSDP, beyond its own computing."""

    forward: float
    backward: float


@dataclass(frozen=True)
class ParameterCosts:
    """The costs of parameters under one run's degrees, ZeRO level and optimizer."""

    shapes: Shapes

    def with_parameters(self, unit: Unit, counts: Counts, *, matrices: bool = False) -> Unit:
        """The unit with these parameters; of `matrices`, Muon orthogonalizes the gradients."""
        s, own = self.shapes, self._own_parameters(counts, self.shapes.options)
        stepped = self._stepped_parameters(own)
        orthogonalized = stepped if matrices else 0.0
        return replace(
            unit,
            static=sum(count * each.total for count, each in own),
            states=StateBytes(
                weights=sum(count * each.weight for count, each in own),
                gradients=sum(count * each.gradient for count, each in own),
                optimizer=sum(count * each.optimizer for count, each in own),
            ),
            on_host=self._on_host(counts, stepped),
            hosted=sum(count * each.hosted for count, each in own),
            gradient_reduce=self._gradient_reduce(own),
            optimizer_step=step_seconds(s.model, s.speed, s.options, s.framework, stepped, matrices=orthogonalized),
            parameter_gather=self._gather_seconds(own) if self._gathers_stages else 0.0,
            gathered=sum(count * self._gathered_bytes(each) for count, each in own) if self._gathers_stages else 0,
            undivided=sum(count * (each.summed - each.gradient) for count, each in own),
        )

    def per_stage(self) -> dict[str, float]:
        """Seconds per step, by name, that every stage takes next to its units."""
        latency, _ = self._ring
        step = {"optimizer_step": self.shapes.speed.hardware.efficiency.launch}
        gather = {"parameter_gather": latency} if self._gathers_stages else {}
        return {**step, "gradient_reduce": latency, **gather} if self._ranks > 1 else step

    @property
    def _ranks(self) -> int:
        """The ranks among which ZeRO divides states."""
        return self.shapes.options.data * self.shapes.options.context

    @property
    def _ring(self) -> tuple[float, float]:
        """Latency and bytes per second of the ring of these ranks."""
        return self.shapes.speed.ring(self._ranks, alongside=ranks_in_node(self.shapes.speed, self.shapes.options))

    def _bandwidth(self, each: ParameterBytes) -> float:
        """Bytes per second of the ring of the ranks that share a parameter."""
        if not each.of_experts:
            return self._ring[1]
        speed, ranks = self.shapes.speed, max(1, round(each.shards))
        return speed.ring(ranks, alongside=expert_replicas_in_node(speed, self.shapes.options))[1]

    def _moving(self, own: _Own, size: Callable[[ParameterBytes], float]) -> float:
        """Seconds of moving so many bytes of each parameter around the ring of the ranks that share it."""
        return sum(
            count * size(each) * (each.shards - 1) / each.shards / self._bandwidth(each) for count, each in own if count
        )

    def _gradient_reduce(self, own: _Own) -> float:
        """Seconds per step of summing gradients."""
        options = self.shapes.options
        return self._moving(own, lambda each: scattered_bytes(options, gradient=each.summed) if each.summed else 0.0)

    def _stepped_parameters(self, own: _Own) -> float:
        """Parameters that the optimizer of one rank updates on the device."""
        options = self.shapes.options
        divided = sum(count / (each.shards if options.zero else 1) for count, each in own if each.summed)
        return divided * (1 - options.host_optimizer)

    def waits(self, forward: float, backward: float, counts: Counts) -> ShardWaits:
        """Waits of one micro-batch for the gradients that ZeRO-2 divides, and the weights that FSDP does.

        Gradients are scattered after each backward; FSDP gathers weights before the forward and again before the
        backward.  All of it runs next to the computing of the neighbouring units (FSDP's prefetch): what takes longer
        is waited for, and the rest slows that computing (`OVERLAP_SLOWDOWN`).
        """
        if self.shapes.options.zero < 2 or self._ranks == 1:
            return ShardWaits(0.0, 0.0)
        latency, _ = self._ring
        own = self._own_parameters(counts, self.shapes.options)
        summed = sum(count * each.summed for count, each in own)
        scatter = latency + self._moving(own, lambda each: each.summed)
        gather = gathered = copied_out = copied_in = 0.0
        if self._gathers_units:
            gather = latency + self._gather_seconds(own)
            gathered = sum(count * self._gathered_bytes(each) for count, each in own)
        if self._gathers_units and self.shapes.framework.copies_gathered:
            # What is gathered is read and written; gradients are read in the run's dtype, written in that of their sum.
            trained = sum(count for count, each in own if each.summed)
            copied_out = self.shapes.speed.stream(2 * gathered)
            copied_in = self.shapes.speed.stream(self.shapes.element * trained + summed)
        return ShardWaits(
            copied_out + self._wait(gather, forward, moved=gathered),
            copied_out + copied_in + self._wait(gather + scatter, backward, moved=gathered + summed),
        )

    def _wait(self, collectives: float, computing: float, *, moved: float) -> float:
        """Seconds that computing takes longer with collectives next to it, which move so many bytes."""
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

    def _gather_seconds(self, own: _Own) -> float:
        """Seconds of gathering parameters that ZeRO-3 divides."""
        return self._moving(own, self._gathered_bytes)

    def _gathered_bytes(self, each: ParameterBytes) -> float:
        return self.shapes.element if each.quantized is None else each.quantized

    def gathered_unit(self, parameters: float, matrices: Sequence[int] = ()) -> float:
        """Bytes of whole weights that FSDP gathers; `matrices` are those of them that may be quantised."""
        s = self.shapes
        if not self._gathers_units:
            return 0.0
        size = s.element * parameters
        if s.options.quantize:
            size += sum(quantized_bytes(s.options.quantize, n) - s.element * n for n in matrices)
        return size / s.options.tensor

    def _on_host(self, counts: Counts, stepped: float) -> HostStates | None:
        """Costs with the optimizer on the host: weights and gradients stay, and each rank moves its own share.

        None where the run's options say which share of all states is there.

        The host steps before the norm of all gradients is known, so it copies what it changes.  Its step takes the time
        of its memory traffic: Muon's products are left out.
        """
        if self.shapes.options.host_optimizer:
            return None
        o = replace(self.shapes.options, post_validation=True, host_optimizer=1.0)
        own = self._own_parameters(counts, o)
        share = 1 / self._ranks if o.zero else 1.0
        gradients = sum(count * each.gradient for count, each in own) * (1.0 if o.zero >= 2 else share)
        weights = sum(count * each.weight for count, each in own if each.gradient) * (1.0 if o.zero >= 3 else share)
        traffic = step_traffic(o, framework=self.shapes.framework)
        return HostStates(
            static=sum(count * (each.weight + each.gradient) for count, each in own),
            gradients=gradients,
            parameters=weights,
            step=traffic * stepped / HOST_MEMORY_BANDWIDTH,
        )

    def _own_parameters(self, counts: Counts, o: RunOptions) -> _Own:
        """Parameters on one device with the bytes of each; ZeRO divides experts over what expert ranks leave.

        With LoRA all but the adapters are frozen.  Of a frozen vision tower all is.
        """
        framework, shards = self.shapes.framework, self._ranks
        each = parameter_bytes(o, shards=shards, framework=framework)
        between = o.expert * o.expert_shards
        of_experts = parameter_bytes(o, shards=o.tensor * shards / between, framework=framework)
        of_experts = replace(of_experts, of_experts=True)
        if framework.defers_gradients:
            each, of_experts = (replace(kind, gradient=kind.summed) for kind in (each, of_experts))
        if o.lora or self.shapes.frozen:
            matrices = [weights / o.tensor for weights in counts.matrices] if o.quantize else []
            divided = shards if o.zero >= 3 else 1
            sizes = [quantized_bytes(o.quantize or "", n) / n for n in matrices]
            return [
                (counts.dense / o.tensor - sum(matrices), each.frozen),
                *(
                    (n, replace(each.frozen, weight=size / divided, quantized=size))
                    for n, size in zip(matrices, sizes, strict=True)
                ),
                (counts.experts / between, of_experts.frozen),
                (counts.adapters / o.tensor, each),
            ]
        return [(counts.dense / o.tensor, each), (counts.experts / between, of_experts)]
