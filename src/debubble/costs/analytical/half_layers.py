"""The operators of half-layers: attention or another mixer of tokens, and the MLP or its experts.

Bytes of a micro-batch follow Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models"),
with a fused attention core and a gated MLP where the model has one: per token and layer 12h + 4 kv d + 6 ffn bytes in
bf16 with a fused activation function, 8 ffn without; 34h + 5as for GPT without a fused attention core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import add

from debubble.costs.analytical.operators import Operator, Shapes, collectives, elementwise, matmul, norm, product
from debubble.models.architecture import Experts
from debubble.models.mixers import (
    AnyRecurrence,
    Attention,
    Indexer,
    LatentAttention,
    LinearAttention,
    Mixer,
    Parallel,
)


def attention(shapes: Shapes, layer: int) -> Iterator[Operator]:
    """The operators of what mixes the tokens of a layer."""
    yield norm(shapes, kept_input=shapes.kept_input)
    yield collectives(shapes)
    mixer = shapes.model.per_layer[layer].attention
    if mixer is not None:
        yield from _mixing(shapes, mixer)
    yield from _end(shapes)


def _mixing(shapes: Shapes, mixer: Mixer) -> Iterator[Operator]:
    match mixer:
        case Attention() as grouped:
            yield from _grouped_attention(shapes, grouped)
        case LatentAttention() as latent:
            yield from _latent_attention(shapes, latent)
        case Parallel(attention=attention, space=space):
            yield from _grouped_attention(shapes, attention)
            yield from _recurrence(shapes, space)
        case recurrence:
            yield from _recurrence(shapes, recurrence)


def _grouped_attention(shapes: Shapes, attention: Attention) -> Iterator[Operator]:
    m, o, f, e = shapes.model, shapes.options, shapes.framework, shapes.element
    n = shapes.tokens
    q, kv = m.attention_width / o.tensor, m.kv_width / o.tensor
    projected = (1 + attention.gated) * q + 2 * kv
    # Keys and values of a slice are there for the slices after it, whatever is recomputed.
    shared = e * n * 2 * kv if o.slices > 1 else 0
    saved = e * n * projected - shared
    qkv = matmul(shapes, "projections", tokens=n, local=projected, saved=saved, layers=m.qkv_layers)
    yield replace(qkv, always=shared)
    if m.qk_norm:
        size = n * (q + kv)
        # The norms of queries and keys are recomputed with them.
        saved = shapes.norm_bytes * size
        yield elementwise(shapes, "projections", forward=2 * size, backward=3 * size, saved=saved)
    if not m.positions:
        yield elementwise(shapes, "rotary", forward=2 * n * (q + kv), backward=2 * n * (q + kv))
    yield from (fused_core(shapes, attention) if f.flash else core(shapes))
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
    yield product(
        shapes, "projections", inner=latent.rank, outer=latent.expansion_width / t, saved=e * n * (queries + values)
    )
    yield elementwise(shapes, "rotary", forward=4 * n * queries, backward=4 * n * queries)
    length = shapes.options.sequence_length
    if latent.indexer is not None and not latent.indexer.reused:
        yield from _indexer(shapes, latent.indexer, latent.query_rank or h)
    latent_core = _attention_core(
        shapes, flops=n * latent.core_flops(length) / t, heads=latent.heads / t, width=values / (latent.heads / t),
        kept=values, exchanged=queries + values,
    )  # fmt: skip
    yield latent_core if latent.is_sparse(length) else _quadratic(latent_core)
    yield matmul(shapes, "output", tokens=n, local=values, out=True)


def _indexer(shapes: Shapes, indexer: Indexer, query_rank: int) -> Iterator[Operator]:
    """Scores of all tokens before each, and the chosen ones' places, which the backward reads; nothing has a gradient.

    Every tensor-parallel rank computes all of it.
    """
    n, h, length = shapes.tokens, shapes.model.hidden, shapes.options.sequence_length
    linear = shapes.speed.linear
    widths = ((query_rank, indexer.heads * indexer.width), (h, indexer.width + indexer.heads))
    chosen = min(indexer.tokens, length)
    yield Operator(
        name="projections",
        forward=sum(linear(n, inner, outer, cast=n * inner) for inner, outer in widths),
        backward_input=0.0,
    )
    scores = shapes.speed.attention(n * indexer.flops(length), rows=n * indexer.heads)
    yield _quadratic(Operator(name="core", forward=scores, backward_input=0.0, saved=INDEX_BYTES * n * chosen))


INDEX_BYTES = 4
"""Bytes of a chosen token's place (transformers' int32)."""


def _recurrence(shapes: Shapes, recurrence: AnyRecurrence) -> Iterator[Operator]:
    """Projection, convolution, a recurrence over chunks, and a gated norm of its result.

    The core is timed as attention of as many operations, three times as many backward: by analogy, not measured.  That
    of Gated DeltaNet is several kernels: one goes through the chunks of a sequence in turn, the others are bound by
    memory.
    """
    n, e, t = shapes.tokens, shapes.element, shapes.options.tensor
    mixed, projected = recurrence.convolution_width / t, recurrence.projection_width / t
    values, flops = recurrence.values / t, recurrence.flops / t
    yield matmul(shapes, "projections", tokens=n, local=projected, saved=e * n * projected)
    yield elementwise(shapes, "activation", forward=4 * n * mixed, backward=6 * n * mixed, saved=e * n * mixed)
    rows = n * recurrence.heads / t
    if isinstance(recurrence, LinearAttention):
        scan, traffic = shapes.options.sequence_length * SCAN_SECONDS_PER_TOKEN, e * n * recurrence.traffic / t
        forward, backward = scan + shapes.speed.stream(traffic), 2 * scan + shapes.speed.stream(3 * traffic)
    else:
        forward = shapes.speed.attention(n * flops, rows=rows)
        backward = shapes.speed.attention(3 * n * flops, rows=rows, backward=True)
    yield Operator(name="core", forward=forward, backward_input=backward, saved=e * n * values)
    yield elementwise(shapes, "norm", forward=4 * n * values, backward=6 * n * values, saved=e * n * values)
    yield matmul(shapes, "output", tokens=n, local=values, out=True)


SCAN_SECONDS_PER_TOKEN = 18e-9
"""Seconds per token of a scan over the chunks of a sequence: flash-linear-attention on a B200 takes 0.263 ms for
4,096 tokens of 8 heads of 128, 0.362 ms for 8,192 and 0.412 ms for 8,192 of 16 (vLLM, pull request 38981)."""


def _end(shapes: Shapes) -> Iterator[Operator]:
    """Yield the operators that follow a half-layer's products."""
    if shapes.model.norms_results:
        # It keeps the product's result, which recomputing the norm alone would need as well.
        yield replace(norm(shapes), name="output")
    yield dropout(shapes)


def fused_core(shapes: Shapes, attention: Attention) -> Iterator[Operator]:
    """Flash attention: only the scores that count; keeps its output and one fp32 number per token and head."""
    m, o = shapes.model, shapes.options
    n, q, kv = shapes.tokens, m.attention_width / o.tensor, m.kv_width / o.tensor
    keys = attention.keys_per_token(o.sequence_length)
    whole = keys == o.sequence_length / 2
    if o.slices > 1:
        yield _sliced_core(shapes, attention)
        return
    fused = _attention_core(
        shapes,
        flops=4 * n * keys * q,
        heads=m.heads / o.tensor,
        width=m.attention_width / m.heads,
        kept=q,
        exchanged=2 * kv,
        ring=whole and m.attention_cap is None,
    )
    yield _quadratic(fused) if whole else fused


def _quadratic(core: Operator) -> Operator:
    """The core of attention to all tokens before a token."""
    return replace(core, longer_forward=core.forward, longer_backward=core.backward_input)


def _sliced_core(shapes: Shapes, attention: Attention) -> Operator:
    """Flash attention of the first slice of a sequence, and what it takes more for every slice before one.

    A window has as many keys in every slice as in the whole sequence on average.
    """
    o, slices = shapes.options, shapes.options.slices
    sequence = replace(shapes, options=replace(o, sequence_length=o.sequence_length * slices, slices=1))
    (whole,) = fused_core(sequence, attention)
    if attention.keys_per_token(o.sequence_length * slices) < o.sequence_length * slices / 2:
        times = {name: getattr(whole, name) / slices for name in ("forward", "backward_input", "saved", "after_input")}
        return replace(whole, **times)
    (first,) = fused_core(replace(shapes, options=replace(o, slices=1)), attention)
    # The slices have 1, 3, 5 and so on halves of a slice before the middle of their own.
    halves = slices * (slices - 1)
    return replace(
        first,
        longer_forward=max(0.0, whole.forward - slices * first.forward) / halves,
        longer_backward=max(0.0, whole.backward_input - slices * first.backward_input) / halves,
    )


def _attention_core(
    shapes: Shapes, *, flops: float, heads: float, width: float, kept: float, exchanged: float, ring: bool = True
) -> Operator:
    """A fused core of so many operations, with heads of `width` numbers, whose result has `kept` numbers per token.

    Context parallelism exchanges the numbers of keys and values, and backward their gradients too.  In a `ring` it does
    so next to the core, and the longer one counts; gathering them comes before, and summing the gradients after.
    """
    n, e, speed = shapes.tokens, shapes.element, shapes.speed
    rows, exchange = n * heads, _exchange(shapes, exchanged)
    forward = speed.attention(flops, rows=rows, width=width)
    backward = speed.attention(2.5 * flops, rows=rows, width=width, backward=True)
    if ring and shapes.framework.merges_rings and shapes.options.context > 1:
        forward, backward = _merged_ring(shapes, forward, backward, width=kept)
    else:
        both = max if ring else add
        forward, backward = both(forward, exchange), both(backward, 2 * exchange)
    # The product after it keeps its own copy, in 8 bits.
    copied = 0.0 if shapes.kept_input == e else shapes.kept_input
    return Operator(
        name="core",
        forward=forward,
        backward_input=backward,
        saved=n * ((e + copied) * kept + 4 * heads),
    )


RING_FORWARD, RING_BACKWARD = 46, 54
"""Bytes per number of the core's result and hop that are read and written to send keys and values on, widen a hop's
result and merge it, and backward to add gradients of queries, keys and values and send the latter on.  Source:
torch/distributed/tensor/experimental/_attention.py (2.6), _SDPAMerger and _templated_ring_attention_backward."""


def _merged_ring(shapes: Shapes, forward: float, backward: float, *, width: float) -> tuple[float, float]:
    """Seconds, forward and backward, of torch's ring attention, whose cores alone take the given seconds.

    Keys and values, repeated for all heads (`width` numbers each), are gathered next to the first hop.  Backward their
    gradients follow them in fp32, each hop's next to the core of the next one, and the last hop's next to nothing.
    """
    speed, ranks, numbers = shapes.speed, shapes.options.context, shapes.tokens * width
    across = ranks * shapes.options.tensor > speed.hardware.devices_per_node
    gathering, hop = _exchange(shapes, 2 * width), speed.message(8 * numbers, across_nodes=across)
    merging, adding = (speed.stream(traffic * (ranks - 1) * numbers) for traffic in (RING_FORWARD, RING_BACKWARD))
    waits = [max(0.0, gathering - seconds / ranks) for seconds in (forward, backward)]
    late = hop + (ranks - 1) * max(0.0, hop - backward / ranks)
    return forward + waits[0] + merging, backward + waits[1] + late + adding


def _exchange(shapes: Shapes, width: float) -> float:
    """Seconds in which a context-parallel rank gets the keys and values of all others."""
    o = shapes.options
    size = shapes.element * shapes.tokens * o.context * width
    alongside = min(o.context, max(1, shapes.speed.hardware.devices_per_node // o.tensor))
    return shapes.speed.gather(size, o.context, alongside=alongside)


def core(shapes: Shapes) -> Iterator[Operator]:
    """Attention with materialised scores: their softmax (and dropout) is kept, all of it, causal or not.

    Its recomputation ("selective", Korthikanti et al.) drops the scores; the output stays.
    """
    m, o, e = shapes.model, shapes.options, shapes.element
    n, q, s = shapes.tokens, m.attention_width / o.tensor, o.sequence_length
    scores = n * s * m.heads / o.tensor
    traffic = shapes.speed.stream(e * (7 if m.attention_dropout else 5) * scores)
    flops, rows = 4 * n * s * q, n * m.heads / o.tensor
    yield _quadratic(
        Operator(
            name="core",
            forward=shapes.speed.attention(flops, rows=rows) + traffic,
            backward_input=shapes.speed.attention(2 * flops, rows=rows) + traffic,
            saved=scores * (2 * e + 1 if m.attention_dropout else e),
        )
    )
    yield Operator(name="context", forward=0.0, backward_input=0.0, saved=e * n * q)


def dropout(shapes: Shapes) -> Operator:
    """Dropout after a half-layer's products, which keeps a mask of one byte per number."""
    size = shapes.stream * bool(shapes.model.residual_dropout)
    return elementwise(shapes, "dropout", forward=2 * size, backward=2 * size, saved=size)


def mlp(shapes: Shapes, layer: int) -> Iterator[Operator]:
    """The operators of an MLP half-layer, dense or a mixture of experts."""
    m, o = shapes.model, shapes.options
    experts = m.per_layer[layer].mlp
    yield norm(shapes, kept_input=None if isinstance(experts, Experts) else shapes.kept_mlp_input)
    if isinstance(experts, Experts):
        yield from _experts(shapes, experts, layer)
    else:
        yield collectives(shapes)
        yield from _body(shapes, tokens=shapes.tokens, ffn=m.ffn / o.tensor)
    yield from _end(shapes)


def _experts(shapes: Shapes, experts: Experts, layer: int) -> Iterator[Operator]:
    """Routed evenly: every token passes through `per_token` experts, and travels there and back.

    A device routes its share of the residual stream: it sorts copies of the tokens by expert, sends them, and where
    several ranks divide an expert, gathers what these got (Megatron-LM's all-to-all dispatcher).  Back it is the other
    way round.  What the routers say stays in fp32.  Rows are in the order that was once found, however often they are
    sorted: it stays, and so does that in which rows of other devices arrived; their inverses are recomputed.
    """
    m, o, e, speed = shapes.model, shapes.options, shapes.element, shapes.speed
    h, own = m.hidden, shapes.tokens / o.tensor
    sent, shards = own * experts.per_token, o.expert_shards
    routed = sent * shards
    sorting = speed.permute(e * h * (own + sent))
    gathering = speed.gather(e * h * routed, shards, alongside=min(shards, speed.hardware.devices_per_node))
    body = _expert_body(shapes, experts)
    moved = 2 * (sorting + gathering) + _exposed_dispatch(shapes, experts, layer, body)
    orders = INDEX * routed * (2 if o.expert > 1 else 1)
    probabilities = 4 * own * experts.count + (INDEX + 4) * sent
    yield matmul(shapes, "router", tokens=own, local=experts.count, layers=0, saved=probabilities)
    copies = e * sent if shapes.framework.keeps_copies else 0.0
    yield Operator(
        name="dispatch", forward=moved, backward_input=moved, per_expert=True,
        saved=h * (shapes.kept_input * routed + copies) + e * sent + orders, always=orders,
    )  # fmt: skip
    yield from (replace(op, per_expert=True) for op in body)
    if experts.bias:
        yield _biases(shapes, routed * h)
    if experts.shared:
        yield collectives(shapes)
        yield from _body(shapes, tokens=shapes.tokens, ffn=experts.shared / o.tensor)


def dispatch_time(shapes: Shapes, layer: int) -> float:
    """Seconds of a micro-batch in which the tokens of a layer travel to its experts and back, forward and backward."""
    experts = shapes.model.per_layer[layer].mlp
    assert isinstance(experts, Experts)
    return 2 * _exposed_dispatch(shapes, experts, layer, _expert_body(shapes, experts))


def _expert_body(shapes: Shapes, experts: Experts) -> list[Operator]:
    """The operators of a device's experts."""
    o = shapes.options
    routed = shapes.tokens / o.tensor * experts.per_token * o.expert_shards
    return list(_body(shapes, tokens=routed, ffn=experts.ffn / o.expert_shards, experts=experts.count / o.expert))


def _exposed_dispatch(shapes: Shapes, experts: Experts, layer: int, body: Sequence[Operator]) -> float:
    """Seconds in which tokens travel there and back, without those next to another micro-batch's computing.

    A forward runs next to a backward: the travels of both are hidden by the computing of both, half of which is a
    travel's share.
    """
    travel = 2 * _dispatch(shapes, experts, tokens=shapes.tokens / shapes.options.tensor)
    if not shapes.framework.dispatch_overlap:
        return travel
    computing = (op.forward + op.backward_input + op.backward_weight for op in chain(body, attention(shapes, layer)))
    return max(0.0, travel - sum(computing) / 2)


INDEX = 8
"""Bytes of an index."""

DIRECT = 0.95
"""Share of links and network that DeepEP reaches (its README: 153 of 160 GB/s within a node of H800s, 43 to 58 GB/s
over cards of 50 GB/s)."""


def _dispatch(shapes: Shapes, experts: Experts, *, tokens: float) -> float:
    """Seconds in which a device's tokens get to the devices of their experts: one copy per expert, device or node."""
    o, speed, k = shapes.options, shapes.speed, experts.per_token
    size = shapes.element * tokens * shapes.model.hidden
    alongside = max(1, min(o.expert, speed.hardware.devices_per_node // o.expert_shards))
    nodes = o.expert / alongside
    others = size * (nodes - 1) / nodes
    if shapes.framework.dispatches_once:
        copies, crossings = _places(o.expert, experts), _places(nodes, experts)
        within = size * copies * (alongside - 1) / alongside
        return speed.all_to_all(within=within, crossing=others * crossings, reached=DIRECT)
    return speed.all_to_all(within=size * k * (alongside - 1) / o.expert, crossing=others * k)


def _places(count: float, experts: Experts) -> float:
    """Mean number of devices or nodes, of so many, that a token's experts are on: n (1 - (1 - 1/n)^k)."""
    reached = max(1.0, count * experts.reach)
    return reached * (1 - (1 - 1 / reached) ** experts.per_token)


BIASES_16, BIASES_32 = (12.0, 16.0), (28.0, 40.0)
"""Bytes moved per number of the experts' results, forward and backward, to add biases times probabilities to 16 bits,
where probabilities are in 16 bits, as without `--moe-router-dtype`, or in fp32, as DeepEP has them."""


def _biases(shapes: Shapes, size: float) -> Operator:
    """The biases of the experts' last product, weighed by the router's probabilities: torch's operators per expert.

    The products, the sums and what joins all experts' are written one after the other.  Source:
    megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias (0.16.1).
    """
    forward, backward = BIASES_32 if shapes.framework.dispatches_once else BIASES_16
    stream = shapes.speed.stream
    return Operator(
        name="biases", forward=stream(forward * size), backward_input=stream(backward * size), per_expert=True
    )


def _body(shapes: Shapes, *, tokens: float, ffn: float, experts: float = 1) -> Iterator[Operator]:
    m, e = shapes.model, shapes.element
    size = tokens * ffn
    up, adapted = m.matrices - 1, m.experts is None
    yield matmul(
        shapes, "mlp", tokens=tokens, local=up * ffn, saved=e * up * size, layers=up * adapted, experts=experts
    )  # fmt: skip
    if not (m.gated and shapes.framework.fused_activation):
        kept = e if m.gated else shapes.kept_mlp_input
        yield elementwise(shapes, "activation", forward=2 * size, backward=3 * size, saved=kept * size)
    if m.gated:
        yield elementwise(shapes, "multiply", forward=3 * size, backward=5 * size, saved=shapes.kept_mlp_input * size)
    yield matmul(shapes, "output", tokens=tokens, local=ffn, out=True, layers=int(adapted), experts=experts)
