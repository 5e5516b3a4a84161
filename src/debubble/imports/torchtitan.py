"""torchtitan: a TOML or JSON configuration, or the recipe that debubble writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from debubble.imports.job import ImportedJob, batches_in
from debubble.imports.model import hub_model
from debubble.imports.registry import UserFacts, importer
from debubble.imports.settings import SettingsReader, read_constants, read_settings, unread
from debubble.imports.torch_hosts import balanced_layers, chunks_of, expert_ranks, layer_strategies, layers_of, order_of
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model

RECOMPUTED = "plan.py: RECOMPUTED_LAYERS"
"""The setting of debubble's own recipe, in place of a checkpointing mode."""
LOCAL = "training.local_batch_size"
_FLAVORS = {
    "deepseek_v3-671B": "deepseek-v3",
    "llama4-17bx16e": "llama4-scout",
    "llama4-17bx128e": "llama4-maverick",
}
"""torchtitan's models and flavors that have another name here."""
_DTYPES = {"bfloat16": "bf16", "float32": "fp32"}
_MAY_COST = re.compile(
    r"compile|float8|mx|async_tp|offload|reshard|parallel|checkpoint_mode|memory_budget|activation_checkpoint|quantiz|training\.(dtype|enable)"
)
"""Words in the names of settings that change time or memory of a step."""


def read_recipe(path: Path) -> Mapping[str, Any]:
    """The settings of a configuration, or of the constants of debubble's own recipe, which is not run.

    Raises:
        InputError: if it is neither.
    """
    if path.suffix != ".py":
        return read_settings(path)
    constants = read_constants(path)
    if "PARALLELISM" not in constants:
        raise InputError(f"{path} is no recipe of debubble's: it has no PARALLELISM.")
    return dict(_of_recipe(constants))


def _of_recipe(constants: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in constants["PARALLELISM"].items():
        yield f"parallelism.{name}", value
    for name, value in constants["TRAINING"].items():
        yield f"training.{name}", value
    yield "training.seq_len", constants["SEQUENCE_LENGTH"]
    number, size = constants["MICRO_BATCHES"], constants["MICRO_BATCH_SIZE"]
    if constants["MODULES"] is None:
        yield "training.local_batch_size", size
        yield "training.global_batch_size", number * size * constants["PARALLELISM"]["data_parallel_shard_degree"]
    else:
        yield "parallelism.module_fqns_per_model_part", constants["MODULES"]
        yield "parallelism.pipeline_parallel_schedule_csv", "schedule.csv"
        yield "parallelism.num_pp_microbatches", number
        yield "parallelism.pipeline_parallel_microbatch_size", size
    if constants["RECOMPUTED_LAYERS"]:
        yield RECOMPUTED, sorted(constants["RECOMPUTED_LAYERS"])
    else:
        yield "activation_checkpoint.mode", "none"


@importer("torchtitan", settings=read_recipe, file="plan.py")
def torchtitan(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """Degrees, stages, order and recomputation of a torchtitan configuration."""
    model = given.model or _model(read)
    pipeline = read.size("parallelism.pipeline_parallel_degree", 1, instead=given.pipeline)
    tensor = read.size("parallelism.tensor_parallel_degree", 1)
    context = read.size("parallelism.context_parallel_degree", 1)
    replicas = read.size("parallelism.data_parallel_replicate_degree", 1)
    sharded = max(1, given.cluster.count // (pipeline * tensor * context * replicas))
    if read.number("parallelism.data_parallel_shard_degree", -1) != -1:
        sharded = read.size("parallelism.data_parallel_shard_degree")
    data = replicas * sharded
    length = _length(read, given.sequence_length)
    size, number = _batch(read, length, data=data, pipeline=pipeline)
    order = "1f1b" if pipeline == 1 else _order(read)
    parts = read.get("parallelism.module_fqns_per_model_part")
    layers = layers_of(parts) if parts else _split(read, model, pipeline, chunks_of(order))
    expert, expert_tensor = expert_ranks(read, "parallelism.expert_parallel_degree", model, tensor=tensor)
    options = RunOptions(
        micro_batch_size=size,
        sequence_length=length,
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        zero=_zero(read, pipeline) if data * context > 1 else 0,
        optimizer=str(read.get("optimizer.name", "AdamW")).lower(),
        dtype=read.choice("training.mixed_precision_param", "bfloat16", _DTYPES),
    )
    return ImportedJob(
        target="torchtitan",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=given.micro_batches or number,
        layers=layers,
        order=order,
        strategies=_strategies(read, model),
        unread=tuple(_unread(read, options)),
    )


def _order(read: SettingsReader) -> str | Schedule:
    return order_of(
        read.text("parallelism.pipeline_parallel_schedule", "1F1B"),
        read.text("parallelism.pipeline_parallel_schedule_csv", ""),
        read.path,
    )


def _length(read: SettingsReader, instead: int | None) -> int:
    """Tokens per sequence, in the words of the development version or of 0.3.0, unless they are given."""
    name = "training.max_context_length"
    return read.size(name if read.get(name) is not None else "training.seq_len", instead=instead)


def _batch(read: SettingsReader, length: int, *, data: int, pipeline: int) -> tuple[int, int]:
    """Sequences per micro-batch, and micro-batches per step and replica.

    A pipeline divides a local batch; without one it is a micro-batch, and the gradients of several add up to the global
    batch.  torchtitan's development version counts tokens in place of sequences.
    """
    tokens = "training.num_tokens_per_microbatch_per_dp_rank"
    if read.get(tokens) is not None:
        size = max(1, read.size(tokens) // length)
        local, of_step = size, read.number("training.num_tokens_per_train_step", -1) // length
        number = read.size("parallelism.num_pp_microbatches", 1)
    else:
        whole = read.size(LOCAL, 8 if pipeline == 1 else 1)
        size = whole if pipeline == 1 else read.size("parallelism.pipeline_parallel_microbatch_size", 1)
        local, of_step = whole, read.number("training.global_batch_size", -1)
        count = "parallelism.num_pp_microbatches"
        number = read.size(count) if read.get(count) else batches_in(whole, size, read.path, name=LOCAL)
    if pipeline > 1:
        return size, number
    return size, 1 if of_step < 0 else batches_in(of_step, local * data, read.path, name="training.global_batch_size")


def _zero(read: SettingsReader, pipeline: int) -> int:
    """FSDP over a pipeline reduces gradients once; without one after each micro-batch."""
    if pipeline > 1:
        return 1
    return 2 if read.get("parallelism.fsdp_reshard_after_forward", "default") == "never" else 3


def _model(read: SettingsReader) -> Model:
    """The known model, without vision towers and layers that predict further tokens, which torchtitan's models lack."""
    read.skip("model_spec.model.")
    name = read.get("model.name") or read.get("model_spec.name", "")
    flavor = read.get("model.flavor") or read.get("model_spec.flavor", "")
    short = {"llama3": "llama3.1"}.get(name, name)
    known = hub_model(_FLAVORS.get(f"{name}-{flavor}", f"{short}-{flavor}"))
    if known is None:
        raise InputError(f"{read.path} does not describe its model in a way that is known here: give it with --model.")
    text = known if known.vision is None else Model.from_hf(known.config["text_config"])
    return Model.from_hf({**text.config, "num_nextn_predict_layers": 0}) if text.mtp_layers else text


def _split(read: SettingsReader, model: Model, pipeline: int, chunks: int) -> tuple[int, ...]:
    """Torchtitan's own split into stages."""
    first = read.size("parallelism.pipeline_parallel_first_stage_less_layers", 1)
    last = read.size("parallelism.pipeline_parallel_last_stage_less_layers", 1)
    per_stage = read.number("parallelism.pipeline_parallel_layers_per_stage", 0)
    stages = -(-(model.layers + first + last) // per_stage) if per_stage else pipeline * chunks
    if stages % pipeline:
        raise InputError(f"{stages} stages cannot be divided over {pipeline} pipeline devices.")
    return balanced_layers(model.layers, stages, first_less=first, last_less=last)


def _strategies(read: SettingsReader, model: Model) -> dict[int, tuple[str, str]]:
    planned = read.numbers(RECOMPUTED)
    if planned:
        return layer_strategies(planned)
    policy = _policy(read)
    if policy == "full":
        return layer_strategies(range(model.layers))
    if policy.isdigit() and int(policy):
        return layer_strategies(range(int(policy) - 1, model.layers, int(policy)))
    return layer_strategies(range(model.layers), "norm+activation+multiply") if policy == "op" else {}


def _policy(read: SettingsReader) -> str:
    """`none`, `full`, `op` (selective by operators), `memory_budget`, or a number n: every n-th layer.

    A configuration that torchtitan saved has no name for its policy, but the settings of one.
    """
    mode = read.get("activation_checkpoint.mode")
    if mode == "selective":
        return str(read.get("activation_checkpoint.selective_ac_option", "op"))
    if mode is not None:
        return str(mode)
    own = {"force_recompute_mm_shapes_by_fqns": "op", "memory_budget": "memory_budget", "preserve_rng_state": "full"}
    return next((policy for name, policy in own.items() if f"activation_checkpoint.{name}" in read), "none")


def _unread(read: SettingsReader, options: RunOptions) -> Iterator[str]:
    policy = _policy(read)
    if policy == "op":
        yield (
            "Selective checkpointing by operators is predicted as that of norms, activation functions and multiplies:"
            " every second product, which it recomputes too, is predicted to be kept."
        )
    if policy == "memory_budget":
        yield "activation_checkpoint.memory_budget: what the compiler recomputes is predicted to be kept."
    if read.number("parallelism.data_parallel_replicate_degree", 1) > 1:
        yield "Replicas that FSDP does not divide (data_parallel_replicate_degree) are predicted as divided ones."
    if not read.get("parallelism.enable_sequence_parallel", True) and options.tensor > 1:
        yield "parallelism.enable_sequence_parallel is off, and the prediction counts on it."
    yield from read.assume("training.dtype", "float32")
    yield from unread(read.left, _MAY_COST)
