"""Times and bytes of the operators that half-layers are made of, on one device, and the strategies of recomputing them.

A strategy is `none`, `full`, or operators joined by `+`.  `cmb` (Obscura's cheap operators) is
norm+activation+multiply.  `mlp` is the whole inner MLP: a product's result is of no use without what follows it.
`selective` is the attention core where its scores are kept (Korthikanti et al.); a fused core keeps none, and then it
is `cmb`, which is what selective recomputation has become.
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
"""Calls by which the host launches an operator's kernels, where they are not one."""
OVERLAPPED_PIECES = 4
"""Pieces of a product next to which tensor-parallel collectives run (Transformer Engine's default), or one per rank."""
TENSOR_OVERLAP_SLOWDOWN = 0.2
"""Seconds by which a second of a tensor-parallel collective slows the product that it overlaps with.  Fitted to the 52
published runs of the fit half that overlap them: half of their steps are within 3.1% with it and 3.6% without, and of
the 41 others within 4.0% and 5.0%."""
UNCOMPILED_TRAFFIC = 2.0
"""Memory traffic of elementwise operators that run one after another, over that of a fused kernel."""
UNCOMPILED_RMSNORM, UNCOMPILED_ROTARY = (4.2, 8.2), (5.0, 5.0)
"""Traffic forward and backward of an RMSNorm that is widened to fp32, and of rotary embeddings, as torch's operators:
their reads and writes, counted (torchtitan's and torchtune's RMSNorm: 42 and 98 bytes a number with the residual)."""
UNCOMPILED_GATE = (1.0, 1.0)
"""Of a gated activation and its product, which already count as operators of their own."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One step of a half-layer.  `saved` is what it leaves for the backward, and its recomputation drops."""

    name: str
    forward: float
    backward_input: float
    backward_weight: float = 0.0
    saved: float = 0.0
    """Bytes."""
    after_input: float = 0.0
    """Bytes that stay between its backward for inputs and its backward for weights."""
    always: float = 0.0
    """Bytes that it leaves whatever is recomputed."""
    longer_forward: float = 0.0
    """The part of `forward` that grows with the keys that a token attends to; of a slice, what a slice takes more whose
    tokens attend once more to the keys of those of the first."""
    longer_backward: float = 0.0
    """The part of `backward_input` that does."""
    per_expert: bool = False
    """True if its sizes depend on the router's choice, so that no CUDA graph of a layer has it."""

    @property
    def calls(self) -> int:
        """Calls of the host that launch its kernels."""
        return CALLS.get(self.name, 1)


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """The settings of the run that operators' costs depend on."""

    model: Architecture
    options: RunOptions
    framework: Framework
    speed: Speed
    frozen: bool = False
    """True if nothing of the model is trained, not even adapters."""

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

    def uncompiled(self, name: str) -> tuple[float, float]:
        """Memory traffic forward and backward of an elementwise operator as torch's, over that of a fused kernel."""
        if name == "norm" and self.model.norm == "rmsnorm":
            return UNCOMPILED_RMSNORM
        if name in ("activation", "multiply") and self.model.gated:
            return UNCOMPILED_GATE
        return UNCOMPILED_ROTARY if name == "rotary" else (UNCOMPILED_TRAFFIC, UNCOMPILED_TRAFFIC)

    @property
    def kept_input(self) -> float:
        """Bytes per number of what a product keeps of its input for its weights' gradient."""
        return self.speed.product_bytes if self.framework.keeps_8_bits else self.element

    @property
    def kept_mlp_input(self) -> float:
        """Bytes per number that products of MLPs keep; frozen ones keep nothing."""
        return self.kept_input if self.adapts_mlp else 0.0

    @property
    def adapts_mlp(self) -> bool:
        """False if LoRA leaves all but the query, key and value projections frozen."""
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
    """Linear layers between the residual stream and `local` columns on this device; `out`: back into the stream.

    Their two gradients are two more products of the same size; the weights' needs their input and their output's
    gradient, and adds up in the framework's gradients.  With LoRA, `layers` of them (0: none may) have adapters, whose
    weights alone have a gradient.  The head and routers stay in bf16 where the others are in fp8 (Transformer Engine's
    recipes).  With several `experts` each has a product of its own for its share of the tokens.  Overlapped
    collectives divide it forward into pieces, each with fewer rows.
    """
    h, e, speed, rank = shapes.model.hidden, shapes.element, shapes.speed, shapes.options.lora
    inner, outer = (local, h) if out else (h, local)
    each, whole = tokens / experts, name in ("logits", "router")
    kernels = 1 if shapes.framework.grouped_experts else experts

    def multiply(m: float, k: float, n: float, *, cast: float = 0.0, added: float = 0.0, pieces: int = 1) -> float:
        if whole:
            return speed.matmul(m, k, n, count=experts, added=added, kernels=kernels)
        m, count = m / pieces, experts * pieces
        return speed.linear(m, k, n, count=count, added=added, cast=cast, kernels=kernels)

    pieces = min(shapes.options.tensor, OVERLAPPED_PIECES) if shapes.framework.tensor_overlap else 1
    forward = multiply(each, inner, outer, cast=tokens * inner, pieces=pieces)
    backward = multiply(each, outer, inner, cast=tokens * outer)
    if not rank:
        added = 2 * shapes.framework.gradient_bytes * experts * h * local
        weight = multiply(inner, each, outer, added=added)
        if experts > 1:
            weight /= speed.hardware.efficiency.grouped_weight
        return Operator(
            name=name, forward=forward, backward_input=backward, backward_weight=weight, saved=saved,
            after_input=e * tokens * (h / shapes.division + local),
        )  # fmt: skip
    if not layers:
        return Operator(name=name, forward=forward, backward_input=backward, saved=saved)
    adapters = speed.matmul(tokens, inner, layers * rank) + speed.matmul(tokens, rank, outer)
    # Quantised weights are read, and written in the run's dtype, before each product.
    format, size = shapes.options.quantize, h * local
    expanded = speed.stream(quantized_bytes(format, size) + e * size) if format else 0.0
    if shapes.frozen or (name != "projections" and not shapes.adapts_mlp):
        return Operator(name=name, forward=forward + expanded, backward_input=backward + expanded, saved=saved)
    return Operator(
        name=name,
        forward=forward + adapters + expanded,
        backward_input=backward + adapters + expanded,
        backward_weight=adapters,
        saved=saved + e * tokens * layers * rank,
        after_input=e * tokens * (h / shapes.division + local + 2 * layers * rank),
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
        after_input=shapes.element * n * (inner + outer),
    )


def elementwise(shapes: Shapes, name: str, *, forward: float, backward: float, saved: float = 0.0) -> Operator:
    """An operator that is bound by memory: numbers read and written forward and backward."""
    e, speed = shapes.element, shapes.speed
    more_forward, more_backward = (1.0, 1.0) if shapes.framework.compiled else shapes.uncompiled(name)
    return Operator(
        name=name,
        forward=speed.stream(e * more_forward * forward),
        backward_input=speed.stream(e * more_backward * backward),
        saved=saved,
    )


def norm(shapes: Shapes, *, kept_input: float | None = None) -> Operator:
    """The norm with the residual addition next to it.

    Its result is kept as the input of the product that it feeds, so many bytes per number; None: as it is.
    """
    size = shapes.stream
    kept = shapes.norm_bytes - (0.0 if kept_input is None else shapes.element - kept_input)
    if shapes.framework.keeps_gathered:
        kept *= shapes.division
    return elementwise(shapes, "norm", forward=5 * size, backward=6 * size, saved=kept * size)


def collectives(shapes: Shapes) -> Operator:
    """The all-gather before and the reduce-scatter after a half-layer's products.

    Backward there is one more gather with sequence parallelism; Megatron runs all but the first next to products, which
    hides half of their time.  Next to the products that need them they are hidden but for one of `tensor` pieces, and
    the hidden ones slow those products.
    """
    t, node = shapes.options.tensor, shapes.speed.hardware.devices_per_node
    size = shapes.element * shapes.tokens * shapes.model.hidden
    once = shapes.speed.gather(size, t, alongside=min(t, node))
    if shapes.framework.tensor_overlap:
        once *= 1 / t + TENSOR_OVERLAP_SLOWDOWN * (1 - 1 / t)
    return Operator(name="collectives", forward=2 * once, backward_input=(2 if shapes.division > 1 else 1) * once)


def gathered_logits(shapes: Shapes, logits: float) -> Operator:
    """The all-gather of the logits over tensor-parallel ranks, for a loss that reads them whole."""
    t, node = shapes.options.tensor, shapes.speed.hardware.devices_per_node
    gathered = shapes.speed.gather(shapes.element * logits, t, alongside=min(t, node))
    return Operator(name="collectives", forward=gathered, backward_input=0.0)


CMB = "norm+activation+multiply"
_IMPLIED = {"mlp": ("mlp", "activation", "multiply")}


def strategies(
    operators: Sequence[Operator], *, boundary: float, framework: Framework, unread: float = 0.0
) -> dict[str, Strategy]:
    """Every sensible strategy of a unit with these operators and an input of `boundary` bytes.

    Full recomputation leaves out `unread` seconds of the forward.
    """
    least = boundary + sum(op.always for op in operators)
    total = least + sum(op.saved for op in operators)
    own = {text: text for text in subsets(_present(operators))}
    aliases = {"cmb": CMB, "selective": CMB if framework.flash else "core"}
    result = {"none": Strategy(total)}
    for name, text in {**own, **aliases}.items():
        chosen = _operators_in(text)
        dropped = [op for op in operators if op.name in chosen]
        result[name] = Strategy(
            total - sum(op.saved for op in dropped), sum(op.forward for op in dropped), _named(text, operators),
            attention=sum(op.longer_forward for op in dropped),
        )  # fmt: skip
    longer = sum(op.longer_forward for op in operators)
    result["full"] = Strategy(least, sum(op.forward for op in operators) - unread, attention=longer)
    return result


def _operators_in(text: str) -> set[str]:
    return {operator for part in text.split("+") for operator in _IMPLIED.get(part, (part,))}


def _named(text: str, operators: Sequence[Operator]) -> str:
    """Keep those of the operators in `text` that the unit has."""
    present = _present(operators)
    return "+".join(name for name in text.split("+") if name in present) or "none"


RECOMPUTABLE = ("norm", "projections", "core", "mlp", "activation", "multiply")
"""The operators that a strategy may name, in the order of computation."""


def _present(operators: Sequence[Operator]) -> list[str]:
    """Names of the operators that the unit can recompute, in the order of computation."""
    having = {op.name for op in operators if op.saved}
    return [name for name in RECOMPUTABLE if name in having]


def subsets(present: Sequence[str]) -> Iterator[str]:
    """The sets of operators that a unit may recompute, as strategies.

    Args:
        present: Names of the operators that it can recompute, in the order of computation.
    """
    for mask in range(1, 2 ** len(present)):
        subset = [name for i, name in enumerate(present) if mask >> i & 1]
        if "mlp" not in subset or not {"activation", "multiply"} & set(subset):
            yield "+".join(subset)
