"""MindFormers as a target."""

from __future__ import annotations

from debubble.targets.levers import FULL_OR_NONE, NOTHING, PerLayer, TargetLevers, Way, same
from debubble.targets.limits import (
    PLAIN,
    divided_experts,
    fp32_masters,
    fused_attention,
    next_token_alone,
    no_weights_in_4_bits,
    one_of,
    text_alone,
)
from debubble.targets.orders import OwnOrders
from debubble.targets.target import Target, targets

MINDFORMERS_CELLS = {
    "0:norm": (r"attention_norm\.norm", r"input_layernorm"),
    "1:norm": (r"ffn_norm\.norm", r"pre_mlp_layernorm"),
    "1:activation": (r"feed_forward\.w1\.activation\.silu", r"mlp\.activation_func\.silu"),
    "1:multiply": (r"feed_forward\.mul", r"mlp\.mul"),
}
"""Operators of the attention half (0) and the MLP half (1) of a layer as cells of MindFormers' older models, and of
those of its `parallel_core`.  A pattern that matches no cell does nothing."""

MINDFORMERS_PATTERNS = {
    "none": same(NOTHING),
    "full": FULL_OR_NONE["full"],
    **{
        f"{attention}|{mlp}": same(Way(attention, mlp))
        for attention in ("none", "norm")
        for mlp in ("none", "norm", "multiply", "norm+multiply", "activation+multiply", "norm+activation+multiply")
        if (attention, mlp) != ("none", "none")
    },
}
"""Ways whose operators are cells that a pattern can name."""

targets.add(
    "mindformers",
    Target(
        name="mindformers",
        title="MindFormers",
        ascend=True,
        zero=(0, 1, 2),
        zero_alone=(0, 1, 2),
        rules=(
            *PLAIN,
            no_weights_in_4_bits,
            fp32_masters,
            divided_experts,
            one_of("optimizer", ("adamw",)),
            fused_attention("bf16", "fp16"),
            next_token_alone,
            text_alone,
        ),
        levers=TargetLevers(
            OwnOrders(("1f1b", "interleaved-less-memory")), PerLayer(MINDFORMERS_PATTERNS, from_start=True)
        ),
    ),
)
