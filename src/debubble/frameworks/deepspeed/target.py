"""DeepSpeed as a target."""

from __future__ import annotations

from debubble.targets.levers import FULL_OR_NONE, PerLayer, TargetLevers
from debubble.targets.limits import (
    WITHOUT_OPTIONS,
    Refusal,
    next_token_alone,
    one_of,
    only_one,
    text_alone,
    whole_optimizer_on_hosts,
)
from debubble.targets.orders import OwnOrders
from debubble.targets.target import Target, targets

_divided_masters = Refusal(
    lambda o, model: o.master_dtype != "fp32" and not (o.zero or o.data == 1),
    "{title} steps weights in bf16 under ZeRO alone; plan again with --zero 1, or without --master-dtype.",
)
"""Weights that the optimizer steps in bf16, and that ZeRO does not divide."""

targets.add(
    "deepspeed",
    Target(
        name="deepspeed",
        title="DeepSpeed",
        framework="deepspeed",
        zero_alone=(0, 1, 2, 3),
        rules=(
            *WITHOUT_OPTIONS,
            whole_optimizer_on_hosts,
            _divided_masters,
            only_one("tensor"),
            only_one("context"),
            only_one("expert"),
            one_of("dtype", ("bf16", "fp16", "fp32")),
            next_token_alone,
            text_alone,
        ),
        levers=TargetLevers(OwnOrders(("1f1b",)), PerLayer(FULL_OR_NONE)),
    ),
)
