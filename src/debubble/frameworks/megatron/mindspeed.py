"""Translates arguments of MindSpeed-LLM, slime and FlagScale to those of Megatron-LM or Megatron-Bridge.

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
"""Arguments with another name in Megatron-LM or Primus."""
_MARKS = frozenset(
    (
        "--use-fused-rmsnorm", "--use-fused-swiglu", "--use-fused-rotary-pos-emb", "--no-shared-storage",
        "--model-type-hf", "--context-parallel-algo", "--moe-intermediate-size", "--multi-head-latent-attention",
    )
)  # fmt: skip
"""Arguments that identify a script of MindSpeed-LLM."""
_RANKS, _ADAPTED = ("--lora-r", "--lora-rank", "--lora-dim"), ("--lora-target-modules", "--target-modules")
"""Arguments for the rank and the layers of adapters in MindSpeed-LLM, slime and FlagScale."""
SWAP_OPTIMIZER = "--swap-optimizer"
"""The argument that keeps optimizer states on the host between steps."""
_PLAIN_SPECS = ("mindspeed_llm.tasks.models.spec.qwen3_spec", "mindspeed_llm.tasks.models.spec.deepseek_spec")
"""Specs of layers that the other arguments describe."""
_GEMMA2_SPEC = "mindspeed_llm.tasks.models.spec.gemma2_spec"
_GEMMA2_ARGUMENTS = frozenset(("--input-embeds-norm", "--interleave-sliding-window", "--output-logit-softcapping"))
"""The spec with norms after attention and MLP, which GLM-4 and Gemma 2 share, and arguments that only Gemma 2 has."""
_EXTENDS = "--moe-tp-extend-ep"
_REMOVED = ("--n-shared-experts", "--first-k-dense-replace", "--noop-layers", _EXTENDS)
_VIRTUAL = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")


def is_mindspeed(settings: Mapping[str, Any]) -> bool:
    """Tell whether the arguments of a script are MindSpeed-LLM's."""
    return not _MARKS.isdisjoint(settings)


def as_megatron(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a script, with those of MindSpeed-LLM translated to Megatron-LM's."""
    named = {_NAMES.get(name, name): value for name, value in settings.items() if name not in _REMOVED}
    spec = str(settings.get("--spec", ("",))[0])
    is_glm = spec == _GEMMA2_SPEC and "--post-norm" in settings and _GEMMA2_ARGUMENTS.isdisjoint(settings)
    if spec in _PLAIN_SPECS or is_glm:
        del named["--spec"]
    shared = _number(settings.get("--n-shared-experts"))
    width = _number(named.get("--moe-ffn-hidden-size", named.get("--ffn-hidden-size")))
    if shared and width:
        named.setdefault("--moe-shared-expert-intermediate-size", str(shared * width))
    layers = _number(settings.get("--num-layers"))
    idle = {int(word) for word in _words(settings.get("--noop-layers")) if word.isdecimal() and int(word) < layers}
    if "--first-k-dense-replace" in settings and layers:
        dense, frequency = _number(settings["--first-k-dense-replace"]), max(_number(named.get("--moe-layer-freq")), 1)
        sparse = [int(layer >= dense and layer % frequency == 0) for layer in range(layers) if layer not in idle]
        named["--moe-layer-freq"] = str(sparse)
    if idle:
        named["--num-layers"] = str(layers - len(idle))
        named |= _layout(named, layers, idle)
    if named.pop("--use-dualpipev", False):
        named.setdefault("--schedules-method", "dualpipev")
    if settings.get(_EXTENDS):
        # Tensor-parallel ranks hold different experts instead of shards of each.
        ranks = [_number(named.get(f"--{kind}-model-parallel-size")) or 1 for kind in ("tensor", "expert")]
        named |= {"--expert-model-parallel-size": str(math.prod(ranks)), "--expert-tensor-parallel-size": "1"}
    adapters = _adapters(named)
    return {**named, **adapters}


def _adapters(named: dict[str, Any]) -> Mapping[str, Any]:
    """The adapters as settings of Megatron-Bridge; removes the arguments that describe them."""
    rank = next((named[name] for name in _RANKS if _number(named.get(name))), None)
    if rank is None:
        return {}
    layers = next((named[name] for name in _ADAPTED if name in named), "all-linear")
    for name in (*_RANKS, *_ADAPTED, "--peft-type"):
        named.pop(name, None)
    return {"peft.dim": rank, **({} if layers == "all-linear" else {"peft.target_modules": layers})}


def _layout(named: dict[str, Any], layers: int, idle: set[int]) -> Mapping[str, Any]:
    """The layout of the stages without no-op layers; removes the arguments that it replaces."""
    pipeline = _number(named.get("--pipeline-model-parallel-size")) or 1
    per_stage, chunks = (_number(named.pop(name, None)) for name in _VIRTUAL)
    length = per_stage or layers // (pipeline * (chunks or 1))
    if pipeline == 1 or layers % length:
        return {}
    stages = ["t" * len({*range(start, start + length)} - idle) for start in range(0, layers, length)]
    further = "m" * _number(named.get("--mtp-num-layers"))
    return {"--pipeline-model-parallel-layout": f"E{'|'.join(stages)}{further}L"}


def _words(value: Any) -> list[str]:
    words = value if isinstance(value, list | tuple) else [value]
    return [word for item in words for word in str(item).replace(",", " ").split()]


def _number(value: Any) -> int:
    """The number in an argument; 0 if it is not a number."""
    return int(value) if str(value).isdecimal() else 0
