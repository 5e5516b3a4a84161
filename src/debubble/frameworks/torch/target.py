"""torch's pipelining as a target: its order of operations, recomputation layer by layer."""

from __future__ import annotations

from debubble.targets.levers import FULL_OR_NONE, PerLayer, TargetLevers
from debubble.targets.limits import whole_sequences
from debubble.targets.orders import GivenOrders
from debubble.targets.target import Target, targets

targets.add(
    "torch",
    Target(
        name="torch",
        title="torch",
        zero_alone=(0, 1, 2, 3),
        rules=(whole_sequences,),
        levers=TargetLevers(GivenOrders(), PerLayer(FULL_OR_NONE), keeps_until_weights=True),
    ),
)
