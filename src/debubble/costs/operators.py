"""Times and bytes of the operators that make up a half-layer, on one device, and the strategies of recomputing them.

Bytes of a micro-batch follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"),
with a fused attention core and a gated MLP where the model has one: per token and layer 12h + 4 kv d + 6 ffn bytes in
bf16 with a fused activation function, 8 ffn without; 34h + 5as for GPT without a fused attention core.

A strategy is `none`, `full`, or operators joined by `+`.  `cmb` (Obscura's cheap operators) is
norm+activation+multiply.  `mlp` is the whole inner MLP: a product's result is of no use without what follows it.
`selective` is the attention core where its scores are kept (Korthikanti et al.); a fused core keeps none, and then it
is `cmb`, which is what selective recomputation has become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.costs.speed import Speed
from debubble.costs.units import Strategy
from debubble.ir import RunOptions
from debubble.models.architecture import Architecture, Experts
from debubble.models.mixers import Attention, LatentAttention, LinearAttention, StateSpace


@dataclass(frozen=True, kw_only=True)
class Framework:
    """A training framework's way to run the model: what its kernels fuse and what they keep."""

    flash: bool = True
    """A fused attention core, which keeps no attention scores."""
    fused_activation: bool = True
    """Activation function and multiply in one kernel, which keeps only its input."""
    sequence_parallel: bool = True
    """Norms and residual stream divided over the tensor-parallel ranks."""
    whole_layers: bool = True
    """Full recomputation of both halves of a layer keeps one input, not two."""
    gradient_bytes: int = 4
    """Per parameter, in mixed precision."""
    tensor_overlap: bool = False
    """Tensor-parallel collectives beside the products that they feed or follow (Megatron's --tp-comm-overlap)."""
    dispatches_once: bool = False
    """A token travels once to a device and to a node, however many of its experts are there (DeepEP)."""
    dispatch_overlap: bool = False
    """Tokens travel beside the experts' computing of another micro-batch (DualPipe)."""
    gathers_units: bool = False
    """ZeRO-3 gathers the parameters of a unit at a time, for every micro-batch (FSDP), not those of a stage."""


MEGATRON = Framework()
DEEPSPEED = Framework(fused_activation=False, gradient_bytes=2)
EAGER = Framework(fused_activation=False, whole_layers=False)
FSDP = Framework(gathers_units=True)


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One step of a half-layer.  `saved` is what it leaves for the backward, and its recomputation drops."""

    name: str
    forward: float
    backward_input: float
    backward_weight: float = 0.0
    saved: float = 0.0
    """Bytes."""
    held: float = 0.0
    """Bytes that stay between its backward for inputs and its backward for weights."""


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The settings of the run that operators' costs depend on."""

    model: Architecture
    options: RunOptions
    framework: Framework
    speed: Speed

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.options.micro_batch_size * self.options.sequence_length / self.options.context

    @property
    def division(self) -> int:
        """The number of tensor-parallel ranks that divide the residual stream."""
        return self.options.tensor if self.framework.sequence_parallel else 1

    @property
    def stream(self) -> float:
        """Numbers of the residual stream that a device holds."""
        return self.tokens * self.model.hidden / self.division

    @property
    def norm_bytes(self) -> int:
        """Bytes that a norm keeps per number: transformers' own RMSNorm also keeps what it widens to fp32."""
        eager = self.model.whole_layers and self.model.norm == "rmsnorm" and self.element < 4
        return self.element + 4 * eager

    @property
    def element(self) -> int:
        """Bytes per number in the dtype that the run computes in."""
        return self.speed.element


NF4_BYTES = 0.5 + 4 / 64
"""Bytes per quantised weight: 4 bits, and a scale in fp32 for every 64 (Dettmers et al., QLoRA, NeurIPS 2023)."""


def matmul(
    shapes: Shapes,
    name: str,
    *,
    tokens: float,
    local: float,
    out: bool = False,
    saved: float = 0.0,
    layers: int = 1,
    experts: float = 1,
) -> Operator:
    """Linear layers between the residual stream and `local` columns on this device; `out`: back into the stream.

    Their two gradients are two more products of the same size; the weights' needs their input and their output's
    gradient, and adds up in the framework's gradients.  With LoRA, `layers` of them (0: none may) have adapters, whose
    weights alone have a gradient.  The head and routers stay in bf16 where the others are in fp8 (Transformer Engine's
    recipes).  With several `experts` each has a product of its own for its share of the tokens.
    """
    h, e, speed, rank = shapes.model.hidden, shapes.element, shapes.speed, shapes.options.lora
    inner, outer = (local, h) if out else (h, local)
    each, whole = tokens / experts, name in ("logits", "router")

    def multiply(m: float, k: float, n: float, *, cast: float = 0.0, added: float = 0.0) -> float:
        if whole:
            return speed.matmul(m, k, n, count=experts, added=added)
        return speed.linear(m, k, n, count=experts, added=added, cast=cast)

    forward = multiply(each, inner, outer, cast=tokens * inner)
    backward = multiply(each, outer, inner, cast=tokens * outer)
    if not rank:
        added = 2 * shapes.framework.gradient_bytes * experts * h * local
        weight, held = multiply(inner, each, outer, added=added), e * tokens * (h / shapes.division + local)
        if experts > 1:
            weight /= speed.hardware.efficiency.grouped_weight
        return Operator(
            name=name, forward=forward, backward_input=backward, backward_weight=weight, saved=saved, held=held
        )
    if not layers:
        return Operator(name=name, forward=forward, backward_input=backward, saved=saved)
    adapters = speed.matmul(tokens, inner, layers * rank) + speed.matmul(tokens, rank, outer)
    # Quantised weights are read, and written in the run's dtype, before each product.
    expanded = speed.stream((NF4_BYTES + e) * h * local) if shapes.options.quantize else 0.0
    return Operator(
        name=name,
        forward=forward + adapters + expanded,
        backward_input=backward + adapters + expanded,
        backward_weight=adapters,
        saved=saved + e * tokens * layers * rank,
        held=e * tokens * (h / shapes.division + local + 2 * layers * rank),
    )


def product(shapes: Shapes, name: str, *, inner: float, outer: float, saved: float) -> Operator:
    """A linear layer between two widths of this device."""
    n, speed = shapes.tokens, shapes.speed
    return Operator(
        name=name,
        forward=speed.linear(n, inner, outer, cast=n * inner),
        backward_input=speed.linear(n, outer, inner, cast=n * outer),
        backward_weight=speed.linear(inner, n, outer),
        saved=saved,
        held=shapes.element * n * (inner + outer),
    )


def elementwise(shapes: Shapes, name: str, *, forward: float, backward: float, saved: float = 0.0) -> Operator:
    """An operator that is bound by memory: numbers read and written forward and backward."""
    e, speed = shapes.element, shapes.speed
    return Operator(
        name=name, forward=speed.stream(e * forward), backward_input=speed.stream(e * backward), saved=saved
    )


def norm(shapes: Shapes) -> Operator:
    """The norm with the residual addition beside it."""
    size = shapes.stream
    return elementwise(shapes, "norm", forward=5 * size, backward=6 * size, saved=shapes.norm_bytes * size)


def collectives(shapes: Shapes) -> Operator:
    """The all-gather before and the reduce-scatter after a half-layer's products.

    Backward there is one more gather with sequence parallelism; Megatron runs all but the first beside products, which
    hides half of their time.  Beside the products that need them they are hidden but for one of `tensor` pieces.
    """
    t, node = shapes.options.tensor, shapes.speed.hardware.devices_per_node
    size = shapes.element * shapes.tokens * shapes.model.hidden
    once = shapes.speed.gather(size, t, beside=min(t, node)) / (t if shapes.framework.tensor_overlap else 1)
    return Operator(name="collectives", forward=2 * once, backward_input=(2 if shapes.division > 1 else 1) * once)


def attention(shapes: Shapes, layer: int) -> Iterator[Operator]:
    """The operators of what mixes the tokens of a layer."""
    yield norm(shapes)
    yield collectives(shapes)
    match shapes.model.per_layer[layer].attention:
        case LatentAttention() as latent:
            yield from _latent_attention(shapes, latent)
        case LinearAttention() as linear:
            yield from _recurrence(shapes, linear)
        case StateSpace() as space:
            yield from _recurrence(shapes, space)
        case Attention() as grouped:
            yield from _grouped_attention(shapes, layer, grouped)
    yield from _end(shapes)


def _grouped_attention(shapes: Shapes, layer: int, attention: Attention) -> Iterator[Operator]:
    m, o, f, e = shapes.model, shapes.options, shapes.framework, shapes.element
    n = shapes.tokens
    q, kv = m.attention_width / o.tensor, m.kv_width / o.tensor
    projected = (1 + attention.gated) * q + 2 * kv
    yield matmul(shapes, "projections", tokens=n, local=projected, saved=e * n * projected, layers=m.qkv_layers)
    if m.qk_norm:
        size = n * (q + kv)
        # The norms of queries and keys are recomputed with them.
        saved = shapes.norm_bytes * size
        yield elementwise(shapes, "projections", forward=2 * size, backward=3 * size, saved=saved)
    if not m.positions:
        yield elementwise(shapes, "rotary", forward=2 * n * (q + kv), backward=2 * n * (q + kv))
    yield from (fused_core(shapes, layer) if f.flash else core(shapes))
    if attention.gated:
        yield elementwise(shapes, "multiply", forward=3 * n * q, backward=5 * n * q, saved=e * n * q)
    yield matmul(shapes, "output", tokens=n, local=q, out=True)


def _latent_attention(shapes: Shapes, latent: LatentAttention) -> Iterator[Operator]:
    """Latent vectors of queries and of keys and values, both normed and expanded to all heads.

    Every tensor-parallel rank computes the vectors, and expands them to its own heads (Megatron-LM).
    """
    n, e, t = shapes.tokens, shapes.element, shapes.options.tensor
    h, queries, values = shapes.model.hidden, latent.queries / t, latent.values / t
    narrow = latent.rank + (latent.query_rank or 0)
    down = narrow + latent.rotary
    yield product(shapes, "projections", inner=h, outer=down, saved=e * n * down)
    yield elementwise(
        shapes, "norm", forward=2 * n * narrow, backward=3 * n * narrow, saved=shapes.norm_bytes * n * narrow
    )
    yield product(shapes, "projections", inner=latent.query_rank or h, outer=queries, saved=e * n * queries)
    yield product(shapes, "projections", inner=latent.rank, outer=latent.expanded / t, saved=e * n * (queries + values))
    yield elementwise(shapes, "rotary", forward=4 * n * queries, backward=4 * n * queries)
    flops = 2 * n * latent.attended(shapes.options.sequence_length) * (queries + values)
    yield _attention_core(shapes, flops=flops, heads=latent.heads / t, kept=values, exchanged=queries + values)
    yield matmul(shapes, "output", tokens=n, local=values, out=True)


def _recurrence(shapes: Shapes, recurrence: LinearAttention | StateSpace) -> Iterator[Operator]:
    """Projection, convolution, a recurrence over chunks, and a gated norm of its result.

    The core is timed as attention of as many operations, three times as many backward: by analogy, not measured.
    """
    n, e, t = shapes.tokens, shapes.element, shapes.options.tensor
    mixed, projected = recurrence.mixed / t, recurrence.projected / t
    values, flops = recurrence.values / t, recurrence.flops / t
    yield matmul(shapes, "projections", tokens=n, local=projected, saved=e * n * projected)
    yield elementwise(shapes, "activation", forward=4 * n * mixed, backward=6 * n * mixed, saved=e * n * mixed)
    rows = n * recurrence.heads / t
    yield Operator(
        name="core",
        forward=shapes.speed.attention(n * flops, rows=rows),
        backward_input=shapes.speed.attention(3 * n * flops, rows=rows, backward=True),
        saved=e * n * values,
    )
    yield elementwise(shapes, "norm", forward=4 * n * values, backward=6 * n * values, saved=e * n * values)
    yield matmul(shapes, "output", tokens=n, local=values, out=True)


def _end(shapes: Shapes) -> Iterator[Operator]:
    """Yield the operators that follow a half-layer's products."""
    if shapes.model.norms_results:
        # It keeps the product's result, which recomputing the norm alone would need as well.
        yield replace(norm(shapes), name="output")
    yield dropout(shapes)


def fused_core(shapes: Shapes, layer: int) -> Iterator[Operator]:
    """Flash attention: only the scores that count; keeps its output and one fp32 number per token and head."""
    m, o = shapes.model, shapes.options
    n, q = shapes.tokens, m.attention_width / o.tensor
    attention = m.per_layer[layer].attention
    assert isinstance(attention, Attention)
    flops = 4 * n * attention.attended(o.sequence_length) * q
    yield _attention_core(shapes, flops=flops, heads=m.heads / o.tensor, kept=q, exchanged=2 * m.kv_width / o.tensor)


def _attention_core(shapes: Shapes, *, flops: float, heads: float, kept: float, exchanged: float) -> Operator:
    """A fused core of so many operations, whose result has `kept` numbers per token.

    Beside it context parallelism exchanges the numbers of keys and values, and backward their gradients too; the longer
    one counts.
    """
    n, e, speed = shapes.tokens, shapes.element, shapes.speed
    rows, exchange = n * heads, _exchange(shapes, exchanged)
    return Operator(
        name="core",
        forward=max(speed.attention(flops, rows=rows), exchange),
        backward_input=max(speed.attention(2.5 * flops, rows=rows, backward=True), 2 * exchange),
        saved=n * (e * kept + 4 * heads),
    )


def _exchange(shapes: Shapes, width: float) -> float:
    """Seconds in which a context-parallel rank gets the keys and values of all others (Liu et al., Ring Attention)."""
    o = shapes.options
    size = shapes.element * shapes.tokens * o.context * width
    beside = min(o.context, max(1, shapes.speed.hardware.devices_per_node // o.tensor))
    return shapes.speed.gather(size, o.context, beside=beside)


def core(shapes: Shapes) -> Iterator[Operator]:
    """Attention with materialised scores: their softmax (and dropout) is kept, all of it, causal or not.

    Its recomputation ("selective", Korthikanti et al.) drops the scores; the output stays.
    """
    m, o, e = shapes.model, shapes.options, shapes.element
    n, q, s = shapes.tokens, m.attention_width / o.tensor, o.sequence_length
    scores = n * s * m.heads / o.tensor
    traffic = shapes.speed.stream(e * (7 if m.dropout else 5) * scores)
    flops, rows = 4 * n * s * q, n * m.heads / o.tensor
    yield Operator(
        name="core",
        forward=shapes.speed.attention(flops, rows=rows) + traffic,
        backward_input=shapes.speed.attention(2 * flops, rows=rows) + traffic,
        saved=scores * (2 * e + 1 if m.dropout else e),
    )
    yield Operator(name="context", forward=0.0, backward_input=0.0, saved=e * n * q)


def dropout(shapes: Shapes) -> Operator:
    """Dropout after a half-layer's products, which keeps a mask of one byte per number."""
    size = shapes.stream * shapes.model.dropout
    return elementwise(shapes, "dropout", forward=2 * size, backward=2 * size, saved=size)


def mlp(shapes: Shapes, layer: int) -> Iterator[Operator]:
    """The operators of an MLP half-layer, dense or a mixture of experts."""
    m, o = shapes.model, shapes.options
    yield norm(shapes)
    if isinstance(experts := m.per_layer[layer].mlp, Experts):
        yield from _experts(shapes, experts)
    else:
        yield collectives(shapes)
        yield from _body(shapes, tokens=shapes.tokens, ffn=m.ffn / o.tensor)
    yield from _end(shapes)


def _experts(shapes: Shapes, experts: Experts) -> Iterator[Operator]:
    """Routed evenly: every token passes through `per_token` experts, and travels there and back.

    A device routes its share of the residual stream: it sorts copies of the tokens by expert, sends them, and where
    several ranks divide an expert, gathers what these got (Megatron-LM's all-to-all dispatcher).  Back it is the other
    way round.
    """
    m, o, e, speed = shapes.model, shapes.options, shapes.element, shapes.speed
    h, own = m.hidden, shapes.tokens / o.tensor
    sent, shards = own * experts.per_token, o.expert_shards
    routed = sent * shards
    sorting = speed.permute(e * h * (own + sent))
    gathering = speed.gather(e * h * routed, shards, beside=min(shards, speed.hardware.devices_per_node))
    body = list(_body(shapes, tokens=routed, ffn=experts.ffn / shards, experts=experts.count / o.expert))
    travel = 2 * _dispatch(shapes, experts, tokens=own)
    beside = sum(op.forward for op in body) if shapes.framework.dispatch_overlap else 0.0
    moved = 2 * (sorting + gathering) + max(0.0, travel - beside)
    yield matmul(shapes, "router", tokens=own, local=experts.count, layers=0)
    yield Operator(name="dispatch", forward=moved, backward_input=moved, saved=e * h * (sent + routed))
    yield from body
    if experts.shared:
        yield collectives(shapes)
        yield from _body(shapes, tokens=shapes.tokens, ffn=experts.shared / o.tensor)


DIRECT = 0.95
"""Share of the network's bandwidth that DeepEP reaches (its README: 43 to 58 GB/s over cards of 50 GB/s)."""


def _dispatch(shapes: Shapes, experts: Experts, *, tokens: float) -> float:
    """Seconds in which a device's tokens get to the devices of their experts: one copy per expert, device or node."""
    o, speed, k = shapes.options, shapes.speed, experts.per_token
    size = shapes.element * tokens * shapes.model.hidden
    beside = max(1, min(o.expert, speed.hardware.devices_per_node // o.expert_shards))
    nodes = o.expert / beside
    others = size * (nodes - 1) / nodes
    if shapes.framework.dispatches_once:
        copies, crossings = _places(o.expert, experts), _places(nodes, experts)
        within = size * copies * (beside - 1) / beside
        return speed.all_to_all(within=within, crossing=others * crossings, network=DIRECT)
    return speed.all_to_all(within=size * k * (beside - 1) / o.expert, crossing=others * k)


def _places(count: float, experts: Experts) -> float:
    """Mean number of devices or nodes, of so many, that a token's experts are on: n (1 - (1 - 1/n)^k)."""
    reached = max(1.0, count * experts.reach)
    return reached * (1 - (1 - 1 / reached) ** experts.per_token)


def _body(shapes: Shapes, *, tokens: float, ffn: float, experts: float = 1) -> Iterator[Operator]:
    m, e = shapes.model, shapes.element
    size = tokens * ffn
    up, adapted = m.matrices - 1, m.experts is None
    yield matmul(
        shapes, "mlp", tokens=tokens, local=up * ffn, saved=e * up * size, layers=up * adapted, experts=experts
    )  # fmt: skip
    if not m.gated:
        yield elementwise(shapes, "activation", forward=2 * size, backward=3 * size, saved=e * size)
    elif shapes.framework.fused_activation:
        yield elementwise(shapes, "multiply", forward=3 * size, backward=5 * size, saved=e * size)
    else:
        yield elementwise(shapes, "activation", forward=2 * size, backward=3 * size, saved=e * size)
        yield elementwise(shapes, "multiply", forward=3 * size, backward=5 * size, saved=e * size)
    yield matmul(shapes, "output", tokens=tokens, local=ffn, out=True, layers=int(adapted), experts=experts)


CMB = "norm+activation+multiply"
_IMPLIED = {"mlp": ("mlp", "activation", "multiply")}


def strategies(operators: Sequence[Operator], *, boundary: float, framework: Framework) -> dict[str, Strategy]:
    """Every sensible strategy of a unit with these operators and an input of `boundary` bytes."""
    total = boundary + sum(op.saved for op in operators)
    own = {text: text for text in subsets(_present(operators))}
    aliases = {"cmb": CMB, "selective": CMB if framework.flash else "core"}
    result = {"none": Strategy(total)}
    for name, text in {**own, **aliases}.items():
        chosen = _chosen(text)
        dropped = [op for op in operators if op.name in chosen]
        result[name] = Strategy(
            total - sum(op.saved for op in dropped), sum(op.forward for op in dropped), _named(text, operators)
        )
    result["full"] = Strategy(boundary, sum(op.forward for op in operators))
    return result


def _chosen(text: str) -> set[str]:
    return {operator for part in text.split("+") for operator in _IMPLIED.get(part, (part,))}


def _named(text: str, operators: Sequence[Operator]) -> str:
    """Keep those of the operators in `text` that the unit has."""
    present = _present(operators)
    return "+".join(name for name in text.split("+") if name in present) or "none"


def _present(operators: Sequence[Operator]) -> list[str]:
    """Names of the operators that the unit can recompute, in the order of computation."""
    having = {op.name for op in operators if op.saved}
    return [name for name in ("norm", "projections", "core", "mlp", "activation", "multiply") if name in having]


def subsets(present: Sequence[str]) -> Iterator[str]:
    """The sets of operators that a unit may recompute, as strategies.

    Args:
        present: Names of the operators that it can recompute, in the order of computation.
    """
    for mask in range(1, 2 ** len(present)):
        subset = [name for i, name in enumerate(present) if mask >> i & 1]
        if "mlp" not in subset or not {"activation", "multiply"} & set(subset):
            yield "+".join(subset)
