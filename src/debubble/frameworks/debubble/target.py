"""debubble's own runtime as a target."""

from __future__ import annotations

from debubble.targets.limits import runtime
from debubble.targets.target import Target, targets

targets.add(
    "debubble",
    Target(
        name="debubble",
        title="debubble's runtime",
        zero=(0, 1, 2, 3),
        zero_alone=(0, 1, 2, 3),
        rules=(runtime,),
    ),
)
