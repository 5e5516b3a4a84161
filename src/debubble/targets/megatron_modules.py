"""Megatron-Core's modules: those of a layer that can be recomputed, and those whose inputs can be offloaded."""

from __future__ import annotations

from itertools import product

from debubble.targets.offload import ModuleOffload
from debubble.targets.recomputation import NOTHING, Choice, Way, same


def _selective() -> dict[str, Choice]:
    """Megatron's modules that can be recomputed in every layer, and what that does.

    Transformer Engine fuses the norms of a dense layer into the products behind them: `layernorm` does nothing there,
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
"""Those that combined 1F1B leaves, which takes the experts' computing apart."""


def _offload() -> tuple[ModuleOffload, ...]:
    """The settings that plans choose from: attention's modules, the experts', or both, and four shares of them.

    Dense layers have attention's alone; the norms before attention and before a dense MLP are fused into products.
    """
    attention = ((), ("core_attn",), ("core_attn", "attn_proj"), ("qkv_linear", "core_attn", "attn_proj"))
    experts = ((), ("expert_fc1",), ("moe_act",), ("expert_fc1", "moe_act"), ("mlp_norm", "expert_fc1", "moe_act"))
    sets = [(*first, *second) for first, second in product(attention, experts) if first or second]
    return tuple(ModuleOffload(modules, share) for modules in sets for share in (1.0, 0.75, 0.5, 0.25))


OFFLOAD = _offload()
