"""torchtitan as a target."""

from __future__ import annotations

from debubble.targets.levers import FULL_OR_NONE, PerLayer, TargetLevers
from debubble.targets.limits import FSDP, PLAIN, divided_tokens, no_weights_in_4_bits, one_of, untied, whole_experts
from debubble.targets.orders import LOOPS, GivenOrders
from debubble.targets.target import Target, targets

targets.add(
    "torchtitan",
    Target(
        name="torchtitan",
        title="torchtitan",
        framework="torchtitan",
        zero_alone=(0, 2, 3),
        rules=(
            *PLAIN,
            divided_tokens,
            whole_experts,
            no_weights_in_4_bits,
            one_of("optimizer", ("adamw", "adam")),
            *FSDP,
        ),
        for_pipelines=(untied,),
        levers=TargetLevers(GivenOrders(LOOPS), PerLayer(FULL_OR_NONE), keeps_until_weights=True),
    ),
)
