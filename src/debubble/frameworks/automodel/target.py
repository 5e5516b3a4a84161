"""NeMo Automodel as a target."""

from __future__ import annotations

from debubble.targets.levers import FULL_OR_NONE, TargetLevers, Uniform
from debubble.targets.limits import FSDP, PLAIN, divided_tokens, one_of, plain_model, untied, whole_experts
from debubble.targets.orders import LOOPS, GivenOrders
from debubble.targets.target import Target, targets

targets.add(
    "automodel",
    Target(
        name="automodel",
        title="NeMo Automodel",
        framework="automodel",
        zero_alone=(0, 1, 2, 3),
        rules=(*PLAIN, divided_tokens, whole_experts, one_of("optimizer", ("adamw", "adam", "momentum", "sgd")), *FSDP),
        for_pipelines=(plain_model, untied),
        levers=TargetLevers(GivenOrders(LOOPS), Uniform(FULL_OR_NONE), keeps_until_weights=True),
    ),
)
