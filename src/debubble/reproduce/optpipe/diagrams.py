"""OptPipe's Figures 1 and 2, which have no numbers, in debubble's own terms."""

from __future__ import annotations

from debubble.reproduce.drawings import Boxes


def framework() -> Boxes:
    """Figure 1: initialize, profile, schedule and train."""
    start, train, costs, search, plan = (
        "initialize: a schedule\nwithin the limit,\nbuilt or from the cache",
        "train: ranks run the plan",
        "profile: times of the\noperations in these steps",
        "search: better orders\nfor these times",
        "a plan file",
    )
    return Boxes(
        title="Figure 1: `debubble train --online`",
        boxes={start: (0, 0), train: (1, 0), costs: (2, 0), search: (2, 1), plan: (1, 1)},
        arrows=[
            (start, train, ""),
            (train, costs, "traces"),
            (costs, search, ""),
            (search, plan, "better ones"),
            (plan, train, "between two steps"),
        ],
    )


def computation_graph() -> Boxes:
    """Figure 2: a stage's forward, and the two halves of its backward."""
    below, product, above = "$x_i$", "F: $z = W x_i$", "F: $x_{i+1} = \\sigma(z)$"
    gradient_below, inner, gradient_above = (
        "I: $\\nabla_{x_i} L = W^T \\nabla_z L$",
        "I: $\\nabla_z L = \\sigma'(z)\\, \\nabla_{x_{i+1}} L$",
        "$\\nabla_{x_{i+1}} L$",
    )
    weight = "W: $\\nabla_W L = \\nabla_z L\\, x_i^T$"
    return Boxes(
        title="Figure 2: the operations F, I and W of a stage (the paper calls I its B)",
        boxes={
            below: (0, 0), product: (1, 0), above: (2, 0),
            gradient_below: (0, 1), inner: (1, 1), gradient_above: (2, 1), weight: (1, 2),
        },
        arrows=[
            (below, product, ""), (product, above, ""), (gradient_above, inner, ""), (inner, gradient_below, ""),
            (inner, weight, ""), (product, inner, "z, kept until I"), (below, weight, "x, kept until W"),
        ],
    )  # fmt: skip
