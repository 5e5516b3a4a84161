"""Exports plans to Megatron-LM (arguments with the partition as a layout string) and Megatron-Bridge (settings).

In the layout, `E` is the embedding, `t` a decoder layer, `m` a multi-token-prediction layer, `L` the loss, `|` the
end of a stage; stages come in model order, and stage s runs on device s mod p.  The order is Megatron's 1F1B or
interleaved 1F1B.  Recomputation is the same for all stages: `block` recomputes the first N layers of each, `selective`
the same modules of every layer.  The arguments are for Transformer Engine's layers, which are Megatron's default.

Megatron-Bridge has the same names without dashes in the sections of its configuration: a Python function changes a
recipe's ConfigContainer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from debubble.costs.accuracy import group_of
from debubble.costs.frameworks import framework_name, framework_of_options
from debubble.exports.layers import PlannedLayer, StageLayers, stage_layers
from debubble.exports.options import (
    UNSETTABLE,
    Decision,
    OptionTable,
    by_value,
    global_batch,
    of_frameworks,
    one_setting,
)
from debubble.exports.prices import module_offload
from debubble.exports.reduction import Alternative, LayerStrategies, fastest, require_order
from debubble.exports.registry import ExportDraft, exporter
from debubble.frameworks.megatron.bridge_recipe import bridge_recipe
from debubble.frameworks.megatron.launch import ARGUMENTS_FILE, LAUNCH_FILE, arguments_script, launch_script
from debubble.frameworks.megatron.model_arguments import model_arguments
from debubble.frameworks.megatron.stages import SPLITS
from debubble.frameworks.megatron.target import MEGATRON_MODULES, OFFLOAD_RELEASE, OVERLAPPED_MODULES
from debubble.plans import Plan
from debubble.targets import Target, targets
from debubble.targets.target import sparse_layers

_TARGET = "Megatron-LM"
_ON = True
"""The value of an argument without a value."""


def _tensor(plan: Plan) -> Decision:
    """Set sequence parallelism as the costs assume; it is off in Megatron by default."""
    parallel = {"--sequence-parallel": _ON} if plan.options.tensor > 1 and plan.options.sequence_parallel else {}
    return {"--tensor-model-parallel-size": plan.options.tensor, **parallel}


def _optimizer(plan: Plan) -> Decision:
    """Megatron's SGD has momentum by default; 8-bit Adam requires the distributed optimizer."""
    moments = {"--use-precision-aware-optimizer": _ON, "--exp-avg-dtype": "fp8", "--exp-avg-sq-dtype": "fp8"}
    settings: dict[str, Mapping[str, Any]] = {
        "adamw": {"--optimizer": "adam"},
        "adam": {"--optimizer": "adam"},
        "lion": {"--optimizer": "lion"},
        "muon": {"--optimizer": "muon"},
        "momentum": {"--optimizer": "sgd", "--sgd-momentum": 0.9},
        "sgd": {"--optimizer": "sgd", "--sgd-momentum": 0},
        "adamw-8bit": {"--optimizer": "adam", **moments},
    }
    return by_value("optimizer", settings)(plan)


def _zero(plan: Plan) -> Decision:
    """The distributed optimizer shards states; Megatron-FSDP also shards gradients and parameters."""
    if plan.options.zero < 2:
        return {"--use-distributed-optimizer": _ON} if plan.options.zero else {}
    return {
        "--use-distributed-optimizer": _ON,
        "--use-megatron-fsdp": _ON,
        "--data-parallel-sharding-strategy": FSDP[plan.options.zero],
        "--ckpt-format": FSDP_FORMAT,
        # Required by the guide to Megatron-FSDP; newer versions of Transformer Engine do without.
        "--no-gradient-accumulation-fusion": _ON,
    }


FSDP = {0: "no_shard", 1: "optim", 2: "optim_grads", 3: "optim_grads_params"}
"""ZeRO level -> Megatron-FSDP's name for it."""
FSDP_FORMAT = "fsdp_dtensor"
"""The checkpoint format of Megatron-FSDP, which it requires and nothing else supports."""


def _host_optimizer(plan: Plan) -> Decision:
    """Offload optimizer states, with the CPU optimizer step overlapping transfers and the GPU's step."""
    if not plan.options.host_optimizer:
        return {}
    return {
        "--optimizer-cpu-offload": _ON,
        "--optimizer-offload-fraction": plan.options.host_optimizer,
        "--use-precision-aware-optimizer": _ON,
        "--overlap-cpu-optimizer-d2h-h2d": _ON,
    }


def _expert_overlap(plan: Plan) -> Decision:
    """Combined 1F1B, which delays weight gradients to overlap the exchange of tokens."""
    if not plan.options.expert_overlap:
        return {}
    return {"--overlap-moe-expert-parallel-comm": _ON, "--delay-wgrad-compute": _ON}


def _dtype(plan: Plan) -> Decision:
    """Set the dtype, and an attention backend that stores scores or not, as the costs assume."""
    attention = {"--attention-backend": "auto" if plan.options.flash_attention else "unfused"}
    match plan.options.dtype:
        case "fp8":
            return {"--bf16": _ON, "--fp8-format": "hybrid", **attention}
        case "mxfp8":
            return {"--bf16": _ON, "--fp8-format": "e4m3", "--fp8-recipe": "mxfp8", **attention}
    return {f"--{plan.options.dtype}": _ON, **attention}


def _gradient_dtype(plan: Plan) -> Decision:
    """Gradients are in fp32 by default with bf16, and in fp16 with fp16."""
    if plan.options.dtype == "fp16" and plan.options.gradient_dtype == "fp32":
        return {"--accumulate-allreduce-grads-in-fp32": _ON}
    return {"--grad-reduce-in-bf16": _ON} if plan.options.gradient_dtype == "bf16" else {}


def _moment_dtype(plan: Plan) -> Decision:
    """Moments below fp32 require Megatron's precision-aware optimizer."""
    dtype = plan.options.moment_dtype
    if dtype == "fp32":
        return {}
    return {"--use-precision-aware-optimizer": _ON, "--exp-avg-dtype": dtype, "--exp-avg-sq-dtype": dtype}


def _expert(plan: Plan) -> Decision:
    """Set the all-to-all dispatcher, which the costs assume; Megatron's default gathers all tokens."""
    if plan.options.expert == 1:
        return {}
    return {"--expert-model-parallel-size": plan.options.expert, "--moe-token-dispatcher-type": "alltoall"}


def _expert_tensor(plan: Plan) -> Decision:
    """The tensor-parallel degree of experts, if it differs from the model's."""
    shards = plan.options.expert_tensor
    return {} if shards is None else {"--expert-tensor-parallel-size": shards}


def _framework(plan: Plan) -> Decision:
    """Set the arguments for the framework's overlaps and dispatcher."""
    o = plan.options
    traits, settings = framework_of_options(o.framework), dict[str, Any]()
    if traits.gradient_overlap:
        settings["--overlap-grad-reduce"] = _ON
        if o.zero and traits.gather_overlap:
            settings["--overlap-param-gather"] = _ON
    if traits.gradient_bytes == 2 and o.dtype != "fp32":
        settings["--grad-reduce-in-bf16"] = _ON
    if traits.tensor_overlap and o.tensor > 1 and o.sequence_parallel:
        settings["--tp-comm-overlap"] = _ON
    if traits.dispatches_once and o.expert > 1:
        settings |= {"--moe-token-dispatcher-type": "flex", "--moe-enable-deepep": _ON}
    return settings


def _is_megatron(plan: Plan) -> bool:
    """Tell whether the plan has a Megatron's costs, or names no framework."""
    return framework_name(plan.options.framework) in ("", *_MEGATRONS)


_MEGATRONS = ("megatron-lm", "megatron-bridge", "nemo")

OPTIONS: OptionTable = {
    **UNSETTABLE,
    "framework": of_frameworks(*_MEGATRONS, settings=_framework),
    "micro_batch_size": one_setting("--micro-batch-size", "micro_batch_size"),
    "sequence_length": one_setting("--seq-length", "sequence_length"),
    "tensor": _tensor,
    "data": global_batch("--global-batch-size"),
    "context": one_setting("--context-parallel-size", "context"),
    "expert": _expert,
    "expert_tensor": _expert_tensor,
    "zero": _zero,
    "optimizer": _optimizer,
    "dtype": _dtype,
    "host_optimizer": _host_optimizer,
    "expert_overlap": _expert_overlap,
    "gradient_dtype": _gradient_dtype,
    "moment_dtype": _moment_dtype,
}


@exporter("megatron", options=OPTIONS)
def megatron(plan: Plan, settings: Mapping[str, Any]) -> ExportDraft:
    """`megatron-arguments.sh` with bash arrays, `launch.sh`, and `megatron_bridge.py` for a Megatron-Bridge recipe."""
    stages = stage_layers(plan, target=_TARGET)
    require_order(plan, targets["megatron"])
    mtp = sum(stage.mtp for stage in stages)
    plan, recompute, losses = fastest(plan, recompute_choices(plan, stages), target=_TARGET)
    if mtp and recompute:
        losses = (*losses, "Megatron-LM recomputes no multi-token-prediction layer.")
    if plan.model is None:
        losses = (f"A step has {plan.micro_batches} micro-batches, of which --global-batch-size decides.", *losses)
    offload = offload_arguments(plan, targets["megatron"])
    arguments = {**arguments_of(plan, stages, settings), **recompute, **offload}
    if offload:
        losses = (*losses, OFFLOAD_REMARK)
    variables = environment(arguments)
    model_args, model_losses = model_arguments(plan)
    left_out = [name for name in (*SPLITS, *_REPLACED_OPTIONS) if name not in arguments] + _formats(arguments)
    files = {
        ARGUMENTS_FILE: arguments_script(model_args, arguments, _connections(plan) | variables, left_out=left_out),
        **({} if plan.cluster is None else {LAUNCH_FILE: launch_script(plan.cluster, plan.degrees.devices)}),
        "megatron_bridge.py": bridge_recipe(arguments, variables, chunks=plan.schedule.placement.chunks),
    }
    return ExportDraft(files, plan, (*losses, *model_losses, *untested_settings(plan)))


def untested_settings(plan: Plan) -> tuple[str, ...]:
    """Sentences on settings that Megatron-LM accepts but does not test, or that the user must set."""
    graphs = framework_of_options(plan.options.framework).graphs if _is_megatron(plan) else None
    sentence = f"The plan counts on CUDA graphs ({graphs}): set --cuda-graph-impl."
    remarks = () if graphs in (None, "none") else (sentence,)
    if plan.options.zero == 1 and plan.options.optimizer == "muon":
        return (*remarks, MUON_DIVIDED)
    if plan.options.zero < 2:
        return remarks
    model = plan.model
    assert model is not None
    return (*remarks, FSDP_REMARK, *targets["megatron"].untested_parts(plan.options, model, pipeline=plan.devices))


MUON_DIVIDED = (
    "Megatron-LM divides Muon's states from megatron-core 0.18 on, matrix by matrix; an older one refuses"
    " --use-distributed-optimizer next to it: leave that out there and give --optimizer dist_muon."
)
"""Source: validate_args of core_v0.16.1, core_v0.17.1 and core_v0.18.0."""

OFFLOAD_REMARK = f"Activation offload (--fine-grained-activation-offloading) needs {OFFLOAD_RELEASE}."

FSDP_REMARK = f"Checkpoints of Megatron-FSDP are {FSDP_FORMAT}: --load does not read those of a run without it."


def arguments_of(plan: Plan, stages: Sequence[StageLayers], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments for a plan's stages and settings, without recomputation.

    The costs assume grouped GEMM for a device's experts.  Without it Megatron-LM refuses to recompute `moe_act`, and
    ignores the experts' modules among those to offload (TEGroupedMLP).
    """
    mtp = sum(stage.mtp for stage in stages)
    grouped = plan.model is not None and bool(sparse_layers(plan.model))
    return {
        "--num-layers": sum(len(stage.layers) for stage in stages),
        **({"--mtp-num-layers": mtp} if mtp else {}),
        "--pipeline-model-parallel-size": plan.devices,
        "--pipeline-model-parallel-layout": layout(stages),
        **({"--moe-grouped-gemm": _ON} if grouped else {}),
        **settings,
    }


def offload_arguments(plan: Plan, target: Target) -> dict[str, Any]:
    """The arguments for the plan's activation offload, without a minimum tensor size."""
    setting = module_offload(plan, target)
    if setting is None:
        return {}
    return {
        "--fine-grained-activation-offloading": _ON,
        "--offload-modules": setting.modules,
        **({"--activation-offload-fraction": setting.share} if setting.share < 1 else {}),
        "--min-offloaded-tensor-size": 0,
    }


def environment(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables that Megatron-LM requires with these arguments."""
    variables = {}
    if "--fine-grained-activation-offloading" in arguments:
        variables["NVTE_CPU_OFFLOAD_V1"] = "1"
    if "--use-megatron-fsdp" in arguments or "--overlap-moe-expert-parallel-comm" in arguments:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    return variables


def _connections(plan: Plan) -> dict[str, str]:
    """The variable that Megatron-LM requires for tensor and context parallelism on GPUs before Blackwell.

    With one queue, collectives start in the order of the GEMMs that they overlap.
    """
    divided = plan.options.tensor > 1 or plan.options.context > 1
    described = plan.model_on_cluster
    if not divided or described is None:
        return {}
    _, generation, _ = group_of(described.model, described.cluster.slowest.name, plan.options.dtype)
    return {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if generation in ("Volta", "Ampere", "Hopper", "Ada") else {}


_REPLACED_OPTIONS = (
    "--recompute-activations", "--recompute-granularity", "--recompute-method", "--recompute-num-layers",
    "--recompute-modules", "--fine-grained-activation-offloading", "--optimizer-cpu-offload", "--use-megatron-fsdp",
    "--use-torch-fsdp2", "--overlap-moe-expert-parallel-comm", "--sequence-parallel", "--swap-optimizer",
)  # fmt: skip
"""Arguments that the user must not add if the plan does not have them."""


def _formats(arguments: Mapping[str, Any]) -> list[str]:
    """Checkpoint formats that the user must not set: FSDP's, if the arguments have no FSDP."""
    return [] if "--use-megatron-fsdp" in arguments else [f"--ckpt-format {FSDP_FORMAT}"]


def layout(stages: Sequence[StageLayers]) -> str:
    """The layout string, such as `Et*3|(tt|)*29,m|L`, with consecutive equal stages abbreviated."""
    parts = [_stage(stage) for stage in stages]
    words: list[str] = []
    for word, run in itertools.groupby(parts[:-1]):
        count = len(list(run))
        words.append(f"{word}|" if count == 1 else f"({word}|)*{count}")
    return "".join(words) + parts[-1]


def _stage(stage: StageLayers) -> str:
    layers = len(stage.layers)
    decoders = "t" if layers == 1 else f"t*{layers}" if layers else ""
    return f"{'E' * stage.embedding}{decoders}{'m' * stage.mtp}{'L' * stage.head}"


_Choice = Alternative[Mapping[str, Any]]


def recompute_choices(plan: Plan, stages: Sequence[StageLayers]) -> Iterator[Sequence[_Choice]]:
    """Megatron's recomputation choices: none, modules of every layer, or the first layers of every stage in full."""
    layers = [layer for stage in stages for layer in stage.layers]
    yield [Alternative({}, {layer.index: ("none",) * len(layer.strategies) for layer in layers}, "")]
    if any(len(layer.strategies) == 2 for layer in layers):
        yield from ([choice] for choice in _selective(plan, layers))
    if not plan.options.expert_overlap:
        yield [_block(stages, count) for count in range(1, max(len(stage.layers) for stage in stages) + 1)]


def _block(stages: Sequence[StageLayers], count: int) -> _Choice:
    return Alternative(
        {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": count},
        {
            layer.index: ("full" if place < count else "none",) * len(layer.strategies)
            for stage in stages
            for place, layer in enumerate(stage.layers)
        },
        f"{_TARGET} recomputes equally many whole layers in every stage: here the first {count}",
    )


def _selective(plan: Plan, layers: Sequence[PlannedLayer]) -> Iterator[_Choice]:
    """Choices that recompute the same modules in every layer."""
    sparse = frozenset() if plan.model is None else sparse_layers(plan.model)
    known: list[LayerStrategies] = []
    for name, setting in (OVERLAPPED_MODULES if plan.options.expert_overlap else MEGATRON_MODULES).items():
        choices = {layer.index: setting.sparse if layer.index in sparse else setting.dense for layer in layers}
        strategies = {index: (choice.attention, choice.mlp) for index, choice in choices.items()}
        if name == "none" or strategies in known:
            continue
        known.append(strategies)
        names = tuple(name.split("+"))
        yield Alternative(
            {"--recompute-granularity": "selective", "--recompute-modules": names},
            strategies,
            f"{_TARGET} recomputes the same modules in every layer: here {' and '.join(names)}",
        )
