"""The operators of half-layers: attention or another token mixer, and the MLP or experts.

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
    """The operators of an attention half-layer, or of another token mixer in its place."""
    yield norm(shapes, saved_input=shapes.saved_input)
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
    # Later slices need the keys and values of a slice even if it recomputes.
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
    """Multi-head latent attention: latent vectors of queries and of keys and values are normed and up-projected.

    Every tensor-parallel rank computes the latent vectors, and up-projects them to its heads (Megatron-LM).
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
        output=values, exchanged=queries + values,
    )  # fmt: skip
    yield latent_core if latent.is_sparse(length) else _quadratic(latent_core)
    yield matmul(shapes, "output", tokens=n, local=values, out=True)


def _indexer(shapes: Shapes, indexer: Indexer, query_rank: int) -> Iterator[Operator]:
    """Sparse attention's indexer: scores of all previous tokens, and saved indices of the chosen ones; no gradient.

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
"""Bytes of a chosen token's index (int32 in transformers)."""


def _recurrence(shapes: Shapes, recurrence: AnyRecurrence) -> Iterator[Operator]:
    """Linear attention or a state-space model: projection, convolution, chunked recurrence, gated norm, output.

    The recurrence is timed as attention with as many operations, three times as many backward: by analogy, not
    measured.  Gated DeltaNet's is a sequential scan over the chunks of a sequence, and memory-bound kernels.
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
    """The operators after a half-layer's products."""
    if shapes.model.norms_results:
        # It saves the product's result, which is needed even to recompute the norm alone.
        yield replace(norm(shapes), name="output")
    yield dropout(shapes)


def fused_core(shapes: Shapes, attention: Attention) -> Iterator[Operator]:
    """Flash attention: skips masked scores; saves its output and one fp32 number per token and head."""
    m, o = shapes.model, shapes.options
    n, q, kv = shapes.tokens, m.attention_width / o.tensor, m.kv_width / o.tensor
    keys = attention.keys_per_token(o.sequence_length)
    is_causal = keys == o.sequence_length / 2  # without a window
    if o.slices > 1:
        yield _sliced_core(shapes, attention)
        return
    fused = _attention_core(
        shapes,
        flops=4 * n * keys * q,
        heads=m.heads / o.tensor,
        width=m.attention_width / m.heads,
        output=q,
        exchanged=2 * kv,
        ring=is_causal and m.attention_cap is None,
    )
    yield _quadratic(fused) if is_causal else fused


def _quadratic(core: Operator) -> Operator:
    """The core with all of its time proportional to the keys: attention to all previous tokens."""
    return replace(core, longer_forward=core.forward, longer_backward=core.backward_input)


def _sliced_core(shapes: Shapes, attention: Attention) -> Operator:
    """Flash attention of the first slice of a sequence; later slices take `longer_forward` and `longer_backward` more.

    With a sliding window, all slices take the average of the full sequence.
    """
    o, slices = shapes.options, shapes.options.slices
    sequence = replace(shapes, options=replace(o, sequence_length=o.sequence_length * slices, slices=1))
    (full,) = fused_core(sequence, attention)
    if attention.keys_per_token(o.sequence_length * slices) < o.sequence_length * slices / 2:
        costs = {name: getattr(full, name) / slices for name in ("forward", "backward_input", "saved", "after_input")}
        return replace(full, **costs)
    (first,) = fused_core(replace(shapes, options=replace(o, slices=1)), attention)
    # Tokens of slice i attend to 2i + 1 times as many keys as those of slice 0: in total this many times more.
    additional = slices * (slices - 1)
    return replace(
        first,
        longer_forward=max(0.0, full.forward - slices * first.forward) / additional,
        longer_backward=max(0.0, full.backward_input - slices * first.backward_input) / additional,
    )


def _attention_core(
    shapes: Shapes, *, flops: float, heads: float, width: float, output: float, exchanged: float, ring: bool = True
) -> Operator:
    """A fused core of `flops` operations with heads of `width` numbers, and `output` numbers per token.

    Context parallelism exchanges keys and values (`exchanged` numbers per token), and backward their gradients, too.
    In a `ring` this overlaps with the core; otherwise an all-gather precedes it, and a reduce-scatter follows.
    """
    n, e, speed = shapes.tokens, shapes.element, shapes.speed
    rows, exchange = n * heads, _exchange(shapes, exchanged)
    forward = speed.attention(flops, rows=rows, width=width)
    backward = speed.attention(2.5 * flops, rows=rows, width=width, backward=True)
    if ring and shapes.framework.merges_rings and shapes.options.context > 1:
        forward, backward = _merged_ring(shapes, forward, backward, width=output)
    else:
        combine = max if ring else add
        forward, backward = combine(forward, exchange), combine(backward, 2 * exchange)
    # The next product saves a copy in 8 bits.
    copied = 0.0 if shapes.saved_input == e else shapes.saved_input
    return Operator(
        name="core",
        forward=forward,
        backward_input=backward,
        saved=n * ((e + copied) * output + 4 * heads),
    )


RING_FORWARD, RING_BACKWARD = 46, 54
"""Memory traffic in bytes per hop and number of the core's output.  Forward: send keys and values, cast and merge the
hop's output.  Backward: add gradients of queries, keys and values, and send those of keys and values.  Source:
torch/distributed/tensor/experimental/_attention.py (2.6), _SDPAMerger and _templated_ring_attention_backward."""


def _merged_ring(shapes: Shapes, forward: float, backward: float, *, width: float) -> tuple[float, float]:
    """Seconds of torch's ring attention, forward and backward, given those of its cores.

    Keys and values, repeated for all heads (`width` numbers each), are gathered during the first hop.  In the backward
    a hop's gradients of them are sent in fp32 during the core of the next hop; those of the last hop are exposed.
    """
    speed, ranks, numbers = shapes.speed, shapes.options.context, shapes.tokens * width
    across = ranks * shapes.options.tensor > speed.hardware.devices_per_node
    gathering, hop = _exchange(shapes, 2 * width), speed.message(8 * numbers, across_nodes=across)
    merging, adding = (speed.stream(traffic * (ranks - 1) * numbers) for traffic in (RING_FORWARD, RING_BACKWARD))
    waits = [max(0.0, gathering - seconds / ranks) for seconds in (forward, backward)]
    late = hop + (ranks - 1) * max(0.0, hop - backward / ranks)
    return forward + waits[0] + merging, backward + waits[1] + late + adding


def _exchange(shapes: Shapes, width: float) -> float:
    """Seconds in which a context-parallel rank gathers the keys and values of all other ranks."""
    o = shapes.options
    size = shapes.element * shapes.tokens * o.context * width
    alongside = min(o.context, max(1, shapes.speed.hardware.devices_per_node // o.tensor))
    return shapes.speed.gather(size, o.context, alongside=alongside)


def core(shapes: Shapes) -> Iterator[Operator]:
    """Attention with materialized scores, whose softmax (and dropout) is saved in full, even if causal.

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
    """Dropout after a half-layer's products, which saves a mask of one byte per number."""
    size = shapes.stream * bool(shapes.model.residual_dropout)
    return elementwise(shapes, "dropout", forward=2 * size, backward=2 * size, saved=size)


def mlp(shapes: Shapes, layer: int) -> Iterator[Operator]:
    """The operators of an MLP half-layer, dense or a mixture of experts."""
    m, o = shapes.model, shapes.options
    experts = m.per_layer[layer].mlp
    yield norm(shapes, saved_input=None if isinstance(experts, Experts) else shapes.saved_mlp_input)
    if isinstance(experts, Experts):
        yield from _experts(shapes, experts, layer)
    else:
        yield collectives(shapes)
        yield from _body(shapes, tokens=shapes.tokens, ffn=m.ffn / o.tensor)
    yield from _end(shapes)


def _experts(shapes: Shapes, experts: Experts, layer: int) -> Iterator[Operator]:
    """A mixture of experts with balanced routing: dispatch, experts, combine, and shared experts.

    A device routes its shard of the residual stream: it permutes copies of the tokens by expert, sends them, and where
    an expert is sharded, gathers those that its other ranks received (Megatron-LM's all-to-all dispatcher).  Combine
    does the reverse.  Router outputs are saved in fp32.  Two permutations are saved even under recomputation, those of
    sent and of received tokens; their inverses are recomputed.
    """
    m, o, e, speed = shapes.model, shapes.options, shapes.element, shapes.speed
    h, local = m.hidden, shapes.tokens / o.tensor
    sent, shards = local * experts.per_token, o.expert_shards
    routed = sent * shards
    sorting = speed.permute(e * h * (local + sent))
    gathering = speed.gather(e * h * routed, shards, alongside=min(shards, speed.hardware.devices_per_node))
    body = _expert_body(shapes, experts)
    moved = 2 * (sorting + gathering) + _exposed_dispatch(shapes, experts, layer, body)
    permutations = PERMUTATION_BYTES * routed * (2 if o.expert > 1 else 1)
    probabilities = 4 * local * experts.count + (PERMUTATION_BYTES + 4) * sent
    yield matmul(shapes, "router", tokens=local, local=experts.count, layers=0, saved=probabilities)
    copies = e * sent if shapes.framework.keeps_copies else 0.0
    yield Operator(
        name="dispatch", forward=moved, backward_input=moved, per_expert=True,
        saved=h * (shapes.saved_input * routed + copies) + e * sent + permutations, always=permutations,
    )  # fmt: skip
    yield from (replace(op, per_expert=True) for op in body)
    if experts.bias:
        yield _biases(shapes, routed * h)
    if experts.shared:
        yield collectives(shapes)
        yield from _body(shapes, tokens=shapes.tokens, ffn=experts.shared / o.tensor)


def dispatch_time(shapes: Shapes, layer: int) -> float:
    """Seconds per micro-batch of a layer's dispatch and combine that are not hidden, forward and backward."""
    experts = shapes.model.per_layer[layer].mlp
    assert isinstance(experts, Experts)
    return 2 * _exposed_dispatch(shapes, experts, layer, _expert_body(shapes, experts))


def _expert_body(shapes: Shapes, experts: Experts) -> list[Operator]:
    """The operators of a device's experts."""
    o = shapes.options
    routed = shapes.tokens / o.tensor * experts.per_token * o.expert_shards
    return list(_body(shapes, tokens=routed, ffn=experts.ffn / o.expert_shards, experts=experts.count / o.expert))


def _exposed_dispatch(shapes: Shapes, experts: Experts, layer: int, body: Sequence[Operator]) -> float:
    """Seconds of dispatch and combine that are not hidden by another micro-batch's computing.

    With `dispatch_overlap` a forward runs next to a backward: the computing of both hides the transfers of both, half
    of it per transfer.
    """
    transfer = 2 * _dispatch(shapes, experts, tokens=shapes.tokens / shapes.options.tensor)
    if not shapes.framework.dispatch_overlap:
        return transfer
    computing = (op.forward + op.backward_input + op.backward_weight for op in chain(body, attention(shapes, layer)))
    return max(0.0, transfer - sum(computing) / 2)


PERMUTATION_BYTES = 8
"""Bytes of a token's index in a permutation (int64)."""

DEEPEP_EFFICIENCY = 0.95
"""Fraction of link and network bandwidth that DeepEP reaches (its README: 153 of 160 GB/s within a node of H800s, 43 to
58 GB/s over cards of 50 GB/s)."""


def _dispatch(shapes: Shapes, experts: Experts, *, tokens: float) -> float:
    """Seconds of one dispatch of a device's tokens: a copy per expert, or with DeepEP per device and node."""
    o, speed, k = shapes.options, shapes.speed, experts.per_token
    size = shapes.element * tokens * shapes.model.hidden
    alongside = max(1, min(o.expert, speed.hardware.devices_per_node // o.expert_shards))
    nodes = o.expert / alongside
    crossing = size * (nodes - 1) / nodes
    if shapes.framework.dispatches_once:
        copies, crossings = _mean_destinations(o.expert, experts), _mean_destinations(nodes, experts)
        within = size * copies * (alongside - 1) / alongside
        return speed.all_to_all(within=within, crossing=crossing * crossings, reached=DEEPEP_EFFICIENCY)
    return speed.all_to_all(within=size * k * (alongside - 1) / o.expert, crossing=crossing * k)


def _mean_destinations(count: float, experts: Experts) -> float:
    """Mean number of devices (or nodes), of `count` = n, with one of a token's k experts: n (1 - (1 - 1/n)^k)."""
    reached = max(1.0, count * experts.reach)
    return reached * (1 - (1 - 1 / reached) ** experts.per_token)


BIAS_TRAFFIC_16, BIAS_TRAFFIC_32 = (12.0, 16.0), (28.0, 40.0)
"""Memory traffic in bytes per number of the experts' output, forward and backward, of adding biases times router
probabilities in 16 bits (without `--moe-router-dtype`) or fp32 (DeepEP)."""


def _biases(shapes: Shapes, size: float) -> Operator:
    """The biases of the experts' last product, weighted by the router's probabilities.

    Every expert has its own multiply and add, and a concatenation follows.  Source:
    megatron/core/transformer/moe/experts.py, TEGroupedMLP._apply_bias (0.16.1).
    """
    forward, backward = BIAS_TRAFFIC_32 if shapes.framework.dispatches_once else BIAS_TRAFFIC_16
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
        saved = e if m.gated else shapes.saved_mlp_input
        yield elementwise(shapes, "activation", forward=2 * size, backward=3 * size, saved=saved * size)
    if m.gated:
        yield elementwise(shapes, "multiply", forward=3 * size, backward=5 * size, saved=shapes.saved_mlp_input * size)
    yield matmul(shapes, "output", tokens=tokens, local=ffn, out=True, layers=int(adapted), experts=experts)
