"""NeMo Automodel: its YAML recipe, or the part of one that debubble writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from debubble.costs import framework_of_options, framework_with
from debubble.frameworks.automodel.export import resharding
from debubble.frameworks.torch.shared_settings import (
    balanced_layers,
    chunks_of,
    expert_ranks,
    layer_strategies,
    layers_of,
    order_of,
)
from debubble.imports.command_line import CommandLine
from debubble.imports.defaults import Defaults
from debubble.imports.job import Batch, ImportedJob, batches_in
from debubble.imports.registry import Importer, Settings, UserFacts, imports
from debubble.imports.settings import SettingsReader, read_settings
from debubble.imports.unread import Unread
from debubble.ir import InputError, RunOptions, Schedule
from debubble.models import Model, hub_model

_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "FusedAdam": "adamw"}
_DTYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "auto": "bf16", "bf16": "bf16", "fp16": "fp16",
    "fp32": "fp32",
}  # fmt: skip
_LENGTHS = ("sequence_length", "dataset.seq_length", "dataset.seq_len", "packed_sequence.packed_sequence_size")

DEFAULTS = Defaults("Automodel")
"""The recipes' base classes: weights in bf16, FSDP2, one sequence per batch."""
HARMLESS = """
    recipe recipe.* dist_env.* rng.* checkpoint.* loss_fn.* tokenizer.* validation.* validation_dataset.*
    validation_dataloader.* packed_sequence.split* logger.* wandb.* lr_scheduler.* dataloader.* dataset.*
    step_scheduler.ckpt_* step_scheduler.val_* step_scheduler.num_epochs step_scheduler.max_steps
    step_scheduler.save_* model._target_ model.config._target_ model.trust_remote_code
    model.config.trust_remote_code distributed.backend optimizer.foreach peft._target_ peft.alpha peft.dropout
    peft.dropout_position ci.* benchmark.* step_scheduler.gc_every_steps
"""
"""Entries that cost neither time nor memory of a step, besides those of all frameworks."""


_OLDER_NAMES = {
    "autopipeline.": "distributed.pipeline.",
    "parallelizer.activation_checkpointing": "distributed.activation_checkpointing",
    "moe_config.activation_checkpointing": "distributed.activation_checkpointing",
    "parallelizer.": "distributed.moe.",
    "moe_config.": "distributed.moe.",
    "distributed_config.": "distributed.",
}
"""How names of entries begin in older recipes -> how they do in newer ones."""
_STRATEGIES = {"FSDP2": "fsdp2", "MegatronFSDP": "megatron_fsdp", "DDP": "ddp"}
"""How the class begins that is the strategy in older recipes -> its name in newer ones."""


def read_recipe(path: Path, given: CommandLine | None = None) -> Settings:
    """The settings of a recipe and of the command line that starts it, by the names that newer recipes have."""
    settings = (given or CommandLine({})).changed(read_settings(path))
    return {newer: each for name, value in settings.items() for newer, each in _newer(name, value)}


def _newer(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The entry by its newer name; the classes of older sections say no more than the strategy."""
    older = next((each for each in _OLDER_NAMES if name.startswith(each)), "")
    if name in ("distributed._target_", "distributed_config._target_"):
        word = str(value).rpartition(".")[2]
        yield "distributed.strategy", next((_STRATEGIES[each] for each in _STRATEGIES if word.startswith(each)), word)
    elif not (older and name.endswith("._target_")):
        yield _OLDER_NAMES.get(older, "") + name.removeprefix(older), value


def switches(job: Settings, options: RunOptions) -> Iterator[Settings]:
    """Yield gradients that are divided after every micro-batch, and tokens that travel once to a device (DeepEP)."""
    framework = framework_of_options(options.framework)
    divided = {"distributed.defer_fsdp_grad_sync": False} if framework.defers_gradients else {}
    once: dict[str, Any] = {}
    if options.expert > 1 and not framework.dispatches_once:
        once = {"model.backend.dispatcher": "deepep", "model.backend.enable_deepep": True}
    yield from filter(None, (divided, once, {**divided, **once} if divided and once else {}))


def automodel(read: SettingsReader, given: UserFacts) -> ImportedJob:
    """Degrees, stages, order and recomputation of an Automodel recipe."""
    _check_recipe(read)
    model = given.model or _model(read)
    pipeline = read.size("distributed.pp_size", 1, instead=given.pipeline)
    tensor, context = read.size("distributed.tp_size", 1), read.size("distributed.cp_size", 1)
    data = read.size("distributed.dp_size", max(1, given.cluster.count // (pipeline * tensor * context)))
    batch = _batch(read, data=data, pipeline=pipeline)
    order = "1f1b" if pipeline == 1 else _order(read)
    parts = read.get("distributed.pipeline.module_fqns_per_model_part")
    layers = layers_of(parts) if parts else _split(read, model.layers, pipeline, order)
    said = [name for name in _LENGTHS if read.get(name) not in (None, 0)]
    length = given.sequence_length or next(map(read.size, said), None)
    if length is None:
        raise InputError(f"{read.path} does not say how long its sequences are: give --sequence-length.")
    expert, expert_tensor = expert_ranks(read, "distributed.ep_size", model, tensor=tensor)
    zero = _zero(read, pipeline, expert) if data * context > 1 else 0
    micro_batches = given.micro_batches or batch.number * batch.passes
    options = RunOptions(
        micro_batch_size=batch.size,
        sequence_length=length,
        tensor=tensor,
        data=data,
        context=context,
        expert=expert,
        expert_tensor=expert_tensor,
        zero=zero,
        optimizer=_optimizer(read),
        dtype=_dtype(read),
        master_dtype=_master_dtype(read),
        moment_dtype="bf16" if all(read.get(name) in _torch_names("bf16") for name in _MOMENTS) else "fp32",
        lora=_lora(read),
        quantize=_quantize(read),
        sequence_parallel=bool(read.get("distributed.sequence_parallel", False)) or tensor == 1,
        framework=framework_with(
            "automodel",
            gradient_bytes=2 if _reduces_in_16_bits(read) else None,
            dispatches_once=None if _dispatches_once(read) else False,
            defers_gradients=True if zero == 3 and micro_batches > 1 and _defers_gradients(read) else None,
        ),
    )
    checkpointing = bool(read.get("distributed.activation_checkpointing", False))
    return ImportedJob(
        target="automodel",
        model=model,
        options=options,
        pipeline=pipeline,
        micro_batches=micro_batches,
        passes=1 if given.micro_batches else batch.passes,
        layers=layers,
        order=order,
        strategies=layer_strategies(range(model.layers)) if checkpointing else {},
        gradients="bf16" if _reduces_in_16_bits(read) else "fp32",
        unsaid=read.unsaid(
            dtype=_DTYPE_NAMES,
            gradients=("distributed.mp_policy.reduce_dtype",),
            sequence_parallel=("distributed.sequence_parallel",),
            zero=("distributed.strategy", resharding(expert)),
        ),
        rest=Unread.of(read, _remarks(read, options, pipeline=pipeline)),
    )


imports.add(
    "automodel",
    Importer(
        name="automodel", read_job=automodel, settings=read_recipe, file="plan.yaml", defaults=DEFAULTS,
        harmless=HARMLESS, switches=switches, with_arguments=read_recipe,
        marks="step_scheduler.* distributed.* model.pretrained_model_name_or_path",
    ),
)  # fmt: skip


_RECIPES = (
    "TrainFinetuneRecipeForNextTokenPrediction", "BenchmarkingRecipeForNextTokenPrediction", "FinetuneRecipeForVLM",
    "FinetuneRecipeForMultimodal", "PretrainRecipeForMultimodal",
)  # fmt: skip
"""The recipes whose step is forward, loss on the next token, backward and optimizer."""


def _check_recipe(read: SettingsReader) -> None:
    """Raise InputError for a recipe whose step has a teacher, a second encoder, a draft model or another loss."""
    name = str(read.get("recipe", read.get("recipe._target_", _RECIPES[0]))).rpartition(".")[2]
    if name not in _RECIPES:
        raise InputError(
            f"{read.path}: {name} does more than train on the next token: to predict that alone, give --args"
            f" '--recipe {_RECIPES[0]}'."
        )


_COMPUTED = "distributed.mp_policy.param_dtype"
"""The dtype of computing: bf16 by the policy that Automodel has where a recipe gives none."""
_STORED = ("model.torch_dtype", "model.dtype", "model.config.torch_dtype")
"""Settings that say the dtype of stored weights, which is that of checkpoints where they are absent or `auto`; a policy
without a dtype computes in it."""
_DTYPE_NAMES = (_COMPUTED, *_STORED)


def _dtype(read: SettingsReader) -> str:
    if read.get("fp8.enabled", False) is True or read.get("model.backend.te_fp8.recipe") is not None:
        return "fp8"
    has_policy = any(name.startswith("distributed.mp_policy.") for name in read.settings)
    if has_policy and read.get(_COMPUTED) is None:
        return _stored(read)
    return read.choice(_COMPUTED, "bfloat16", _DTYPES)


def _stored(read: SettingsReader) -> str:
    said = [name for name in _STORED if read.get(name) not in (None, "auto")]
    return read.choice(said[0], "bfloat16", _DTYPES) if said else "bf16"


_MOMENTS = ("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype")
"""Settings that say the dtype of Transformer Engine's moments."""


def _master_dtype(read: SettingsReader) -> str:
    """The dtype of the weights that the optimizer steps: that of stored ones, but for Transformer Engine's masters."""
    masters = _optimizer_class(read) == "FusedAdam" and read.get("optimizer.master_weights", True) is not False
    return "bf16" if _stored(read) == "bf16" and _dtype(read) != "fp32" and not (masters or _lora(read)) else "fp32"


def _lora(read: SettingsReader) -> int:
    """The rank of the adapters, 8 where a recipe has some without a rank; 0: the whole model is trained."""
    return read.size("peft.dim", 8) if any(name.startswith("peft.") for name in read.settings) else 0


def _quantize(read: SettingsReader) -> str | None:
    """The format of bitsandbytes' frozen weights."""
    if not read.get("quantization.load_in_4bit", False):
        return None
    read.skip("quantization.")
    return "nf4-dq" if read.get("quantization.bnb_4bit_use_double_quant", False) else "nf4"


def _split(read: SettingsReader, layers: int, pipeline: int, order: str | Schedule) -> tuple[int, ...]:
    """Layers per stage: Automodel divides them evenly, into as many stages as `layers_per_stage` makes."""
    setting = "distributed.pipeline.layers_per_stage"
    if pipeline == 1:
        return (layers,)
    if read.get(setting) is None:
        return balanced_layers(layers, pipeline * chunks_of(order), first_less=0, last_less=0)
    per_stage = read.size(setting)
    stages = -(-layers // per_stage)
    rounding = read.get("distributed.pipeline.round_virtual_stages_to_pp_multiple")
    if rounding in ("up", "down"):
        stages += -stages % pipeline if rounding == "up" else -(stages % pipeline)
    alone = order in ("1f1b", "gpipe")
    if stages % pipeline or not stages or (stages == pipeline) != alone:
        raise InputError(
            f"{read.path}: {setting} is {per_stage}, which makes {stages} stages of {layers} layers over {pipeline}"
            f" pipeline devices, and the schedule needs {'one' if alone else 'two or more'} per device: choose another."
        )
    return balanced_layers(layers, stages, first_less=0, last_less=0)


def _order(read: SettingsReader) -> str | Schedule:
    csv = read.text("distributed.pipeline.pp_schedule_csv", "")
    return order_of(read.text("distributed.pipeline.pp_schedule", "1F1B"), csv, read.path)


def _batch(read: SettingsReader, *, data: int, pipeline: int) -> Batch:
    """The batch of a step and replica: a pipeline divides a local batch; without one it is a micro-batch."""
    local, whole = "step_scheduler.local_batch_size", "step_scheduler.global_batch_size"
    if pipeline == 1:
        size = read.size(local, 1)
        return Batch(size, batches_in(read.size(whole, size * data), size * data, read.path, name=whole), 1)
    size = read.size("distributed.pipeline.pp_microbatch_size", 1)
    number = batches_in(read.size(local, size), size, read.path, name=local)
    together = size * number * data
    return Batch(size, number, batches_in(read.size(whole, together), together, read.path, name=whole))


def _zero(read: SettingsReader, pipeline: int, expert: int) -> int:
    """FSDP keeps weights gathered over a pipeline, and, unless it is told otherwise, next to divided experts."""
    if read.get("distributed.strategy") == "ddp":
        return 0
    if pipeline > 1:
        return 1
    if read.get(resharding(expert), expert == 1):
        return 3
    return 1 if _defers_gradients(read) else 2


def _defers_gradients(read: SettingsReader) -> bool:
    return bool(read.get("distributed.defer_fsdp_grad_sync", True))


def _model(read: SettingsReader) -> Model:
    said = (read.get(f"model.{part}pretrained_model_name_or_path") for part in ("", "config."))
    name = next((str(each) for each in said if each is not None), None)
    model = None if name is None else hub_model(name)
    if model is None:
        named = "names no model" if name is None else f"names the model '{name}', which is not known here"
        raise InputError(f"{read.path} {named}: give it with --model.")
    return model


def _torch_names(dtype: str) -> tuple[str, str]:
    name = next(name for name, priced in _DTYPES.items() if priced == dtype.replace("fp8", "bf16"))
    return name, f"torch.{name}"


def _optimizer(read: SettingsReader) -> str:
    name = _optimizer_class(read)
    if name == "SGD":
        return "momentum" if read.get("optimizer.momentum", 0) else "sgd"
    return _OPTIMIZERS.get(name, "adamw")


def _optimizer_class(read: SettingsReader) -> str:
    return str(read.get("optimizer._target_", "torch.optim.AdamW")).rpartition(".")[2]


def _dispatches_once(read: SettingsReader) -> bool:
    """Tell whether tokens travel by DeepEP or HybridEP, as they do by default."""
    enabled, dispatcher = (read.get(f"model.backend.{name}") for name in ("enable_deepep", "dispatcher"))
    return enabled is not False and dispatcher != "torch"


def _reduces_in_16_bits(read: SettingsReader) -> bool:
    """Tell whether gradients are summed in bf16."""
    return read.get("distributed.mp_policy.reduce_dtype") in _torch_names("bf16")


def _remarks(read: SettingsReader, options: RunOptions, *, pipeline: int) -> Iterator[str]:
    if pipeline == 1:
        read.skip("distributed.pipeline.")
    for part in ("compile", "fp8"):
        if read.settings.get(f"{part}.enabled", False) is False:
            read.skip(f"{part}.")
    if options.lora and read.get("peft.match_all_linear", True) is not True:
        yield "peft.match_all_linear is off, and the prediction counts on adapters of all linear layers."
    if options.quantize and read.get("quantization.bnb_4bit_quant_type", "nf4") != "nf4":
        yield "quantization.bnb_4bit_quant_type is another than nf4, and the prediction counts on nf4."
    if _optimizer_class(read) not in {*_OPTIMIZERS, "SGD"}:
        yield f"optimizer._target_ is {_optimizer_class(read)}, and the prediction counts on AdamW."
    if options.master_dtype == "bf16" and options.moment_dtype == "fp32" and _optimizer_class(read) == "FusedAdam":
        yield "Transformer Engine's moments are in fp32, and predicted in bf16 as the weights are."
    yield from read.assume("distributed.strategy", "fsdp2", "ddp")
    policy = "distributed.mp_policy."
    yield from read.assume(f"{policy}_target_", "torch.distributed.fsdp.MixedPrecisionPolicy")
    yield from read.assume(f"{policy}output_dtype", *_torch_names(options.dtype))
    yield from read.assume(f"{policy}reduce_dtype", *_torch_names("fp32"), *_torch_names("bf16"))
    yield from read.assume(f"{policy}cast_forward_inputs", True)
