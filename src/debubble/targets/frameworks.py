"""The frameworks, each with its rules and levers.

What they are is told in docs/exports.md, target by target.
"""

from __future__ import annotations

from debubble.costs.step import MOMENTS
from debubble.ir import RunOptions
from debubble.models import Model
from debubble.targets.levers import Levers
from debubble.targets.limits import (
    divided_experts,
    fused_attention,
    next_token_alone,
    one_of,
    only_one,
    plain_model,
    runtime,
    text_alone,
    untied,
    whole_experts,
)
from debubble.targets.orders import GivenOrders, OwnOrders
from debubble.targets.recomputation import NOTHING, WHOLE, Alike, Choice, EachLayer, Way, same
from debubble.targets.target import Rule, Target, targets

LOOPS = frozenset({"linear", "looped", "v_shape"})


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


def _eight_bits_divided(title: str) -> Rule:
    def rule(options: RunOptions, model: Model) -> str | None:
        if options.optimizer != "adamw-8bit" or options.zero:
            return None
        others = " or ".join(name for name in MOMENTS if name != "adamw-8bit")
        return (
            f"{title} has no optimizer 'adamw-8bit' that debubble can write; plan again with --zero 1, or with"
            f" --optimizer {others}."
        )

    return rule


def _torch_levers(title: str, placements: frozenset[str] | None, recomputation: EachLayer | Alike) -> Levers:
    return Levers(
        title=title, orders=GivenOrders(placements), recomputation=recomputation, keeps_until_weights=True
    )  # fmt: skip


def _add(target: Target) -> None:
    targets.add(target.name, target)


_add(Target(name="debubble", title="debubble's runtime", zero=(0, 1, 2), zero_alone=(0, 1, 2), rules=(runtime,)))
_add(
    Target(
        name="torch",
        title="torch",
        zero_alone=(0, 1, 2, 3),
        levers=_torch_levers("torch", None, EachLayer(WHOLE)),
    )
)
_add(
    Target(
        name="torchtitan",
        title="torchtitan",
        zero_alone=(0, 2, 3),
        rules=(
            whole_experts(title="torchtitan"),
            one_of("optimizer", ("adamw", "adam"), title="torchtitan"),
            one_of("dtype", ("bf16", "fp32"), title="torchtitan"),
            next_token_alone(title="torchtitan"),
            text_alone(title="torchtitan"),
        ),
        for_pipelines=(untied(title="torchtitan"),),
        levers=_torch_levers("torchtitan", LOOPS, EachLayer(WHOLE)),
    )
)
_add(
    Target(
        name="automodel",
        title="NeMo Automodel",
        zero_alone=(0, 1, 2, 3),
        rules=(
            whole_experts(title="NeMo Automodel"),
            one_of("optimizer", ("adamw", "adam", "momentum", "sgd"), title="NeMo Automodel"),
            one_of("dtype", ("bf16", "fp32"), title="NeMo Automodel"),
            next_token_alone(title="NeMo Automodel"),
            text_alone(title="NeMo Automodel"),
        ),
        for_pipelines=(plain_model(title="NeMo Automodel"), untied(title="NeMo Automodel")),
        levers=_torch_levers("NeMo Automodel", LOOPS, Alike(WHOLE)),
    )
)
_add(
    Target(
        name="megatron",
        title="Megatron-LM",
        rules=(
            _eight_bits_divided("Megatron-LM"),
            fused_attention(("bf16", "fp16", "fp8"), title="Megatron-LM"),
            text_alone(title="Megatron-LM"),
        ),
        levers=Levers(
            title="Megatron-LM",
            orders=OwnOrders(("1f1b", "interleaved")),
            recomputation=Alike(MEGATRON_MODULES, block=True),
        ),
    )
)
_add(
    Target(
        name="primus",
        title="AMD Primus",
        rules=(
            _eight_bits_divided("AMD Primus"),
            fused_attention(("bf16", "fp16", "fp8"), title="AMD Primus"),
            text_alone(title="AMD Primus"),
        ),
        levers=Levers(
            title="AMD Primus",
            orders=OwnOrders(("1f1b", "interleaved", "zb-h1")),
            recomputation=EachLayer(WHOLE),
        ),
    )
)
_add(
    Target(
        name="deepspeed",
        title="DeepSpeed",
        zero_alone=(0, 1, 2, 3),
        rules=(
            only_one("tensor", title="DeepSpeed"),
            only_one("context", title="DeepSpeed"),
            only_one("expert", title="DeepSpeed"),
            one_of("dtype", ("bf16", "fp16", "fp32"), title="DeepSpeed"),
            next_token_alone(title="DeepSpeed"),
            text_alone(title="DeepSpeed"),
        ),
        levers=Levers(title="DeepSpeed", orders=OwnOrders(("1f1b",)), recomputation=EachLayer(WHOLE)),
    )
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
    Target(
        name="mindformers",
        title="MindFormers",
        zero=(0, 1, 2),
        zero_alone=(0, 1, 2),
        rules=(
            divided_experts(title="MindFormers"),
            one_of("optimizer", ("adamw",), title="MindFormers"),
            fused_attention(("bf16", "fp16"), title="MindFormers"),
            next_token_alone(title="MindFormers"),
            text_alone(title="MindFormers"),
        ),
        levers=Levers(
            title="MindFormers",
            orders=OwnOrders(("1f1b", "interleaved")),
            recomputation=EachLayer(MINDFORMERS_PATTERNS, from_start=True),
        ),
    )
)
