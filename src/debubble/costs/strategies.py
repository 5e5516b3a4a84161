"""Recomputation strategies: which operators' results a unit drops and computes again.

A strategy is `none`, `full`, or operators joined by `+`.  `cmb` (Obscura's cheap operators) is
norm+activation+multiply.  `mlp` is the whole inner MLP: a product's result is of no use without what follows it.
`selective` is the attention core where its scores are kept (Korthikanti et al.); a fused core keeps none, and then it
is `cmb`, which is what selective recomputation has become.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from debubble.costs.operators import Framework, Operator
from debubble.costs.units import Strategy

CMB = "norm+activation+multiply"
_IMPLIED = {"mlp": ("mlp", "activation", "multiply")}


def strategies(operators: Sequence[Operator], *, boundary: float, framework: Framework) -> dict[str, Strategy]:
    """Every sensible strategy of a unit with these operators and an input of `boundary` bytes."""
    total = boundary + sum(op.saved for op in operators)
    own = {text: text for text in _subsets(operators)}
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
    """Those of the operators in `text` that the unit has."""
    present = _present(operators)
    return "+".join(name for name in text.split("+") if name in present) or "none"


def _present(operators: Sequence[Operator]) -> list[str]:
    """What the unit can recompute, in the order of computation."""
    having = {op.name for op in operators if op.saved}
    return [name for name in ("norm", "projections", "core", "mlp", "activation", "multiply") if name in having]


def _subsets(operators: Sequence[Operator]) -> Iterator[str]:
    present = _present(operators)
    for mask in range(1, 2 ** len(present)):
        subset = [name for i, name in enumerate(present) if mask >> i & 1]
        if "mlp" not in subset or not {"activation", "multiply"} & set(subset):
            yield "+".join(subset)
