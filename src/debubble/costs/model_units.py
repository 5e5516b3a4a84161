"""Model + cluster + run options -> Units: what every unit costs on one device, before the model is partitioned.

Transients follow what was measured on Megatron-LM: every stage needs room for one layer's weight gradients in bf16
and the MLP's widest tensors, the last one for the head's weight gradient; the logits (fp32) are the head's activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from debubble.costs.cluster import Cluster
from debubble.costs.layout import Layout
from debubble.costs.model import Model
from debubble.costs.operators import MEGATRON, Framework, Operator, Shapes, attention, elementwise, matmul, mlp, norm
from debubble.costs.speed import Speed
from debubble.costs.states import element_bytes, state_bytes
from debubble.costs.strategies import strategies
from debubble.costs.units import Strategy, Unit, Units
from debubble.ir import InputError, RunOptions


def model_units(
    model: Model,
    cluster: Cluster,
    options: RunOptions | None = None,
    *,
    pipeline: int | None = None,
    framework: Framework = MEGATRON,
) -> Units:
    """Costs of the 2 L + 2 units of a model: embedding, attention and MLP half-layers, head.  Seconds and bytes.

    `pipeline` is the number of pipeline devices (None: as many as the cluster has for these degrees).  Raises
    InputError if the degrees fit neither the model nor the cluster.
    """
    options = options or RunOptions()
    layout = Layout.of(cluster, options, pipeline)
    check(model, options)
    speed = Speed(cluster.slowest, element_bytes(options.dtype))
    builder = _Builder(Shapes(model=model, options=options, framework=framework, speed=speed))
    units = [builder.embedding()]
    for layer in range(model.layers):
        units += [builder.attention(layer), builder.mlp(layer)]
    units.append(builder.head())
    return Units(
        units=tuple(units),
        communication=speed.message(builder.boundary, across_nodes=layout.across_nodes),
        offload_bandwidth=speed.hardware.host_bandwidth * speed.hardware.efficiency.host / layout.sharing,
        host_link=speed.hardware.host_link,
        link_groups=layout.link_groups,
        memory_limit=layout.memory_limit,
    )


def check(model: Model, options: RunOptions) -> None:
    """Refuse options that the model cannot be run with; raises InputError."""
    if options.micro_batch_size < 1 or options.sequence_length < 1:
        raise InputError(
            f"Micro-batches need at least one sequence of at least one token, not {options.micro_batch_size} of"
            f" {options.sequence_length}."
        )
    for name, size in (("attention heads", model.heads), ("columns of the MLP", model.ffn)):
        if size % options.tensor:
            raise InputError(f"{size} {name} cannot be divided over {options.tensor} tensor-parallel ranks.")
    if options.sequence_length % options.context:
        raise InputError(
            f"A sequence of {options.sequence_length} cannot be divided over {options.context} context-parallel ranks."
        )
    if model.positions and options.sequence_length > model.positions:
        raise InputError(
            f"The model has learned positions for {model.positions} tokens; a sequence of {options.sequence_length}"
            " is too long."
        )
    if options.expert > 1 and (model.experts is None or model.experts.count % options.expert):
        count = 0 if model.experts is None else model.experts.count
        raise InputError(f"{count} experts cannot be divided over {options.expert} expert-parallel ranks.")


@dataclass(frozen=True)
class _Builder:
    shapes: Shapes

    @property
    def boundary(self) -> float:
        """Bytes of the tensor between two units, on one device."""
        return self.shapes.element * self.shapes.stream

    def embedding(self) -> Unit:
        """Looks tokens up: bound by memory, and keeps nothing but a dropout mask."""
        s = self.shapes
        size = s.stream
        lookup = elementwise(s, "lookup", forward=2 * size, backward=0, saved=size * s.model.dropout)
        return Unit(
            type="embedding",
            layer=None,
            forward=lookup.forward,
            backward_input=0.0,
            backward_weight=lookup.forward,
            static=self._static(s.model.embedding_parameters),
            strategies={"none": Strategy(lookup.saved)},
            activation_after_input=self.boundary,
        )

    def attention(self, layer: int) -> Unit:
        return self._half("attention", layer, attention, self.shapes.model.attention_parameters)

    def mlp(self, layer: int) -> Unit:
        model = self.shapes.model
        experts = model.expert_parameters(layer)
        dense = model.mlp_parameters(layer) - experts
        return self._half("mlp", layer, lambda shapes: mlp(shapes, layer), dense, experts)

    def _half(
        self, kind: str, layer: int, build: Callable[[Shapes], Iterator[Operator]], parameters: int, experts: int = 0
    ) -> Unit:
        operators = list(build(self.shapes))
        return self._unit(
            kind,
            layer,
            operators,
            static=self._static(parameters) + self._static_experts(experts),
            workspace=self._workspace(layer),
        )

    def head(self) -> Unit:
        """Final norm, logits and loss.  The logits are kept in fp32 from the forward to the backward."""
        s, o = self.shapes, self.shapes.options
        columns = s.model.vocab / o.tensor
        logits = s.tokens * columns
        table = 2 * s.model.vocab * s.model.hidden / o.tensor
        operators = [
            norm(s),
            matmul(s, "logits", tokens=s.tokens, local=columns),
            elementwise(s, "loss", forward=6 * logits, backward=4 * logits, saved=4 * logits),
        ]
        unit = self._unit("head", None, operators, static=self._static(s.model.head_parameters),
                          workspace=table + self._layer_gradients(0))  # fmt: skip
        chosen = {name: unit.strategies[name] for name in ("none", "full")}
        return Unit(**{**vars(unit), "strategies": chosen})

    def _unit(
        self, kind: str, layer: int | None, operators: Sequence[Operator], *, static: float, workspace: float
    ) -> Unit:
        return Unit(
            type=kind,
            layer=layer,
            forward=sum(op.forward for op in operators),
            backward_input=sum(op.backward_input for op in operators),
            backward_weight=sum(op.backward_weight for op in operators),
            static=static,
            strategies=strategies(operators, boundary=self.boundary, framework=self.shapes.framework),
            activation_after_input=sum(op.held for op in operators),
            workspace=workspace,
        )

    def _static(self, parameters: int) -> float:
        o = self.shapes.options
        return parameters / o.tensor * self._bytes(o.data * o.context)

    def _static_experts(self, parameters: int) -> float:
        """Experts are divided over expert-parallel ranks, which ZeRO then divides no more."""
        o = self.shapes.options
        return parameters / o.tensor / o.expert * self._bytes(max(o.data * o.context / o.expert, 1))

    def _bytes(self, shards: float) -> float:
        return state_bytes(self.shapes.options, shards=shards, gradient_bytes=self.shapes.framework.gradient_bytes)

    def _layer_gradients(self, layer: int) -> float:
        """A layer's weight gradients before they are added up."""
        s, model = self.shapes, self.shapes.model
        experts = model.expert_parameters(layer)
        dense = model.attention_parameters + model.mlp_parameters(layer) - experts
        return s.element * (dense + experts / s.options.expert) / s.options.tensor

    def _workspace(self, layer: int) -> float:
        s, model = self.shapes, self.shapes.model
        moe = model.experts if model.is_moe(layer) else None
        width = model.ffn if moe is None else moe.ffn * moe.per_token
        return self._layer_gradients(layer) + 2 * s.element * s.tokens * width / s.options.tensor
