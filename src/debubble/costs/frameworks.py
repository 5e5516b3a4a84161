"""Training frameworks, described by traits: what their kernels fuse, overlap, keep and capture in CUDA graphs.

`NAME@VERSION` is the newest known version up to VERSION; without a version, the newest of all.  Single traits follow
after commas: `megatron-bridge@26.02,graphs=layers`.  The name `target` is the default framework of a plan's target:
`target,tensor_overlap=true`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from debubble.ir import InputError
from debubble.ir.stage_costs import LARGEST

Graphs = Literal["none", "layers", "step"]
Attention = Literal["fused", "flash-2", "flash-1"]
Adapted = Literal["all", "qkv"]


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The traits of a training framework that a model's costs depend on."""

    flash: bool = True
    """The attention core is fused and keeps no attention scores."""
    attention: Attention = "fused"
    """The generation of the fused attention core: FlashAttention-1 or -2, or the hardware's newest (cuDNN 9, FA 3)."""
    fused_activation: bool = True
    """Activation function and multiply are one kernel, which keeps only its input."""
    compiled: bool = True
    """Chains of elementwise operators are one kernel, written by hand or by a compiler."""
    fused_loss: bool = True
    """Softmax and loss are computed in place, in the memory of the logits."""
    narrow_loss: bool = False
    """A loss that is not fused reads the logits in 16 bits, and does not widen them to fp32."""
    loss_parallel: bool = True
    """The loss reads logits that stay sharded over tensor-parallel ranks, not gathered ones."""
    sequence_parallel: bool = True
    """Norms and residual stream are sharded over the tensor-parallel ranks."""
    whole_layers: bool = True
    """Full recomputation of both halves of a layer keeps one input, not two."""
    stops_recomputing: bool = False
    """Full recomputation of a layer stops before its last product, whose result no backward reads (torch's checkpoint
    since 2.1, and its compiler)."""
    gradient_bytes: int = 4
    """Bytes of a parameter's gradient in mixed precision."""
    bucket_bytes: int = 0
    """Bytes, on every device, of the buckets in which gradients are reduced and parameters gathered."""
    keeps_8_bits: bool = False
    """The inputs of fp8 products are kept in 8 bits for the weight gradients (Transformer Engine)."""
    tensor_overlap: bool = False
    """Tensor-parallel collectives overlap with the products before or after them (Megatron's --tp-comm-overlap)."""
    gradient_overlap: bool = False
    """Gradient reduction overlaps with the last backward, and parameter gathering with the first forward."""
    gather_overlap: bool = True
    """With `gradient_overlap`, parameter gathering overlaps, too (Megatron's --overlap-param-gather)."""
    keeps_gathered: bool = False
    """Inputs of tensor-parallel products are kept gathered, and not gathered again backward (torch's DTensor)."""
    adapted: Adapted = "all"
    """The linear layers that LoRA gives adapters; the inputs of others are not kept, as their weights are frozen."""
    keeps_copies: bool = True
    """The copies of tokens sent to experts are kept for the backward, in addition to the received ones."""
    grouped_experts: bool = True
    """The products of a device's experts, and their casts, are one kernel each; otherwise one kernel per expert."""
    dispatches_once: bool = False
    """A token is sent once to a device and to a node, however many of its experts are there (DeepEP, HybridEP)."""
    dispatch_overlap: bool = False
    """Dispatch and combine overlap with the experts' computing of another micro-batch (DualPipe)."""
    gathers_units: bool = False
    """ZeRO-3 gathers the parameters of a unit at a time, for every micro-batch (FSDP), not those of a stage."""
    copies_gathered: bool = False
    """Parameters are copied out of the all-gather buffer, and gradients into the reduce-scatter buffer (FSDP2, whose
    parameters are separate tensors)."""
    merges_rings: bool = False
    """Context-parallel attention merges results and gradients of every hop in fp32 by separate operators (torch)."""
    defers_gradients: bool = False
    """With ZeRO-2 and 3 gradients stay unsharded on every rank until the last micro-batch (FSDP's `no_sync`)."""
    frees_gradients: bool = False
    """Gradients exist only from their backward to the optimizer step (torch's `set_to_none`)."""
    gathers_masters: bool = False
    """ZeRO-3 shards the weights that the optimizer steps, which are cast as they are gathered (torch's FSDP)."""
    copies_masters: bool = False
    """The optimizer steps copies of the weights even if these have its dtype (DeepSpeed)."""
    keeps_remainders: bool = False
    """The optimizer keeps only the 16 bits of a master weight that its bf16 weight lacks (Transformer Engine)."""
    blocking_messages: bool = False
    """A stage computes nothing while it sends or receives (DeepSpeed's pipeline engine)."""
    receives_ahead: bool = False
    """A stage has a receive buffer per neighbor and micro-batch of a step (torch's PipelineStage)."""
    keeps_outputs: bool = False
    """The last stage keeps the logits of all micro-batches to the end of a step (torch's `return_outputs`)."""
    graphs: Graphs | None = None
    """Kernels that CUDA graphs launch: none, those of dense layers and routers, or all of a step.  None: kernel
    launches of the host are not priced, as if it always ran ahead of the device."""


MEGATRON = Framework()
DEBUBBLE = replace(MEGATRON, gathers_masters=True)
DEEPSPEED = Framework(fused_activation=False, gradient_bytes=2, gathers_units=True, copies_masters=True)
EAGER = Framework(fused_activation=False, whole_layers=False)
FSDP = Framework(gathers_units=True, gathers_masters=True)
TORCH = replace(FSDP, receives_ahead=True)

TARGET = "target"
"""The name of the default framework of a plan's target."""

_NVIDIA = Framework(
    gradient_bytes=2, keeps_8_bits=True, tensor_overlap=True, gradient_overlap=True, gathers_units=True,
    grouped_experts=False, adapted="qkv", graphs="none",
)  # fmt: skip
_ZERO_BUCKETS = 2 * 500_000_000 * 2
"""DeepSpeed's reduce_bucket_size and allgather_bucket_size by default, in 16 bits."""
_OF_2021 = Framework(flash=False, sequence_parallel=False, fused_loss=False, graphs="none")

_UNCOMPILED: Mapping[str, Any] = {"compiled": False, "fused_activation": False, "fused_loss": False}
_TITAN = replace(
    FSDP, keeps_gathered=True, attention="flash-2", receives_ahead=True, keeps_outputs=True, stops_recomputing=True,
    copies_gathered=True, merges_rings=True, frees_gradients=True, graphs="none",
)  # fmt: skip

_VERSIONS: Mapping[str, Mapping[str, Framework]] = {
    # Narayanan et al. 2021; Korthikanti et al. 2022 (sequence parallelism); Megatron-LM's defaults with Transformer
    # Engine: flash attention, fused activation and loss, gradients in fp32, nothing overlapped.
    "megatron-lm": {
        "2021": replace(_OF_2021, gathers_units=True),
        "2022": replace(_OF_2021, sequence_parallel=True, gathers_units=True),
        "2024": Framework(keeps_8_bits=True, gathers_units=True, grouped_experts=False, graphs="none"),
    },
    # The performance recipes: gradients in bf16, overlapped collectives, LoRA on queries, keys and values.
    "megatron-bridge": {"25.09": _NVIDIA},
    "nemo": {"24.05": _NVIDIA},
    # BigScience's fork: fused softmax of scores, 16-bit gradients, no sequence parallelism.
    "megatron-deepspeed": {
        "2021": replace(_OF_2021, gradient_bytes=2, bucket_bytes=_ZERO_BUCKETS, blocking_messages=True),
    },
    # The artifact of Yuan et al., ATC'24.
    "megatron-kwai": {"2023": Framework(attention="flash-2", fused_activation=False, graphs="none")},
    # DeepSeek-V3's report: DeepEP and DualPipe.
    "hai-llm": {
        "2024": Framework(
            keeps_8_bits=True, gradient_overlap=True, dispatches_once=True, dispatch_overlap=True, graphs="none"
        ),
    },
    # FSDP2 and DTensor; benchmarks are compiled from the end of 2024 on, the loss from 2025 on; a step returns no
    # outputs from October 2025 on.
    "torchtitan": {
        "2024.06": replace(_TITAN, **_UNCOMPILED),
        "2024.12": replace(_TITAN, fused_loss=False),
        "2025.06": _TITAN,
        "2025.10": replace(_TITAN, keeps_outputs=False),
    },
    # Transformer Engine's layers and DeepEP on FSDP2.
    "automodel": {
        "25.10": replace(
            FSDP, keeps_gathered=True, dispatches_once=True, receives_ahead=True, keeps_outputs=True, graphs="none"
        ),
    },
    # FSDP1 with Triton's flash attention.
    "llm-foundry": {"2023": replace(FSDP, attention="flash-1", graphs="none", **_UNCOMPILED)},
    "maxtext": {"2024": replace(FSDP, gradient_bytes=2, graphs="step")},
    # It runs the eager kernels of transformers.
    "deepspeed": {
        "2023": replace(
            DEEPSPEED, attention="flash-2", bucket_bytes=_ZERO_BUCKETS, graphs="none", **_UNCOMPILED
        ),
    },
    "qlora-pipe": {"2024": replace(DEEPSPEED, attention="flash-2", compiled=False, graphs="none")},
    "torch": {"2.0": replace(EAGER, attention="flash-2", graphs="none", **_UNCOMPILED)},
}  # fmt: skip
FRAMEWORKS: Mapping[str, Mapping[str, Framework]] = {
    name: {version: replace(traits, keeps_copies=False) for version, traits in versions.items()}
    for name, versions in _VERSIONS.items()
}
"""Framework -> version -> its traits from that version on.  Measured memory of mixtures has no `keeps_copies`."""
FRAMEWORK_NAMES = tuple(f"{name}@{version}" for name, versions in FRAMEWORKS.items() for version in versions)
"""Every known `NAME@VERSION`."""


def framework_with(name: str, **traits: bool | int | str | None) -> str:
    """The value of `--framework` for a framework with these traits; None leaves a trait as it is."""
    changes = [f"{trait}={str(value).lower()}" for trait, value in traits.items() if value is not None]
    return ",".join([name, *changes])


def framework_of_options(text: str, default: Framework = DEBUBBLE) -> Framework:
    """The framework that a run's options name, or `default` if they name none."""
    return named_framework(text, default) if text else default


def framework_name(text: str) -> str:
    """The name in `NAME[@VERSION][,TRAIT=VALUE ...]`; empty for the default framework."""
    name = text.partition(",")[0].partition("@")[0].strip()
    return "" if name == TARGET else name


@lru_cache
def named_framework(text: str, default: Framework = DEBUBBLE) -> Framework:
    """Parse `NAME[@VERSION][,TRAIT=VALUE ...]` to a framework; the name `target` means `default`.

    Raises:
        InputError: If there is no such framework, version or trait.
    """
    name, *traits = [field.strip() for field in text.split(",")]
    name, _, version = name.partition("@")
    versions = {"": default} if name == TARGET else FRAMEWORKS.get(name)
    if versions is None:
        near = get_close_matches(name, FRAMEWORKS, 1)
        known = f"did you mean {near[0]}?" if near else f"there are: {', '.join(FRAMEWORKS)}."
        raise InputError(f"There is no framework '{name}'; {known}")
    changes = {key.strip(): value.strip() for key, _, value in (trait.partition("=") for trait in traits)}
    return replace(_version_of(name, versions, version), **{key: _trait(key, value) for key, value in changes.items()})


def _version_of(name: str, versions: Mapping[str, Framework], version: str) -> Framework:
    if not version:
        return versions[max(versions, key=_numbers)]
    try:
        not_newer = [known for known in versions if _numbers(known) <= _numbers(version)]
    except ValueError:
        raise InputError(f"'{version}' is no version of {name}; write it as numbers, such as {name}@2026.1.") from None
    return versions[max(not_newer, key=_numbers) if not_newer else min(versions, key=_numbers)]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if version else ()


def _trait(name: str, value: str) -> Any:
    """Parse the value of a trait to the trait's type; raises InputError if it does not fit."""
    hints = get_type_hints(Framework)
    if name not in {f.name for f in fields(Framework)}:
        near = get_close_matches(name, hints, 1)
        known = f"did you mean {near[0]}?" if near else f"there are: {', '.join(hints)}."
        raise InputError(f"A framework has no trait '{name}'; {known}")
    if hints[name] is int:
        if not value.isdecimal() or int(value) > LARGEST:
            raise InputError(f"{name} is '{value}'; it must be a number of bytes.")
        return int(value)
    allowed = ("true", "false") if hints[name] is bool else tuple(_words_of(hints[name]))
    if value not in allowed:
        raise InputError(f"{name} is '{value}'; it must be one of: {', '.join(allowed)}.")
    return value == "true" if hints[name] is bool else value


def _words_of(hint: Any) -> Iterator[str]:
    """The values of a Literal, or of the Literals of a union."""
    if get_origin(hint) in (Union, types.UnionType):
        for member in get_args(hint):
            yield from _words_of(member)
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
