"""The experts of Megatron-DeepSpeed.

Source: microsoft/Megatron-DeepSpeed, megatron/arguments.py and megatron/model/transformer.py; DeepSpeed, moe/layer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from debubble.frameworks.megatron.arguments import Arguments

_EXPERTS, _KIND = "--num-experts", "--mlp-type"
_RANKS, _RANKS_OF_MEGATRON = "--moe-expert-parallel-size", "--expert-model-parallel-size"
_TOP, _TOP_OF_MEGATRON = "--topk", "--moe-router-topk"
_OF_EXPERTS = (
    _EXPERTS, _KIND, _RANKS, _TOP, "--moe-loss-coeff", "--moe-train-capacity-factor", "--moe-eval-capacity-factor",
    "--moe-min-capacity", "--moe-token-dropping", "--disable-moe-token-dropping", "--expert-interval",
    "--create-moe-param-group", "--use-tutel", "--enable-expert-tensor-parallelism",
)  # fmt: skip
"""Arguments of experts, without effect if there is one per layer."""
HARMLESS = " moe_loss_coeff create_moe_param_group "
"""Arguments that cost neither time nor memory of a step."""


def has_experts(settings: Mapping[str, Any]) -> bool:
    """Tell whether a script of Megatron-DeepSpeed has several experts in a layer."""
    said = settings.get(_EXPERTS, "1")
    return any(str(count) not in ("0", "1") for count in (said if isinstance(said, tuple) else (said,)))


def with_experts_of_megatron(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of Megatron-DeepSpeed's experts by Megatron-LM's names.

    By default every tensor-parallel rank has whole experts.  Tokens are sent by all-to-all (deepspeed/moe).
    """
    named = dict(settings)
    if "--deepspeed" not in named or not has_experts(named):
        return named
    for name, of_megatron in ((_RANKS, _RANKS_OF_MEGATRON), (_TOP, _TOP_OF_MEGATRON)):
        if name in named:
            named[of_megatron] = named.pop(name)
    if not named.pop("--enable-expert-tensor-parallelism", False):
        named["--expert-tensor-parallel-size"] = "1"
    return {"--moe-token-dispatcher-type": "alltoall", **named}


def check_experts(arguments: Arguments) -> None:
    """Mark arguments of experts as unused if there are none; InputError if there is a dense MLP next to them."""
    if not arguments.flag("--deepspeed"):
        return
    if not has_experts(arguments.settings):
        for name in _OF_EXPERTS:
            arguments.mark_unused(name)
        return
    arguments.get("--expert-interval")
    if arguments.word(_KIND, "standard") == "residual":
        raise arguments.refusal(
            _KIND,
            "is residual, whose dense MLP next to the experts is not predicted: to predict the job without, give --args"
            f" '{_KIND} standard'",
        )
