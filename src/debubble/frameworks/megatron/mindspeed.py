"""MindSpeed-LLM, slime and FlagScale: their own arguments as those of Megatron-LM or Megatron-Bridge that say the same.

Source: MindSpeed-LLM 2.1, mindspeed_llm/features_manager and mindspeed_llm/training/arguments.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from debubble.frameworks.megatron.stages import MANUAL

_NAMES = {
    "--multi-head-latent-attention": "--multi-latent-attention",
    "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    "--qk-nope-head-dim": "--qk-head-dim",
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--shared-expert-gate": "--moe-shared-expert-gate",
    "--num-layer-list": MANUAL,
}
"""Arguments that Megatron-LM or Primus call otherwise."""
_MARKS = frozenset(
    (
        "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--no-shared-storage",
        "--model-type-hf", "--context-parallel-algo", "--moe-intermediate-size", "--multi-head-latent-attention",
    )
)  # fmt: skip
"""Arguments by which a script of MindSpeed-LLM is known."""
_RANKS, _ADAPTED = ("--lora-r", "--lora-rank", "--lora-dim"), ("--lora-target-modules", "--target-modules")
"""Rank and layers of the adapters, by MindSpeed-LLM, slime and FlagScale."""
SWAPS = "--swap-optimizer"
"""The argument by which the optimizer's states are on the host between steps."""
_PLAIN_SPECS = ("mindspeed_llm.tasks.models.spec.qwen3_spec", "mindspeed_llm.tasks.models.spec.deepseek_spec")
"""Layers that the other arguments describe."""
_SPEC_OF_FOUR_NORMS = "mindspeed_llm.tasks.models.spec.gemma2_spec"
_OF_GEMMA = frozenset(("--input-embeds-norm", "--interleave-sliding-window", "--output-logit-softcapping"))
"""The layers with norms behind both halves, of GLM-4 as of Gemma 2, and what Gemma 2 has besides."""
_EXTENDS = "--moe-tp-extend-ep"
_OWN = ("--n-shared-experts", "--first-k-dense-replace", "--noop-layers", _EXTENDS)
_VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


def is_mindspeed(settings: Mapping[str, Any]) -> bool:
    """Tell whether the arguments of a script are MindSpeed-LLM's, which has many of its own."""
    return not _MARKS.isdisjoint(settings)


def as_megatron(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a script, with those of MindSpeed-LLM that describe layers as Megatron-LM has them."""
    named = {_NAMES.get(name, name): value for name, value in settings.items() if name not in _OWN}
    spec = str(settings.get("--spec", ("",))[0])
    is_glm = spec == _SPEC_OF_FOUR_NORMS and "--post-norm" in settings and _OF_GEMMA.isdisjoint(settings)
    if spec in _PLAIN_SPECS or is_glm:
        del named["--spec"]
    shared = _number(settings.get("--n-shared-experts"))
    width = _number(named.get("--moe-ffn-hidden-size", named.get("--ffn-hidden-size")))
    if shared and width:
        named.setdefault("--moe-shared-expert-intermediate-size", str(shared * width))
    layers = _number(settings.get("--num-layers"))
    idle = {int(word) for word in _words(settings.get("--noop-layers")) if word.isdecimal() and int(word) < layers}
    if "--first-k-dense-replace" in settings and layers:
        dense, every = _number(settings["--first-k-dense-replace"]), max(_number(named.get("--moe-layer-freq")), 1)
        sparse = [int(at >= dense and at % every == 0) for at in range(layers) if at not in idle]
        named["--moe-layer-freq"] = str(sparse)
    if idle:
        named["--num-layers"] = str(layers - len(idle))
        named |= _layout(named, layers, idle)
    if named.pop("--use-dualpipev", False):
        named.setdefault("--schedules-method", "dualpipev")
    if settings.get(_EXTENDS):
        # Whole experts on each tensor-parallel rank, in place of a part of each.
        ranks = [_number(named.get(f"--{kind}-model-parallel-size")) or 1 for kind in ("tensor", "expert")]
        named |= {"--expert-model-parallel-size": str(math.prod(ranks)), "--expert-tensor-parallel-size": "1"}
    adapters = _adapters(named)
    return {**named, **adapters}


def _adapters(named: dict[str, Any]) -> Mapping[str, Any]:
    """The adapters as Megatron-Bridge has them; removes the arguments that describe them, where there are any."""
    rank = next((named[name] for name in _RANKS if _number(named.get(name))), None)
    if rank is None:
        return {}
    layers = next((named[name] for name in _ADAPTED if name in named), "all-linear")
    for name in (*_RANKS, *_ADAPTED, "--peft-type"):
        named.pop(name, None)
    return {"peft.dim": rank, **({} if layers == "all-linear" else {"peft.target_modules": layers})}


def _layout(named: dict[str, Any], layers: int, idle: set[int]) -> Mapping[str, Any]:
    """The stages without the layers that do nothing; removes the arguments in whose place the layout stands."""
    pipeline = _number(named.get("--pipeline-model-parallel-size")) or 1
    each, chunks = (_number(named.pop(name, None)) for name in _VIRTUAL)
    length = each or layers // (pipeline * (chunks or 1))
    if pipeline == 1 or layers % length:
        return {}
    stages = ["t" * sum(at not in idle for at in range(begin, begin + length)) for begin in range(0, layers, length)]
    further = "m" * _number(named.get("--mtp-num-layers"))
    return {"--pipeline-model-parallel-layout": f"E{'|'.join(stages)}{further}L"}


def _words(value: Any) -> list[str]:
    words = value if isinstance(value, list | tuple) else [value]
    return [word for each in words for word in str(each).replace(",", " ").split()]


def _number(value: Any) -> int:
    """A number in an argument; 0 where it is none."""
    return int(value) if str(value).isdecimal() else 0
