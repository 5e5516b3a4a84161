"""DeepSpeed as a target."""

from __future__ import annotations

from debubble.targets.levers import WHOLE, EachLayer, TargetLevers
from debubble.targets.limits import PLAIN, next_token_alone, one_of, only_one, text_alone
from debubble.targets.orders import OwnOrders
from debubble.targets.target import Target, targets

targets.add(
    "deepspeed",
    Target(
        name="deepspeed",
        title="DeepSpeed",
        zero_alone=(0, 1, 2, 3),
        rules=(
            *PLAIN,
            only_one("tensor"),
            only_one("context"),
            only_one("expert"),
            one_of("dtype", ("bf16", "fp16", "fp32")),
            next_token_alone,
            text_alone,
        ),
        levers=TargetLevers(OwnOrders(("1f1b",)), EachLayer(WHOLE)),
    ),
)
