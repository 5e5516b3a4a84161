"""Builds one device's stages of a plan with their parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from debubble.ir import InputError, Kind, RunOptions
from debubble.models.architecture import Experts
from debubble.models.config import ModelConfig
from debubble.models.runtime_limits import beyond_runtime
from debubble.plans import Plan
from debubble.runtime.distributed.context_parallel import ContextGroup
from debubble.runtime.distributed.cuts import Division, Divisions
from debubble.runtime.distributed.data_parallel import Replicas
from debubble.runtime.distributed.expert_parallel import ExpertGroup
from debubble.runtime.distributed.tensor_parallel import TensorGroup
from debubble.runtime.memory.activations import Ledger
from debubble.runtime.models.build import add_adapters, build_stage
from debubble.runtime.models.compilation import Compiler
from debubble.runtime.models.float8 import Float8Products, multiply_in_float8
from debubble.runtime.models.hf.division import check_division
from debubble.runtime.models.hf.model import tied_names
from debubble.runtime.models.lora import Adapters, new_adapters, peft_adapters, plain_name
from debubble.runtime.models.loss import Loss
from debubble.runtime.models.modules import Modules
from debubble.runtime.models.moe_stage import MoeStage
from debubble.runtime.models.nf4 import quantize
from debubble.runtime.models.routing import Balance
from debubble.runtime.models.stage import Stage
from debubble.runtime.models.units import UnitModule, check_whole_recomputation
from debubble.runtime.parameters.device_part import DevicePart
from debubble.runtime.parameters.stage_parameters import ParameterPairs, StageWeights

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
"""torch's dtypes by their names in plans (see `runtime_limits`)."""


def loss_dtype(plan: Plan) -> torch.dtype:
    """The dtype of losses."""
    return torch.float64 if plan.options.dtype == "fp64" else torch.float32


class DeviceGroups(NamedTuple):
    """The groups of ranks that a device's stages use."""

    replicas: Replicas
    """Ranks that have the same stages."""
    tensor: TensorGroup
    context: ContextGroup
    experts: ExpertGroup
    same_experts: Replicas
    """Ranks of `replicas` that have the same experts."""


def _ungathered_reason(plan: Plan) -> str:
    """Why a plan's costs do not include gathering stages, and what to do about it."""
    if plan.target is not None:
        return (
            f"and the plan is for {plan.target}: give it to `debubble export --to {plan.target}`, or plan without --for"
        )
    if plan.options.framework:
        return f"and the plan is priced as {plan.options.framework}: plan again without --framework"
    return "and the plan's costs say nothing of that: plan again"


def check_runnable(plan: Plan, ranks: int) -> None:
    """Refuse a plan that these ranks cannot run, with one sentence."""
    options = plan.options
    refusal = beyond_runtime(options, plan.model)
    if refusal is not None:
        raise InputError(refusal)
    if ranks != plan.ranks:
        raise InputError(
            f"The plan needs {plan.ranks} ranks ({plan.devices} pipeline devices x {options.tensor} tensor x"
            f" {options.context} context x {options.data} data parallel), but {ranks} were started."
        )
    if options.zero > 2 and options.data * options.context > 1 and not plan.costs.gathers:
        raise InputError(f"debubble gathers the parameters of ZeRO-3 stage by stage, {_ungathered_reason(plan)}.")
    config = plan.model
    if config is None:
        return
    planned = [(unit.type, unit.layer) for stage in plan.partition for unit in stage]
    if planned != [(unit.type, unit.layer) for unit in config.units]:
        raise InputError("The plan's partition does not list the units of its model in order: make the plan again.")
    if not (plan.partition[0] and plan.partition[-1]):
        raise InputError("The plan's first stage must hold the embedding and its last the head; one of them is empty.")
    stepped = {op.stage for op in plan.schedule.operations if op.kind is Kind.S}
    if tied_tables(plan) is not None and stepped & {0, plan.schedule.stages - 1} and tied_devices(plan):
        raise InputError(
            "The plan steps a stage with a tied table inside the step, and two devices share that: make the plan again,"
            " or set tie_word_embeddings to false."
        )
    if options.expert > 1:
        _check_experts(config, options)
    if options.tensor > 1 and not config.whole_layers:
        _check_divisible(config, options)
    elif options.tensor > 1:
        check_division(config.config, options.tensor)


def _check_experts(config: ModelConfig, options: RunOptions) -> None:
    """Refuse expert parallelism if the experts cannot be divided equally."""
    ranks = options.data * options.context
    if ranks % options.expert:
        raise InputError(
            f"{options.expert} expert-parallel ranks are no part of the {options.data} x {options.context} data- and"
            " context-parallel ones: make the plan again."
        )
    for count in {layer.mlp.count for layer in config.per_layer if isinstance(layer.mlp, Experts)}:
        if count % options.expert:
            raise InputError(f"{count} experts cannot be divided among {options.expert} expert-parallel ranks.")


def _check_divisible(config: ModelConfig, options: RunOptions) -> None:
    """Refuse tensor parallelism if the units cannot be divided among the ranks."""
    inner = {layer.mlp.ffn if isinstance(layer.mlp, Experts) else config.ffn for layer in config.per_layer}
    for quantity, sizes in (
        ("attention heads", {config.heads}), ("key-value heads", {config.kv_heads}), ("columns of the MLP", inner),
    ):  # fmt: skip
        for size in sizes:
            if size % options.tensor:
                raise InputError(f"{size} {quantity} cannot be divided among {options.tensor} tensor-parallel ranks.")
    if -(-config.vocab // options.tensor) * (options.tensor - 1) >= config.vocab:
        raise InputError(f"A vocabulary of {config.vocab} leaves nothing to some of {options.tensor} ranks.")


def check_switch(plan: Plan, before: Plan, *, moves_units: bool) -> None:
    """Refuse a plan that a run of the plan `before` cannot switch to, with one sentence.

    `moves_units`: whether units can move between devices.
    """
    if not plan.reorders(before):
        raise InputError(
            "The plan has another model, other devices or other steps than the one that runs: only one that orders,"
            " recomputes, offloads or divides otherwise can follow."
        )
    if plan.lengths != before.lengths:
        if not moves_units:
            raise InputError(
                "The plan has other units in its stages than the one that runs, and units move between devices only"
                " where Pipeline builds them (no `model` is given) and makes their `optimizer`."
            )
        check_runnable(plan, plan.ranks)
    if plan.model is None or plan.model.whole_layers:
        check_whole_recomputation(sum(plan.partition, ()), "Modules that are called whole")


def build_device_part(
    plan: Plan,
    device: int,
    *,
    loss: Loss,
    seed: int,
    on: torch.device,
    ledger: Ledger,
    groups: DeviceGroups,
    compiler: Compiler | None,
    float8: Float8Products | None,
    source: ModelConfig | Modules,
    model: nn.Module | None = None,
) -> DevicePart:
    """Build this rank's shards of one device's stages, on the torch device `on`.

    They are built from the plan's model, with the parameters of `model` if it is given, or are the user's modules;
    `compiler` compiles them, and `float8` multiplies in 8 bits.
    """
    numbers, dtype = plan.schedule.placement.stages_of[device], DTYPES[plan.options.dtype]
    if isinstance(source, Modules):
        built, adapters = {stage: source.stage(stage) for stage in numbers}, None
    else:
        built, adapters = _hf_stages(plan, source, numbers, model, seed)
    last = plan.schedule.stages - 1
    if built.get(last):
        built[last][-1].loss = loss
    device_part = DevicePart(adapters=adapters, tied=tied_tables(plan))
    pairs = ParameterPairs(dtype, on, ledger, copies=plan.options.master_dtype == "fp32")
    shards: dict[nn.Parameter, nn.Parameter] = {}
    reduced_inside = {op.stage for op in plan.schedule.operations if op.kind is Kind.G}
    for stage, units in built.items():
        divisions, experts = _divide(units, groups, shards)
        if plan.options.quantize:
            quantize(units, plan.options.quantize)
        device_part.weights[stage] = StageWeights(
            units, pairs, groups.replicas, on_host=stage in plan.schedule.host_steps,
            reduced_inside=stage in reduced_inside, group=groups.tensor, divisions=divisions, experts=experts,
        )  # fmt: skip
        if float8 is not None:
            multiply_in_float8(units, float8)
        device_part.stages[stage] = _stage(units, plan, stage, ledger, compiler)
        for unit in units:
            for module in unit.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.to(on))
            unit.context = groups.context
            unit.attach_ledger(ledger)
    return device_part


def _divide(
    units: Sequence[UnitModule], groups: DeviceGroups, shards: dict[nn.Parameter, nn.Parameter]
) -> tuple[Mapping[str, Divisions], Mapping[str, Replicas]]:
    """Shard the units; return the divisions of parameters, and the ranks with the same experts, by parameter name."""
    divisions: defaultdict[str, list[Division]] = defaultdict(list)
    experts: dict[str, Replicas] = {}
    for unit in units:
        if groups.experts.size > 1:
            for name, cut in unit.divide_experts(groups.experts).items():
                divisions[name].append(Division(groups.experts, cut))
                experts[name] = groups.same_experts
        if groups.tensor.size > 1:
            for name, cut in unit.divide(groups.tensor, shards).items():
                divisions[name].append(Division(groups.tensor, cut))
    return divisions, experts


def _stage(units: Sequence[UnitModule], plan: Plan, number: int, ledger: Ledger, compiler: Compiler | None) -> Stage:
    planned, balance = plan.partition[number], balance_of(plan)
    if balance is None:
        return Stage(units, planned, ledger, compiler=compiler)
    last = number + 1 == plan.schedule.stages
    return MoeStage(units, planned, ledger, balance=balance, first=number == 0, last=last, compiler=compiler)


def balance_of(plan: Plan) -> Balance | None:
    """The load-balancing loss of the model's routers; None if it has none."""
    config = plan.model
    if config is None or config.whole_layers:
        return None
    micro_batches = plan.micro_batches * plan.options.data
    return Balance.from_config(config, micro_batches=micro_batches, dtype=DTYPES[plan.options.dtype])


def _hf_stages(
    plan: Plan, config: ModelConfig, numbers: Sequence[int], model: nn.Module | None, seed: int
) -> tuple[dict[int, list[UnitModule]], Adapters | None]:
    """The stages of a plan's Hugging Face model, with the parameters of `model` if it is given."""
    master_dtype = torch.float64 if plan.options.dtype == "fp64" else torch.float32
    built = {s: build_stage(config.config, plan.partition[s], seed=seed, dtype=master_dtype) for s in numbers}
    all_units = [unit for units in built.values() for unit in units]
    adapters = _adapters(plan, config, all_units, model)
    if adapters is not None:
        add_adapters(all_units, adapters, config, seed=seed, dtype=master_dtype)
    if model is not None:
        adopt_parameters(all_units, model)
    named = {name: p for unit in all_units for name, p in unit.hf_parameters().items()}
    tables = tied_tables(plan)
    if tables is not None and {*tables} <= named.keys():
        replace_parameter(all_units, named[tables[1]], named[tables[0]])
    return built, adapters


def _adapters(plan: Plan, config: ModelConfig, units: Sequence[UnitModule], model: nn.Module | None) -> Adapters | None:
    """The plan's LoRA adapters; None if it has none.  Raises InputError if the model has adapters of another rank."""
    rank = plan.options.lora
    if model is None:
        return new_adapters(units, config.family, rank=rank) if rank else None
    adapters = peft_adapters(model)
    lora_rank = 0 if adapters is None else max((adapter.rank for adapter in adapters.by_layer.values()), default=0)
    if rank != lora_rank:
        raise InputError(
            f"The plan is made for LoRA adapters of rank {rank} (0: none), but the model has rank {lora_rank}: make the"
            f" plan with `--lora {lora_rank}`, or give the model other adapters."
        )
    return adapters


def adopt_parameters(units: Iterable[UnitModule], model: nn.Module) -> None:
    """Make the units use a Hugging Face model's parameters, or copies of their values if the dtypes differ."""
    source = {plain_name(name): parameter for name, parameter in model.state_dict(keep_vars=True).items()}
    for unit in units:
        for name, parameter in unit.hf_parameters().items():
            if name not in source:
                raise InputError(f"The model has no parameter '{name}', which the plan's model has.")
            if parameter.is_floating_point() and not source[name].is_floating_point():
                raise InputError(
                    f"The model's '{name}' is quantised: give floats, which a plan made with `--quantize` quantises."
                )
            if source[name].shape != parameter.shape:
                raise InputError(
                    f"The model's '{name}' has shape {list(source[name].shape)}, the plan's {list(parameter.shape)}."
                )
            if source[name].dtype == parameter.dtype and isinstance(source[name], nn.Parameter):
                replace_parameter([unit], parameter, source[name])
            else:
                parameter.data.copy_(source[name])
                parameter.requires_grad_(source[name].requires_grad)


def replace_parameter(units: Iterable[UnitModule], parameter: nn.Parameter, replacement: nn.Parameter) -> None:
    """Replace a parameter wherever the units use it."""
    for module in (module for unit in units for module in unit.modules()):
        for name, p in module.named_parameters(recurse=False):
            if p is parameter:
                setattr(module, name, replacement)


def tied_tables(plan: Plan) -> tuple[str, str] | None:
    """The names of the embedding's and the head's table, if they are tied."""
    return None if plan.model is None else tied_names(plan.model.config)


def tied_devices(plan: Plan) -> tuple[int, ...]:
    """The two devices with a copy of the tied table; empty if there is one copy or none."""
    if tied_tables(plan) is None:
        return ()
    placement = plan.schedule.placement.device_of
    return () if placement[0] == placement[-1] else (placement[0], placement[-1])
