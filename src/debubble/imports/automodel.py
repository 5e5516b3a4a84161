"""NeMo Automodel: its YAML recipe, or the part of one that debubble writes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from debubble.imports.job import ImportedJob, batches_in
from debubble.imports.model import hub_model
from debubble.imports.registry import UserFacts, importer
from debubble.imports.settings import SettingsReader, read_settings, unread
from debubble.imports.torch_hosts import balanced_layers, chunks_of, expert_ranks, layer_strategies, layers_of, order_of
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model

_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "FusedAdam": "adamw"}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16"}
_LENGTHS = ("sequence_length", "dataset.seq_length", "dataset.seq_len", "packed_sequence.packed_sequence_size")
_MAY_COST = re.compile(
    r"fp8|te_|compile|offload|packed|shard|fsdp|parallel|pipeline|moe|distributed|backend|model\.(?!pretrained)|quantiz"
)
"""Words in the names of settings that change time or memory of a step."""


@importer("automodel", settings=read_settings, file="plan.yaml")
def automodel(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """Degrees, stages, order and recomputation of an Automodel recipe."""
    model = given.model or _model(read)
    pipeline = read.size("distributed.pp_size", 1, instead=given.pipeline)
    tensor, context = read.size("distributed.tp_size", 1), read.size("distributed.cp_size", 1)
    data = read.size("distributed.dp_size", max(1, given.cluster.count // (pipeline * tensor * context)))
    size, number = _batch(read, data=data, pipeline=pipeline)
    order = "1f1b" if pipeline == 1 else _order(read)
    parts = read.get("distributed.pipeline.module_fqns_per_model_part")
    stages = pipeline * chunks_of(order)
    layers = layers_of(parts) if parts else balanced_layers(model.layers, stages, first_less=0, last_less=0)
    said = [name for name in _LENGTHS if read.get(name) is not None]
    length = given.sequence_length or next(map(read.size, said), None)
    if length is None:
        raise InputError(f"{read.path} does not say how long its sequences are: give --sequence-length.")
    stored = read.text("model.torch_dtype", "bfloat16")
    expert, expert_tensor = expert_ranks(read, "distributed.ep_size", model, tensor=tensor)
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=length,
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        zero=_zero(read, pipeline) if data * context > 1 else 0,
        optimizer=_optimizer(read),
        dtype=read.choice("distributed.mp_policy.param_dtype", stored, _DTYPES),
        lora=read.number("peft.dim", 0),
    )
    checkpointing = bool(read.get("distributed.activation_checkpointing", False))
    return ImportedJob(
        target="automodel",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=given.micro_batches or number,
        layers=layers,
        order=order,
        strategies=layer_strategies(range(model.layers)) if checkpointing else {},
        unread=tuple(_unread(read, options, pipeline=pipeline, micro_batches=number)),
    )


def _order(read: SettingsReader) -> str | Schedule:
    csv = read.text("distributed.pipeline.pp_schedule_csv", "")
    return order_of(read.text("distributed.pipeline.pp_schedule", "1F1B"), csv, read.path)


def _batch(read: SettingsReader, *, data: int, pipeline: int) -> tuple[int, int]:
    """Sequences per micro-batch, and micro-batches per step and replica.

    A pipeline divides a local batch; without one it is a micro-batch, and the gradients of several add up.
    """
    if pipeline == 1:
        size = read.size("step_scheduler.local_batch_size", 1)
        name = "step_scheduler.global_batch_size"
        return size, batches_in(read.size(name, size * data), size * data, read.path, name=name)
    size, name = read.size("distributed.pipeline.pp_microbatch_size", 1), "step_scheduler.local_batch_size"
    return size, batches_in(read.size(name, size), size, read.path, name=name)


def _zero(read: SettingsReader, pipeline: int) -> int:
    """Automodel keeps weights gathered over a pipeline, and gathers them again without one unless it is told not to."""
    if pipeline > 1:
        return 1
    if read.get("distributed.reshard_after_forward", True):
        return 3
    return 1 if _defers_gradients(read) else 2


def _defers_gradients(read: SettingsReader) -> bool:
    return bool(read.get("distributed.defer_fsdp_grad_sync", True))


def _model(read: SettingsReader) -> Model:
    model = hub_model(str(read.get("model.pretrained_model_name_or_path", "")))
    if model is None:
        raise InputError(f"{read.path} names no model that is known here: give it with --model.")
    return model


def _torch_names(dtype: str) -> tuple[str, str]:
    name = next(name for name, priced in _DTYPES.items() if priced == dtype)
    return name, f"torch.{name}"


def _optimizer(read: SettingsReader) -> str:
    name = _optimizer_class(read)
    if name == "SGD":
        return "momentum" if read.get("optimizer.momentum", 0) else "sgd"
    return _OPTIMIZERS.get(name, "adamw")


def _optimizer_class(read: SettingsReader) -> str:
    return str(read.get("optimizer._target_", "torch.optim.AdamW")).rpartition(".")[2]


def _unread(read: SettingsReader, options: RunOptions, *, pipeline: int, micro_batches: int) -> Iterator[str]:
    if options.zero == 3 and micro_batches > 1 and _defers_gradients(read):
        yield (
            "Gradients stay whole until the last micro-batch (defer_fsdp_grad_sync), which takes more memory than is"
            " predicted."
        )
    if pipeline > 1:
        yield from read.assume(
            "step_scheduler.global_batch_size", options.micro_batch_size * micro_batches * options.data
        )
    if _optimizer_class(read) not in {*_OPTIMIZERS, "SGD"}:
        yield f"optimizer._target_ is {_optimizer_class(read)}, and the prediction counts on AdamW."
    yield from read.assume("distributed.strategy", "fsdp2")
    yield from read.assume("distributed.sequence_parallel", options.tensor > 1, default=False)
    policy = "distributed.mp_policy."
    yield from read.assume(f"{policy}_target_", "torch.distributed.fsdp.MixedPrecisionPolicy")
    yield from read.assume(f"{policy}output_dtype", *_torch_names(options.dtype))
    yield from read.assume(f"{policy}reduce_dtype", *_torch_names("fp32"))
    yield from read.assume(f"{policy}cast_forward_inputs", True)
    yield from unread(read.left, _MAY_COST)
