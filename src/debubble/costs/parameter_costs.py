"""The costs of a unit's parameters on one device: the bytes of their states, and the seconds of what updates them.

ZeRO divides states among data- and context-parallel ranks, and its collectives take time: once per step for what the
step divides (gradients are reduced, weights gathered), or in every micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from debubble.costs.operators import Shapes
from debubble.costs.step import (
    HOST_MEMORY_BANDWIDTH,
    ParameterBytes,
    parameter_bytes,
    ranks_in_node,
    scattered_bytes,
    step_seconds,
    step_traffic,
)
from debubble.costs.units import HostStates, StateBytes, Unit
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
        return replace(
            unit,
            static=self._static(counts),
            states=self._states(counts),
            on_host=self._on_host(counts),
            gradient_reduce=self._gradient_reduce(counts),
            optimizer_step=self._optimizer_step(counts, matrices=matrices),
            parameter_gather=self._parameter_gather(counts),
            gathered=self._gathered_bytes(counts),
            undivided=sum(count * (each.summed - each.gradient) for count, each in self._own_parameters(counts)),
        )

    def per_stage(self) -> dict[str, float]:
        """Seconds per step, by name, that every stage takes beside its units."""
        s = self.shapes
        ranks = s.options.data * s.options.context
        latency, _ = s.speed.ring(ranks, beside=ranks_in_node(s.speed, s.options))
        step = {"optimizer_step": s.speed.hardware.efficiency.launch}
        gather = {"parameter_gather": latency} if self._gathers_stages else {}
        return {**step, "gradient_reduce": latency, **gather} if ranks > 1 else step

    def _gradient_reduce(self, counts: Counts) -> float:
        """Seconds per step of summing gradients."""
        s = self.shapes
        ranks = s.options.data * s.options.context
        _, bandwidth = s.speed.ring(ranks, beside=ranks_in_node(s.speed, s.options))
        moved = 0.0
        for count, each in self._own_parameters(counts):
            if each.summed:
                scattered = scattered_bytes(s.options, gradient=each.summed)
                moved += count * scattered * (each.shards - 1) / each.shards
        return moved / bandwidth

    def _optimizer_step(self, counts: Counts, *, matrices: bool = False) -> float:
        """Seconds of stepping on the device; if `matrices`, Muon orthogonalizes them."""
        s = self.shapes
        stepped = self._stepped_parameters(counts)
        return step_seconds(s.model, s.speed, s.options, s.framework, stepped, matrices=stepped if matrices else 0.0)

    def _stepped_parameters(self, counts: Counts) -> float:
        """Parameters that the optimizer of one rank updates on the device."""
        options, divided = self.shapes.options, self._own_parameters(counts)
        own = sum(count / (each.shards if options.zero else 1) for count, each in divided if each.summed)
        return own * (1 - options.host_optimizer)

    def _static(self, counts: Counts) -> float:
        return sum(count * each.total for count, each in self._own_parameters(counts))

    def _states(self, counts: Counts) -> StateBytes:
        divided = self._own_parameters(counts)
        return StateBytes(
            weights=sum(count * each.weight for count, each in divided),
            gradients=sum(count * each.gradient for count, each in divided),
            optimizer=sum(count * each.optimizer for count, each in divided),
        )

    def waits(self, forward: float, backward: float, counts: Counts) -> ShardWaits:
        """Waits of one micro-batch for the gradients that ZeRO-2 divides, and the weights that FSDP does.

        Gradients are scattered after each backward; FSDP gathers weights before the forward and again before the
        backward.  All of it runs beside the computing of the neighbouring units (FSDP's prefetch); only what takes
        longer is waited for.
        """
        s = self.shapes
        ranks = s.options.data * s.options.context
        if s.options.zero < 2 or ranks == 1:
            return ShardWaits(0.0, 0.0)
        latency, bandwidth = s.speed.ring(ranks, beside=ranks_in_node(s.speed, s.options))
        divided = self._own_parameters(counts)
        moved = sum(count * (each.shards - 1) / each.shards * each.summed for count, each in divided)
        scatter = latency + moved / bandwidth
        gather = 0.0
        if self._gathers_units:
            gather = latency + self._gather_seconds(counts)
        return ShardWaits(max(0.0, gather - forward), max(0.0, gather + scatter - backward))

    @property
    def _divides_weights(self) -> bool:
        return self.shapes.options.zero >= 3 and self.shapes.options.data * self.shapes.options.context > 1

    @property
    def _gathers_units(self) -> bool:
        return self._divides_weights and self.shapes.framework.gathers_units

    @property
    def _gathers_stages(self) -> bool:
        return self._divides_weights and not self.shapes.framework.gathers_units

    def _parameter_gather(self, counts: Counts) -> float:
        """Seconds of gathering parameters that ZeRO-3 divides, as a part of their stage's."""
        return self._gather_seconds(counts) if self._gathers_stages else 0.0

    def _gathered_bytes(self, counts: Counts) -> float:
        """Bytes of such parameters, whole."""
        divided = self._own_parameters(counts) if self._gathers_stages else []
        return self.shapes.element * sum(count for count, _ in divided)

    def _gather_seconds(self, counts: Counts) -> float:
        s = self.shapes
        _, bandwidth = s.speed.ring(s.options.data * s.options.context, beside=ranks_in_node(s.speed, s.options))
        divided = self._own_parameters(counts)
        return s.element * sum(count * (each.shards - 1) / each.shards for count, each in divided) / bandwidth

    def gathered_unit(self, parameters: float) -> float:
        """Bytes of whole weights that FSDP gathers."""
        return self.shapes.element * parameters / self.shapes.options.tensor if self._gathers_units else 0.0

    def _on_host(self, counts: Counts) -> HostStates | None:
        """Costs with the optimizer on the host: weights and gradients stay, and each rank moves its own share.

        None where the run's options say which share of all states is there.

        The host steps before the norm of all gradients is known, so it copies what it changes.  Its step takes the time
        of its memory traffic: Muon's products are left out.
        """
        if self.shapes.options.host_optimizer:
            return None
        o = replace(self.shapes.options, post_validation=True)
        divided = self._own_parameters(counts, options=o)
        share = 1 / (o.data * o.context) if o.zero else 1.0
        gradients = sum(count * each.gradient for count, each in divided) * (1.0 if o.zero >= 2 else share)
        weights = sum(count * each.weight for count, each in divided if each.gradient) * (1.0 if o.zero >= 3 else share)
        traffic = step_traffic(o, gradient_bytes=self.shapes.framework.gradient_bytes)
        return HostStates(
            static=sum(count * (each.weight + each.gradient) for count, each in divided),
            gradients=gradients,
            parameters=weights,
            step=traffic * self._stepped_parameters(counts) / HOST_MEMORY_BANDWIDTH,
        )

    def _own_parameters(
        self, counts: Counts, *, options: RunOptions | None = None
    ) -> list[tuple[float, ParameterBytes]]:
        """Parameters on one device with the bytes of each; ZeRO divides experts over what expert ranks leave.

        With LoRA all but the adapters are frozen.
        """
        o, gradient_bytes = options or self.shapes.options, self.shapes.framework.gradient_bytes
        shards = o.data * o.context
        each = parameter_bytes(o, shards=shards, gradient_bytes=gradient_bytes)
        between = o.expert * o.expert_shards
        of_experts = parameter_bytes(o, shards=o.tensor * shards / between, gradient_bytes=gradient_bytes)
        if o.lora:
            matrices = [weights / o.tensor for weights in counts.matrices] if o.quantize else []
            return [
                (counts.dense / o.tensor - sum(matrices), each.frozen),
                *((n, replace(each.frozen, weight=quantized_bytes(o.quantize or "", n) / n)) for n in matrices),
                (counts.experts / between, of_experts.frozen),
                (counts.adapters / o.tensor, each),
            ]
        return [(counts.dense / o.tensor, each), (counts.experts / between, of_experts)]
