"""Times and bytes of the operators of half-layers on one device, and their recomputation strategies.

A strategy is `none`, `full`, or operators joined by `+`.  `cmb` (Obscura's cheap operators) is
norm+activation+multiply.  `mlp` is the up projection with all elementwise operators after it, which need its result.
`selective` is the attention core where its scores are kept (Korthikanti et al.); with a fused core, which keeps none,
it is `cmb`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from debubble.costs.devices.speed import Speed
from debubble.costs.frameworks import Framework
from debubble.costs.unit import Strategy
from debubble.ir import RunOptions
from debubble.models.architecture import Architecture
from debubble.models.quantization import quantized_bytes

CALLS = {"router": 6, "dispatch": 16, "collectives": 0, "rotary": 2, "core": 2}
"""Operator -> host calls that launch its kernels; 1 for all others."""
OVERLAPPED_PIECES = 4
"""Pieces of a product that overlaps with a tensor-parallel collective (Transformer Engine's default), at most one per
rank."""
TENSOR_OVERLAP_SLOWDOWN = 0.2
"""Seconds that a second of a tensor-parallel collective adds to the product that it overlaps with.  Fitted to the 52
such runs in the fit half of the published runs: the median error of their steps is 3.1% with it and 3.6% without, and
4.0% and 5.0% for the 41 held-out runs."""
UNCOMPILED_TRAFFIC = 2.0
"""Memory traffic of separate elementwise operators, as a multiple of a fused kernel's."""
UNCOMPILED_RMSNORM, UNCOMPILED_ROTARY = (4.2, 8.2), (5.0, 5.0)
"""The same, forward and backward, for torch's operators of an RMSNorm in fp32 and of rotary embeddings: counted reads
and writes (torchtitan's and torchtune's RMSNorm: 42 and 98 bytes per number with the residual)."""
UNCOMPILED_GATE = (1.0, 1.0)
"""The same for a gated activation and its multiply, which already count as separate operators."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Costs of one operator of a half-layer: seconds and bytes."""

    name: str
    forward: float
    backward_input: float
    backward_weight: float = 0.0
    saved: float = 0.0
    """Bytes saved for the backward unless the operator is recomputed."""
    after_input: float = 0.0
    """Bytes that remain between the input gradient and the weight gradient."""
    always: float = 0.0
    """Bytes saved for the backward even if the operator is recomputed."""
    longer_forward: float = 0.0
    """Seconds within `forward` that are proportional to the keys that a token attends to.  For slices: the additional
    seconds for every further multiple of the keys that the first slice's tokens attend to."""
    longer_backward: float = 0.0
    """The same for `backward_input`."""
    per_expert: bool = False
    """True if its sizes depend on the router's choice, so that no CUDA graph captures it."""

    @property
    def calls(self) -> int:
        """Number of host calls that launch its kernels."""
        return CALLS.get(self.name, 1)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The settings of a run on which operators' costs depend."""

    model: Architecture
    options: RunOptions
    framework: Framework
    speed: Speed
    frozen: bool = False
    """True if nothing in the model is trained, not even adapters."""

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch on one context-parallel rank."""
        return self.options.micro_batch_size * self.options.sequence_length / self.options.context

    @property
    def division(self) -> int:
        """The number of tensor-parallel ranks over which the residual stream is sharded."""
        return self.options.tensor if self.framework.sequence_parallel else 1

    @property
    def stream(self) -> float:
        """Elements of the residual stream on one device."""
        return self.tokens * self.model.hidden / self.division

    @property
    def norm_bytes(self) -> int:
        """Bytes per number that a norm saves: transformers' RMSNorm also saves its input in fp32."""
        eager = self.model.whole_layers and self.model.norm == "rmsnorm" and self.element < 4
        return self.element + 4 * eager

    @property
    def element(self) -> int:
        """Bytes per number in the run's dtype."""
        return self.speed.element

    def uncompiled_traffic(self, name: str) -> tuple[float, float]:
        """Memory traffic, forward and backward, of torch's elementwise operators as a multiple of a fused kernel's."""
        if name == "norm" and self.model.norm == "rmsnorm":
            return UNCOMPILED_RMSNORM
        if name in ("activation", "multiply") and self.model.gated:
            return UNCOMPILED_GATE
        return UNCOMPILED_ROTARY if name == "rotary" else (UNCOMPILED_TRAFFIC, UNCOMPILED_TRAFFIC)

    @property
    def saved_input(self) -> float:
        """Bytes per number of a product's input that is saved for its weight gradient."""
        return self.speed.product_bytes if self.framework.keeps_8_bits else self.element

    @property
    def saved_mlp_input(self) -> float:
        """Bytes per number of saved inputs of MLP products; frozen ones save none."""
        return self.saved_input if self.adapts_mlp else 0.0

    @property
    def adapts_mlp(self) -> bool:
        """False if LoRA adapts only the query, key and value projections."""
        return not self.frozen and (not self.options.lora or self.framework.adapted == "all")


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
    """Linear layers from the residual stream to `local` columns on this device, or with `out` from there back.

    Their two gradients are two more products of the same size; the weight gradient needs the input and the output
    gradient, and is accumulated in the framework's gradients.  With LoRA, `layers` of the linear layers have adapters,
    and only these a weight gradient.  The head and routers stay in bf16 where others are in fp8 (Transformer Engine's
    recipes).  With several `experts` there is a product per expert for its share of the tokens.  Overlapped collectives
    divide the forward into pieces of fewer rows.
    """
    h, e, speed, rank = shapes.model.hidden, shapes.element, shapes.speed, shapes.options.lora
    inner, outer = (local, h) if out else (h, local)
    rows, in_bf16 = tokens / experts, name in ("logits", "router")
    kernels = 1 if shapes.framework.grouped_experts else experts

    def multiply(m: float, k: float, n: float, *, cast: float = 0.0, added: float = 0.0, pieces: int = 1) -> float:
        if in_bf16:
            return speed.matmul(m, k, n, count=experts, added=added, kernels=kernels)
        m, count = m / pieces, experts * pieces
        return speed.linear(m, k, n, count=count, added=added, cast=cast, kernels=kernels)

    pieces = min(shapes.options.tensor, OVERLAPPED_PIECES) if shapes.framework.tensor_overlap else 1
    forward = multiply(rows, inner, outer, cast=tokens * inner, pieces=pieces)
    backward = multiply(rows, outer, inner, cast=tokens * outer)
    if not rank:
        added = 2 * shapes.framework.gradient_bytes * experts * h * local
        weight = multiply(inner, rows, outer, added=added)
        if experts > 1:
            weight /= speed.hardware.efficiency.grouped_weight
        return Operator(
            name=name, forward=forward, backward_input=backward, backward_weight=weight, saved=saved,
            after_input=e * tokens * (h / shapes.division + local),
        )  # fmt: skip
    if not layers:
        return Operator(name=name, forward=forward, backward_input=backward, saved=saved)
    adapters = speed.matmul(tokens, inner, layers * rank) + speed.matmul(tokens, rank, outer)
    # Quantized weights are read, and written in the run's dtype, before every product.
    format, size = shapes.options.quantize, h * local
    dequantize = speed.stream(quantized_bytes(format, size) + e * size) if format else 0.0
    if shapes.frozen or (name != "projections" and not shapes.adapts_mlp):
        return Operator(name=name, forward=forward + dequantize, backward_input=backward + dequantize, saved=saved)
    return Operator(
        name=name,
        forward=forward + adapters + dequantize,
        backward_input=backward + adapters + dequantize,
        backward_weight=adapters,
        saved=saved + e * tokens * layers * rank,
        after_input=e * tokens * (h / shapes.division + local + 2 * layers * rank),
    )


def product(shapes: Shapes, name: str, *, inner: float, outer: float, saved: float) -> Operator:
    """A linear layer between two local widths."""
    n, speed = shapes.tokens, shapes.speed
    return Operator(
        name=name,
        forward=speed.linear(n, inner, outer, cast=n * inner),
        backward_input=speed.linear(n, outer, inner, cast=n * outer),
        backward_weight=speed.linear(inner, n, outer),
        saved=saved,
        after_input=shapes.element * n * (inner + outer),
    )


def elementwise(shapes: Shapes, name: str, *, forward: float, backward: float, saved: float = 0.0) -> Operator:
    """A memory-bound operator, which reads and writes these numbers forward and backward."""
    e, speed = shapes.element, shapes.speed
    more_forward, more_backward = (1.0, 1.0) if shapes.framework.compiled else shapes.uncompiled_traffic(name)
    return Operator(
        name=name,
        forward=speed.stream(e * more_forward * forward),
        backward_input=speed.stream(e * more_backward * backward),
        saved=saved,
    )


def norm(shapes: Shapes, *, saved_input: float | None = None) -> Operator:
    """The norm with the residual addition.

    Its result is saved as the input of the next product, with `saved_input` bytes per number; None: in its own dtype.
    """
    size = shapes.stream
    saved = shapes.norm_bytes - (0.0 if saved_input is None else shapes.element - saved_input)
    if shapes.framework.keeps_gathered:
        saved *= shapes.division
    return elementwise(shapes, "norm", forward=5 * size, backward=6 * size, saved=saved * size)


def collectives(shapes: Shapes) -> Operator:
    """The all-gather before and the reduce-scatter after a half-layer's products.

    With sequence parallelism the backward has one more gather; Megatron overlaps all but the first with products, which
    hides half of their time.  With `tensor_overlap` all but one of `tensor` pieces are hidden, and slow the products
    down.
    """
    t, node = shapes.options.tensor, shapes.speed.hardware.devices_per_node
    size = shapes.element * shapes.tokens * shapes.model.hidden
    once = shapes.speed.gather(size, t, alongside=min(t, node))
    if shapes.framework.tensor_overlap:
        once *= 1 / t + TENSOR_OVERLAP_SLOWDOWN * (1 - 1 / t)
    return Operator(name="collectives", forward=2 * once, backward_input=(2 if shapes.division > 1 else 1) * once)


def gathered_logits(shapes: Shapes, logits: float) -> Operator:
    """The all-gather of the logits over tensor-parallel ranks, for a loss that is not tensor-parallel."""
    t, node = shapes.options.tensor, shapes.speed.hardware.devices_per_node
    gathered = shapes.speed.gather(shapes.element * logits, t, alongside=min(t, node))
    return Operator(name="collectives", forward=gathered, backward_input=0.0)


CMB = "norm+activation+multiply"
_IMPLIED = {"mlp": ("mlp", "activation", "multiply")}


def strategies(
    operators: Sequence[Operator], *, boundary: float, framework: Framework, unread: float = 0.0
) -> dict[str, Strategy]:
    """The strategies of a unit with these operators and an input of `boundary` bytes.

    Full recomputation omits `unread` seconds of the forward.
    """
    min_activation = boundary + sum(op.always for op in operators)
    total = min_activation + sum(op.saved for op in operators)
    sets = {text: text for text in subsets(_present(operators))}
    aliases = {"cmb": CMB, "selective": CMB if framework.flash else "core"}
    result = {"none": Strategy(total)}
    for name, text in {**sets, **aliases}.items():
        chosen = _operators_in(text)
        dropped = [op for op in operators if op.name in chosen]
        result[name] = Strategy(
            total - sum(op.saved for op in dropped), sum(op.forward for op in dropped), _restricted(text, operators),
            attention=sum(op.longer_forward for op in dropped),
        )  # fmt: skip
    longer = sum(op.longer_forward for op in operators)
    result["full"] = Strategy(min_activation, sum(op.forward for op in operators) - unread, attention=longer)
    return result


def _operators_in(text: str) -> set[str]:
    return {operator for name in text.split("+") for operator in _IMPLIED.get(name, (name,))}


def _restricted(text: str, operators: Sequence[Operator]) -> str:
    """The strategy `text` restricted to the operators that the unit has."""
    present = _present(operators)
    return "+".join(name for name in text.split("+") if name in present) or "none"


RECOMPUTABLE = ("norm", "projections", "core", "mlp", "activation", "multiply")
"""The operators that a strategy may name, in the order of computation."""


def _present(operators: Sequence[Operator]) -> list[str]:
    """Names of the operators that the unit can recompute, in the order of computation."""
    with_saved = {op.name for op in operators if op.saved}
    return [name for name in RECOMPUTABLE if name in with_saved]


def subsets(present: Sequence[str]) -> Iterator[str]:
    """Enumerate the sets of operators that a unit may recompute, as strategies.

    Args:
        present: Names of the operators that it can recompute, in the order of computation.
    """
    for mask in range(1, 2 ** len(present)):
        subset = [name for i, name in enumerate(present) if mask >> i & 1]
        if "mlp" not in subset or not {"activation", "multiply"} & set(subset):
            yield "+".join(subset)
