"""The frameworks, each with its rules and levers; Megatron-Core's modules among them.

docs/exports.md describes them, target by target.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from debubble.targets.levers import NOTHING, WHOLE, AllLayers, Choice, EachLayer, TargetLevers, Way, same
from debubble.targets.limits import (
    adam_on_hosts,
    divided_experts,
    eight_bits_divided,
    experts_to_overlap,
    fused_attention,
    next_token_alone,
    one_of,
    only_one,
    optimizers_of_fsdp,
    plain_model,
    runtime,
    small_moments_divided,
    text_alone,
    unset,
    untied,
    whole_experts,
    whole_sequences,
)
from debubble.targets.offload import ModuleOffload
from debubble.targets.orders import COMBINED, GivenOrders, OwnOrders
from debubble.targets.target import Target, targets


def _selective() -> dict[str, Choice]:
    """Megatron's modules that can be recomputed in every layer, and what that does.

    Transformer Engine fuses the norms of a dense layer into the products after them: `layernorm` does nothing there,
    and `mlp` recomputes the second one too.  In a layer with experts the second norm stands alone, `mlp` does nothing,
    and `moe` or `moe_act` is what recomputes the experts or their activation functions.
    """
    cores = {"none": (), "core": ("core_attn",)}
    experts = {
        (): "none",
        ("layernorm",): "norm",
        ("moe_act",): "activation+multiply",
        ("layernorm", "moe_act"): "norm+activation+multiply",
        ("moe",): "mlp",
        ("layernorm", "moe"): "norm+mlp",
    }
    choices = {"none": same(NOTHING)}
    for core, modules in cores.items():
        for inner, sparse in experts.items():
            for dense in ((), ("mlp",)):
                names = sorted((*modules, *inner, *dense))
                if names:
                    way = Way(core, "norm+mlp" if dense else "none")
                    choices["+".join(names)] = Choice(way, Way(core, sparse))
    return choices


MEGATRON_MODULES = _selective()
"""Setting -> what it recomputes; the modules are joined by `+`."""

OVERLAPPED_MODULES = {name: choice for name, choice in MEGATRON_MODULES.items() if "moe" not in name.split("+")}
"""The settings that combined 1F1B leaves, which takes the experts' computing apart."""


def _offload() -> tuple[ModuleOffload, ...]:
    """The settings that plans choose from: attention's modules, the experts', or both, and four shares of them.

    Dense layers have attention's alone; the norms before attention and before a dense MLP are fused into products.
    """
    attention = ((), ("core_attn",), ("core_attn", "attn_proj"), ("qkv_linear", "core_attn", "attn_proj"))
    experts = ((), ("expert_fc1",), ("moe_act",), ("expert_fc1", "moe_act"), ("mlp_norm", "expert_fc1", "moe_act"))
    sets = [(*first, *second) for first, second in product(attention, experts) if first or second]
    return tuple(ModuleOffload(modules, share) for modules in sets for share in (1.0, 0.75, 0.5, 0.25))


OFFLOAD = _offload()

LOOPS = frozenset({"linear", "looped", "v_shape"})
PLAIN = (
    whole_sequences,
    *map(unset, ("host_optimizer", "expert_overlap", "gradient_dtype", "moment_dtype", "flash_attention")),
)
"""Rules of the frameworks for which debubble writes none of these options."""
FSDP = (one_of("dtype", ("bf16", "fp32")), next_token_alone, text_alone)
"""Rules of the frameworks on torch's FSDP, the last of theirs."""
MEGATRON = (
    whole_sequences,
    eight_bits_divided,
    optimizers_of_fsdp,
    adam_on_hosts,
    small_moments_divided,
    experts_to_overlap,
    fused_attention("bf16", "fp16", "fp8", "mxfp8"),
    text_alone,
)
"""Rules of Megatron-LM, and of what takes its arguments."""


def _add(name: str, title: str, **facts: Any) -> None:
    targets.add(name, Target(name=name, title=title, **facts))


_add("debubble", "debubble's runtime", zero=(0, 1, 2, 3), zero_alone=(0, 1, 2, 3), rules=(runtime,))
_add(
    "torch",
    "torch",
    zero_alone=(0, 1, 2, 3),
    rules=(whole_sequences,),
    levers=TargetLevers(GivenOrders(), EachLayer(WHOLE), keeps_until_weights=True),
)
_add(
    "torchtitan",
    "torchtitan",
    zero_alone=(0, 2, 3),
    rules=(*PLAIN, whole_experts, one_of("optimizer", ("adamw", "adam")), *FSDP),
    for_pipelines=(untied,),
    levers=TargetLevers(GivenOrders(LOOPS), EachLayer(WHOLE), keeps_until_weights=True),
)
_add(
    "automodel",
    "NeMo Automodel",
    zero_alone=(0, 1, 2, 3),
    rules=(*PLAIN, whole_experts, one_of("optimizer", ("adamw", "adam", "momentum", "sgd")), *FSDP),
    for_pipelines=(plain_model, untied),
    levers=TargetLevers(GivenOrders(LOOPS), AllLayers(WHOLE), keeps_until_weights=True),
)
_add(
    "megatron",
    "Megatron-LM",
    zero=(0, 1, 2, 3),
    zero_alone=(0, 1, 2, 3),
    rules=MEGATRON,
    levers=TargetLevers(OwnOrders(("1f1b", "interleaved")), AllLayers(MEGATRON_MODULES, block=True), offload=OFFLOAD),
    overlapping=TargetLevers(OwnOrders((COMBINED,)), AllLayers(OVERLAPPED_MODULES, whole=False), offload=OFFLOAD),
)
_add(
    "primus",
    "AMD Primus",
    zero=(0, 1, 2, 3),
    zero_alone=(0, 1, 2, 3),
    rules=MEGATRON,
    levers=TargetLevers(OwnOrders(("1f1b", "interleaved", "zb-h1")), EachLayer(WHOLE), offload=OFFLOAD),
    overlapping=TargetLevers(OwnOrders((COMBINED,)), AllLayers(OVERLAPPED_MODULES, whole=False), offload=OFFLOAD),
)
_add(
    "deepspeed",
    "DeepSpeed",
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
)


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
    "full": WHOLE["full"],
    **{
        f"{attention}|{mlp}": same(Way(attention, mlp))
        for attention in ("none", "norm")
        for mlp in ("none", "norm", "multiply", "norm+multiply", "activation+multiply", "norm+activation+multiply")
        if (attention, mlp) != ("none", "none")
    },
}
"""Ways whose operators are cells that a pattern can name."""

_add(
    "mindformers",
    "MindFormers",
    zero=(0, 1, 2),
    zero_alone=(0, 1, 2),
    rules=(
        *PLAIN,
        divided_experts,
        one_of("optimizer", ("adamw",)),
        fused_attention("bf16", "fp16"),
        next_token_alone,
        text_alone,
    ),
    levers=TargetLevers(
        OwnOrders(("1f1b", "interleaved-less-memory")), EachLayer(MINDFORMERS_PATTERNS, from_start=True)
    ),
)
