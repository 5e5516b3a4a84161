"""Megatron-LM as a target, with Megatron-Core's modules for recomputation and offload."""

from __future__ import annotations

from itertools import product

from debubble.targets.levers import NOTHING, Choice, TargetLevers, Uniform, Way, same
from debubble.targets.limits import (
    adam_on_hosts,
    divided_tokens,
    eight_bits_divided,
    experts_to_overlap,
    fp32_masters,
    fsdp_with_a_pipeline,
    fused_attention,
    no_weights_in_4_bits,
    optimizers_of_fsdp,
    small_moments_divided,
    text_alone,
    whole_sequences,
)
from debubble.targets.offload import ModuleOffload
from debubble.targets.orders import COMBINED, OwnOrders
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
OFFLOAD_RELEASE = "a release after megatron-core 0.16.1"
"""Source: validate_args of core_v0.16.1, which does not know --fine-grained-activation-offloading."""

MEGATRON = (
    whole_sequences,
    divided_tokens,
    eight_bits_divided,
    optimizers_of_fsdp,
    adam_on_hosts,
    small_moments_divided,
    fp32_masters,
    experts_to_overlap,
    no_weights_in_4_bits,
    fused_attention("bf16", "fp16", "fp8", "mxfp8"),
    text_alone,
)
"""Rules of Megatron-LM, and of what takes its arguments."""


targets.add(
    "megatron",
    Target(
        name="megatron",
        title="Megatron-LM",
        framework="megatron-lm",
        zero=(0, 1, 2, 3),
        zero_alone=(0, 1, 2, 3),
        rules=MEGATRON,
        untested=(fsdp_with_a_pipeline,),
        levers=TargetLevers(OwnOrders(("1f1b", "interleaved")), Uniform(MEGATRON_MODULES, block=True), offload=OFFLOAD),
        overlapping=TargetLevers(OwnOrders((COMBINED,)), Uniform(OVERLAPPED_MODULES, full=False), offload=OFFLOAD),
        offload_release=OFFLOAD_RELEASE,
    ),
)
