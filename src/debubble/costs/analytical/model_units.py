"""Model + cluster + run options -> Units: the costs of every unit on one device, before the model is partitioned.

Workspaces follow measurements of Megatron-LM: every stage has one for a layer's weight gradients in bf16 and the MLP's
widest tensors, the last one also for the head's weight gradient.  The logits (fp32) are the head's activation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from debubble.costs.analytical.half_layers import attention, dispatch_time, mlp
from debubble.costs.analytical.operators import (
    Operator,
    Shapes,
    elementwise,
    gathered_logits,
    matmul,
    norm,
    product,
    strategies,
)
from debubble.costs.analytical.option_checks import check, check_slices
from debubble.costs.analytical.parameter_costs import Counts, ParameterCosts
from debubble.costs.calibration import corrections
from debubble.costs.devices.cluster import Cluster
from debubble.costs.devices.known_hardware import HOST_CALL
from debubble.costs.devices.parallel_layout import Layout
from debubble.costs.devices.speed import Speed
from debubble.costs.frameworks import Framework, framework_of_options
from debubble.costs.unit import (
    PARAMETER_ENTRIES,
    HostStates,
    StateBytes,
    Strategy,
    Unit,
    added,
    at_layer,
    fastest_units,
    joined_unit,
)
from debubble.costs.units import Units
from debubble.ir import PlannedUnit, RunOptions
from debubble.models.architecture import Experts, Layer, VisionTower
from debubble.models.config import ModelConfig
from debubble.models.quantization import NF4_BLOCK, NF4_DQ
from debubble.models.vision import as_trained


def model_units(
    model: ModelConfig,
    cluster: Cluster,
    options: RunOptions | None = None,
    *,
    pipeline: int | None = None,
    framework: Framework | None = None,
    micro_batches: int | None = None,
) -> Units:
    """Seconds and bytes of a model's units: embedding, attention and MLP half-layers (or whole layers), head.

    Args:
        model: The model.
        cluster: The devices.
        options: Degrees, sequence length and number format of the run.
        pipeline: Pipeline devices; None: all that the cluster has for these degrees.
        framework: The framework whose kernels are priced; None: that of the options, or Megatron-LM.
        micro_batches: Micro-batches per step, for frameworks with a buffer per micro-batch; None: no such buffers.

    Raises:
        InputError: The degrees do not fit the model or the cluster.
    """
    requested = options or RunOptions()
    layout = Layout.from_options(cluster, requested, pipeline)
    builder = _builder(model, cluster, requested, framework or framework_of_options(requested.framework), layout)
    options, framework, speed = builder.shapes.options, builder.shapes.framework, builder.shapes.speed
    types = layout.slowest_ranks
    tables = {
        name: builder.on(Speed.from_hardware(hardware, options.dtype, framework)).all_units()
        for name, hardware in {hardware.name: hardware for hardware in types}.items()
    }
    if framework.frees_gradients and micro_batches == layout.pipeline == 1:
        tables = {name: _before_gradients(units) for name, units in tables.items()}
    mixed = len(tables) > 1
    in_node = layout.pipeline_devices_per_node if layout.across_nodes else 1
    buffered = 0 if layout.pipeline == 1 else micro_batches or 0
    units = Units(
        units=fastest_units([*tables.values()]) if mixed else next(iter(tables.values())),
        on_devices=tuple(tables[hardware.name] for hardware in types) if mixed else (),
        communication=speed.message(builder.boundary, across_nodes=layout.across_nodes),
        communication_within_node=speed.message(builder.boundary, across_nodes=False) if in_node > 1 else None,
        communication_model="blocking" if framework.blocking_messages else "latency",
        devices_per_node=in_node,
        offload_bandwidth=speed.hardware.host_bandwidth * speed.hardware.efficiency.host / layout.ranks_per_host_link,
        host_memory=min(type_.host_memory for type_ in cluster.types) or None,
        host_link=speed.hardware.host_link,
        link_groups=layout.link_groups,
        memory_limit=layout.memory_limit,
        stage_entries=builder.parameters.per_stage(),
        divides_gradients=options.zero >= 2,
        receive_buffers=builder.boundary * buffered if framework.receives_ahead else 0,
        kept_outputs=builder.logits * (buffered - 1) if framework.keeps_outputs and buffered else 0,
        slices=options.slices,
        attention_scale=None if options.slices == 1 else tuple(2 * i + 1 for i in range(options.slices)),
    )
    step, memory = corrections(model, cluster, requested)
    return units.corrected(step.factor, memory.deviation) if step.runs or memory.runs else units


def dispatch_seconds(
    model: ModelConfig, cluster: Cluster, options: RunOptions, *, pipeline: int, framework: Framework
) -> float:
    """Seconds per micro-batch of all layers' dispatch and combine that are not hidden.

    Arguments are those of `model_units`.
    """
    shapes = _builder(model, cluster, options, framework, Layout.from_options(cluster, options, pipeline)).shapes
    layers = enumerate(shapes.model.per_layer)
    return sum(dispatch_time(shapes, index) for index, layer in layers if isinstance(layer.mlp, Experts))


def _builder(
    model: ModelConfig, cluster: Cluster, options: RunOptions, framework: Framework, layout: Layout
) -> _Builder:
    """The builder of a run's units; the run's options and model may change traits of the framework."""
    check(model, options)
    model = as_trained(model, options)
    if model.whole_layers:
        framework = replace(framework, fused_activation=False)
    if options.expert_overlap:
        framework = replace(framework, dispatch_overlap=True)
    if options.slices > 1:
        check_slices(model, options)
        options = replace(options, sequence_length=options.sequence_length // options.slices)
    if not (options.sequence_parallel and options.flash_attention):
        framework = replace(
            framework,
            sequence_parallel=framework.sequence_parallel and options.sequence_parallel,
            flash=framework.flash and options.flash_attention,
        )
    speed = Speed.from_hardware(cluster.slowest, options.dtype, framework)
    shapes = Shapes(model=model, options=options, framework=framework, speed=speed)
    return _Builder(shapes, shares_table=model.tied and layout.pipeline == 1)


def _vision_units(language: _Builder, vision: VisionTower) -> Iterator[Unit]:
    """The layers of a vision tower; the first one includes the patch embedding, and the last one the projector.

    A frozen tower has no backward, and saves nothing for one.
    """
    s, tower = language.shapes, vision.tower
    # Patches attend to patches of the same image only.
    images = s.options.micro_batch_size * vision.images
    options = replace(s.options, micro_batch_size=images, sequence_length=vision.patches)
    builder = _Builder(replace(s, model=tower, options=options, frozen=not vision.trained))
    for layer in range(tower.layers):
        units = [builder.attention(layer), builder.mlp(layer)]
        if layer == 0:
            units.insert(0, builder.projection(vision.embedding_parameters))
        if layer == tower.layers - 1:
            units.append(builder.projection(vision.projector_parameters))
        unit = joined_unit("vision", None, *units)
        yield unit if vision.trained else _without_backward(unit)


def _without_backward(unit: Unit) -> Unit:
    """The unit if nothing in it or before it is trained."""
    zeros: dict[str, Any] = dict.fromkeys(("backward_input", "backward_weight", "attention_backward"), 0.0)
    return replace(
        unit,
        **zeros,
        activation_after_input=0.0,
        module_bytes={},
        strategies=dict.fromkeys(unit.strategies, Strategy(0.0)),
    )


def _before_gradients(units: tuple[Unit, ...]) -> tuple[Unit, ...]:
    """The units of a step with one backward, where the head's activation reuses the memory of the others' gradients.

    The head is the last unit; its activation is freed before the gradients of other units are allocated.
    """
    *body, head = units
    gradients = StateBytes.sum(body).gradients
    strategies_of_head = {
        name: replace(strategy, activation=max(0, strategy.activation - gradients))
        for name, strategy in head.strategies.items()
    }
    return (*body, replace(head, strategies=strategies_of_head))


def _without_states(unit: Unit) -> Unit:
    """The unit if it shares another unit's parameters."""
    host = None if unit.on_host is None else added(HostStates, [])
    zeros: dict[str, Any] = dict.fromkeys(PARAMETER_ENTRIES, 0.0)
    return replace(unit, states=StateBytes.sum([]), on_host=host, **zeros)


def _loss(shapes: Shapes, logits: float) -> Operator:
    """Softmax and cross-entropy: in place, or as torch's operators, whose results are saved."""
    if shapes.framework.fused_loss:
        return elementwise(shapes, "loss", forward=6 * logits, backward=4 * logits, saved=4 * logits)
    if shapes.framework.narrow_loss:
        saved = NARROW_LOGITS * shapes.element * logits
        return elementwise(shapes, "loss", forward=2 * logits, backward=4 * logits, saved=saved)
    sharded = shapes.framework.keeps_gathered and shapes.framework.loss_parallel and shapes.options.tensor > 1
    saved = (DTENSOR_LOGIT_BYTES if sharded else TORCH_LOGIT_BYTES) * logits
    return elementwise(shapes, "loss", forward=8 * logits, backward=8 * logits, saved=saved)


NARROW_LOGITS = 4
"""Saved numbers per logit in torch's loss without fp32: the logit, its log-softmax, and the gradients of both."""
TORCH_LOGIT_BYTES = 14
"""Saved bytes per logit in torch's loss: the logit in 16 bits and in fp32, its log-softmax, and that one's gradient."""
DTENSOR_LOGIT_BYTES = 16
"""Saved bytes per logit with sharded logits, all in fp32: the log-softmax, its gradient before and after it is scaled,
and the sum of probabilities and targets (torch.distributed.tensor.parallel.loss_parallel)."""


@lru_cache(maxsize=64)
def _first_equal(layers: tuple[Layer, ...]) -> tuple[int, ...]:
    """For every layer, the index of the first equal layer."""
    first: dict[Layer, int] = {}
    return tuple(first.setdefault(layer, index) for index, layer in enumerate(layers))


@dataclass(frozen=True)
class _Builder:
    shapes: Shapes
    shares_table: bool = False
    """True if the head uses the embedding's table: tied tables without a pipeline.  A V-shaped placement, with both on
    one device, counts two tables though training has one: the predicted memory is too high by a table."""

    @property
    def parameters(self) -> ParameterCosts:
        """The costs of parameters in this run."""
        return ParameterCosts(self.shapes)

    @property
    def boundary(self) -> float:
        """Bytes, on one device, of the tensor between two units."""
        return self.shapes.element * self.shapes.stream

    @property
    def logits(self) -> float:
        """Bytes of a micro-batch's logits on one device."""
        return self.shapes.element * self._number_of_logits

    @property
    def _number_of_logits(self) -> float:
        """Logits of a micro-batch that the loss on one device reads."""
        s = self.shapes
        return s.tokens * s.model.vocab / (s.options.tensor if s.framework.loss_parallel else 1)

    def on(self, speed: Speed) -> _Builder:
        """The builder for another type of device."""
        return replace(self, shapes=replace(self.shapes, speed=speed))

    def all_units(self) -> tuple[Unit, ...]:
        """Units of the whole model in order."""
        vision = self.shapes.model.vision
        return (*(() if vision is None else _vision_units(self, vision)), *self.units())

    def units(self) -> Iterator[Unit]:
        """Units of the language model in order; equal layers are priced once."""
        model = self.shapes.model
        first_equal = _first_equal(model.per_layer)
        priced: dict[tuple[str, int | None], Unit] = {}
        for planned in model.units:
            if planned.type == "vision":
                continue
            layer = planned.layer
            kind = planned.type, None if layer is None else first_equal[layer]
            if kind not in priced:
                priced[kind] = self.unit(planned)
            yield at_layer(priced[kind], layer)

    def unit(self, planned: PlannedUnit) -> Unit:
        match planned.type, planned.layer:
            case "attention", int(layer):
                return self.attention(layer)
            case "mlp", int(layer):
                return self.mlp(layer)
            case "layer", int(layer):
                return joined_unit("layer", layer, *self._halves(layer))
            case "mtp", _:
                return self.mtp()
            case "embedding", _:
                return self.embedding()
            case _:
                return self.head()

    def _halves(self, layer: int) -> Iterator[Unit]:
        """The layer's attention and MLP half-layers; a layer may lack one."""
        architecture = self.shapes.model.per_layer[layer]
        if architecture.attention is not None:
            yield self.attention(layer)
        if architecture.mlp is not None:
            yield self.mlp(layer)

    def mtp(self) -> Unit:
        """A multi-token-prediction module: a projection of two hidden states, a layer like the last, logits and loss.

        It shares the tables of embedding and head, which Megatron-LM has on the last stage, too.
        """
        s, model = self.shapes, self.shapes.model
        head, layer = self.head(), model.layers - 1
        width = model.hidden / s.options.tensor
        merged = [
            norm(s),
            norm(s),
            product(s, "projections", inner=2 * model.hidden, outer=width, saved=2 * s.element * s.stream),
        ]
        counts = Counts(model.mtp_parameters - model.layer_parameters(layer))
        merge = self._unit("mtp", None, merged, counts, workspace=0.0)
        return joined_unit("mtp", None, merge, *self._halves(layer), _without_states(head))

    def projection(self, parameters: int) -> Unit:
        """Linear layers between the residual stream and another width, with `parameters` in total, as one product."""
        s, h, tensor = self.shapes, self.shapes.model.hidden, self.shapes.options.tensor
        saved = s.element * s.stream
        operators = [product(s, "projections", inner=h, outer=parameters / h / tensor, saved=saved)]
        return self._unit("projection", None, operators, Counts(parameters), workspace=0.0)

    def embedding(self) -> Unit:
        """The embedding: a memory-bound lookup, which saves only a dropout mask."""
        s = self.shapes
        size = s.stream
        lookup = elementwise(s, "lookup", forward=2 * size, backward=0, saved=size * bool(s.model.embedding_dropout))
        backward = 0.0 if s.options.lora else lookup.forward
        counts = Counts(s.model.embedding_parameters)
        waits = self.parameters.waits(lookup.forward, backward, counts)
        unit = Unit(
            type="embedding",
            layer=None,
            forward=lookup.forward + waits.forward,
            backward_input=0.0,
            backward_weight=backward + waits.backward,
            static=0.0,
            workspace=self.parameters.gathered_unit(counts.dense) + self._table_gradient() + s.framework.bucket_bytes,
            strategies={"none": Strategy(lookup.saved)},
            activation_after_input=self.boundary,
        )
        return self.parameters.with_parameters(unit, counts)

    def _table_gradient(self) -> float:
        """Bytes of the table's unsharded gradient with ZeRO-2; otherwise rows are accumulated in place."""
        s = self.shapes
        divides = s.options.zero >= 2 and s.options.data * s.options.context > 1 and not s.options.lora
        return s.element * s.model.embedding_parameters / s.options.tensor if divides else 0.0

    def attention(self, layer: int) -> Unit:
        parameters = self.shapes.model.attention_parameters(layer)
        adapters = 0 if self.shapes.frozen else self.shapes.model.attention_adapters(self.shapes.options.lora)
        counts = Counts(parameters, adapters=adapters, matrices=self.shapes.model.attention_matrices(layer))
        unit = self._half("attention", layer, lambda shapes: attention(shapes, layer), counts)
        s = self.shapes
        if s.options.slices == 1:
            return unit
        numbers = s.tokens * 2 * s.model.kv_width / s.options.tensor
        # Gradients are accumulated in fp32 at least.
        return replace(unit, keys_and_values=s.element * numbers, key_value_gradient=max(4, s.element) * numbers)

    def mlp(self, layer: int) -> Unit:
        model = self.shapes.model
        experts = model.expert_parameters(layer)
        dense = model.mlp_parameters(layer) - experts
        adapters = model.mlp_adapters(self.shapes.options.lora) if self.shapes.adapts_mlp else 0
        counts = Counts(dense, experts, adapters, model.mlp_matrices(layer))
        return self._half("mlp", layer, lambda shapes: mlp(shapes, layer), counts)

    def _half(
        self,
        kind: str,
        layer: int,
        build: Callable[[Shapes], Iterator[Operator]],
        counts: Counts,
    ) -> Unit:
        unit = self._unit(kind, layer, list(build(self.shapes)), counts, workspace=self._workspace(layer))
        if kind == "mlp" and self.shapes.framework.whole_layers:
            full = unit.strategies["full"]
            after_full = {"full": replace(full, after_full=full.activation - self.boundary)}
            return replace(unit, strategies={**unit.strategies, **after_full})
        return unit

    def head(self) -> Unit:
        """Final norm, logits and loss.  The logits are saved in fp32 from the forward to the backward."""
        s, model, tensor = self.shapes, self.shapes.model, self.shapes.options.tensor
        logits = self._number_of_logits
        capped = elementwise(s, "cap", forward=2 * logits, backward=3 * logits, saved=s.element * logits)
        operators = [
            norm(s),
            matmul(s, "logits", tokens=s.tokens, local=model.vocab / tensor, layers=0),
            *([] if s.framework.loss_parallel else [gathered_logits(s, logits)]),
            *([] if model.logit_cap is None else [capped]),
            _loss(s, logits),
        ]
        gradient = 0.0 if s.options.lora else s.element * model.vocab * model.hidden / tensor
        workspace = gradient + self._layer_gradients(0) + self.parameters.gathered_unit(model.head_parameters)
        shared = model.vocab * model.hidden if self.shares_table else 0
        unit = self._unit("head", None, operators, Counts(model.head_parameters - shared), workspace=workspace)
        return replace(unit, strategies={name: unit.strategies[name] for name in ("none", "full")})

    def _unit(
        self,
        kind: str,
        layer: int | None,
        operators: Sequence[Operator],
        counts: Counts,
        *,
        workspace: float,
    ) -> Unit:
        host = self._host_seconds(operators)
        forward = max(host, sum(op.forward for op in operators))
        backward_weight = sum(op.backward_weight for op in operators)
        backward_input = max(host - backward_weight, sum(op.backward_input for op in operators))
        waits = self.parameters.waits(forward, backward_input + backward_weight, counts)
        unit = Unit(
            type=kind,
            layer=layer,
            forward=forward + waits.forward,
            backward_input=backward_input,
            backward_weight=backward_weight + waits.backward,
            static=0.0,
            strategies=strategies(
                operators,
                boundary=self.boundary,
                framework=self.shapes.framework,
                unread=self._unread_seconds(operators) if kind == "mlp" else 0.0,
            ),
            activation_after_input=sum(op.after_input for op in operators),
            workspace=workspace + self.shapes.framework.bucket_bytes,
            attention_forward=sum(op.longer_forward for op in operators),
            attention_backward=sum(op.longer_backward for op in operators),
        )
        return self.parameters.with_parameters(unit, counts, matrices=kind != "head")

    def _unread_seconds(self, operators: Sequence[Operator]) -> float:
        """Seconds of a dense layer's last product and the collective after it, if recomputation stops before them."""
        names = [op.name for op in operators]
        if not self.shapes.framework.stops_recomputing or "router" in names or names.count("output") > 1:
            return 0.0
        shares = {"output": 1.0, "collectives": 0.5}
        return sum(shares.get(op.name, 0.0) * op.forward for op in operators)

    def _host_seconds(self, operators: Sequence[Operator]) -> float:
        """Host seconds to launch the kernels of operators outside CUDA graphs, in the forward or in the backward."""
        match self.shapes.framework.graphs:
            case "none":
                launched = operators
            case "layers":
                launched = [op for op in operators if op.per_expert]
            case _:
                launched = []
        return HOST_CALL * sum(op.calls for op in launched)

    def _layer_gradients(self, layer: int) -> float:
        """Bytes of a layer's weight gradients before they are accumulated."""
        s, model = self.shapes, self.shapes.model
        if s.options.lora:
            adapters = model.attention_adapters(s.options.lora) + model.mlp_adapters(s.options.lora)
            return s.element * adapters / s.options.tensor
        dense = model.layer_parameters(layer) - model.expert_parameters(layer)
        return s.element * (dense / s.options.tensor + self._expert_gradients(layer))

    def _expert_gradients(self, layer: int) -> float:
        """Number of expert parameters of a layer whose gradients exist before they are accumulated.

        With ZeRO-2 it is all of them.  Otherwise they are accumulated in place, and there is one dummy gradient per
        shape of weight (Transformer Engine), as all experts have the same shapes.
        """
        s, model = self.shapes, self.shapes.model
        local = model.expert_parameters(layer) / s.options.expert / s.options.expert_shards
        experts = model.per_layer[layer].mlp
        if isinstance(experts, Experts) and s.options.zero < 2:
            return local * s.options.expert / experts.count
        return local

    def _workspace(self, layer: int) -> float:
        s, model = self.shapes, self.shapes.model
        mlp, experts = model.per_layer[layer].mlp, model.expert_parameters(layer)
        width = mlp.ffn * mlp.per_token if isinstance(mlp, Experts) else model.ffn
        expert_ranks = s.options.expert * s.options.expert_shards / s.options.tensor
        parameters = model.layer_parameters(layer) - experts + experts / expert_ranks
        # The layer that computes and the next one, which is prefetched.
        matrices = (*model.attention_matrices(layer), *model.mlp_matrices(layer)) if s.options.quantize else ()
        gathered = 2 * self.parameters.gathered_unit(parameters, matrices)
        activations = 2 * s.element * s.tokens * width / s.options.tensor
        return self._layer_gradients(layer) + activations + gathered + self._dequantized_bytes()

    def _dequantized_bytes(self) -> float:
        """Bytes of the largest quantized weight while it is dequantized: in fp32, and in the run's dtype.

        With double quantization its scales are dequantized to fp32, too.
        """
        s, model = self.shapes, self.shapes.model
        if not s.options.quantize:
            return 0.0
        scale = 4 / NF4_BLOCK if s.options.quantize == NF4_DQ else 0
        return (4 + s.element + scale) * model.hidden * max(model.ffn, model.attention_width) / s.options.tensor
